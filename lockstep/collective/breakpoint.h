// A place where one rank stops for a debugger while the others wait for it.
//
//   lockstep::breakpoint({.rank = 1});  // rank 1 prints "gdb -p 4711" and waits; the others wait for rank 1
//
// A collective over the default group: every rank calls it.
// Thread safety: as collectives.h: any thread of the rank, in the same order on every rank.
#pragma once

#include <source_location>

#include "lockstep/base/deadline.h"

namespace lockstep {

struct BreakpointOptions {
  int rank = 0;  // in the world
  int skip = 0;  // pass this many times before stopping; counted per line of the caller and per world
  Milliseconds timeout{3600 * 1000};
  std::source_location where = std::source_location::current();
};
// On `rank`: prints on stderr how to attach a debugger, waits until one is attached (no wait when the program
// already runs under one), then stops there as at a breakpoint; "continue" resumes the program, "up" leads to
// the caller. If no debugger attaches within the timeout, it logs a warning and continues. The other ranks
// wait until that rank continues. Before that, the timeout of every group of this rank is raised to at least
// `timeout`, so that nothing else times out in the meantime.
// Raises kUsage for a rank outside the world, a negative skip or a timeout that is not positive, and the
// errors of a barrier.
void breakpoint(BreakpointOptions options = {});

}  // namespace lockstep
