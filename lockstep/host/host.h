// The built-in engine: ranks of one host over shared memory, as processes or as threads of one process.
//
// Each rank owns an arena, a sealed memfd that all others map. In it lie a control block (what this rank is doing),
// a small staging area and a heap. A collective begins with every rank publishing what it was called with; the
// calls are compared, so a mismatch between ranks is an error that names both lines. Then, by size and place:
//   inline   up to 8 KiB (1 KiB where direct is possible): the payload travels beside the flag, every rank reduces for
//            itself, nobody waits twice
//   direct   buffers in the arenas (alloc), or all ranks in one process: slices are claimed and reduced where they lie
//   staged   anything else: through cache-sized chunks in the arenas, by a plan (plan.h)
// Operand order is rank order everywhere: results have the same bits on every rank and in every run.
//
// Files, in reading order: kernels.h (arithmetic), plan.h (who copies what when), internal/layout.h (what lies in the
// arena), internal/fabric.h (how ranks meet), internal/operation.h (one collective), internal/communicator.h
// (their queue, waiting, failure), host_engine.cpp (the C table).
#pragma once

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm {

// The engine's table; valid for ever. Thread safe.
const lockstep_engine* host_engine();

}  // namespace lockstep::comm
