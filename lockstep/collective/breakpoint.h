// A place where one rank stops for a debugger while the others wait for it.
//
//   lockstep::breakpoint({.rank = 1});  // rank 1 says "gdb -p 4711" and waits; the others wait for rank 1
//
// A collective over the default group: every rank calls it.
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
// On `rank`: tells on stderr how to attach a debugger and waits until one is attached (at once when the program runs under
// one), then stops there as at a breakpoint; "continue" goes on, "up" leads to the caller. Without a debugger within the
// timeout it warns and goes on. The others wait until that rank goes on. Before that every group of this world gets at
// least `timeout` as its own, so that nothing else runs out of time meanwhile.
// Raises kUsage for a rank that is none, a negative skip or a timeout that is not positive, and the errors of a barrier.
void breakpoint(BreakpointOptions options = {});

}  // namespace lockstep
