// The built-in engine: ranks of one host over shared memory, as processes or as threads of one process.
//
// Each rank owns an arena, a sealed memfd that all others map. In it lie one block per communicator (what this rank is
// doing there), staging areas, mail and a heap. A collective begins with every rank publishing what it was called with; the
// calls are compared, so a mismatch between ranks is an error that names both lines. Then, by size and place:
//   inline   up to 8 KiB (128 B where buffers lie in the arenas): the payload travels beside the flag, every rank reduces
//            for itself, nobody waits twice
//   direct   buffers in the arenas (alloc), in one process, or where the kernel copies between processes: slices are
//            claimed and reduced where they lie
//   staged   anything else: through cache-sized chunks in the arenas, by a plan (plan.h)
// Once an error has been returned nobody writes into the caller's memory any more (internal/buffer_ref.h, take_back).
// Sends and receives stand beside that (internal/message_matcher.h).
// Operand order is rank order everywhere: results have the same bits on every rank and in every run.
//
// Files, in reading order: kernels.h (arithmetic), plan.h (who copies what when), internal/layout.h (what lies in the
// arena), internal/host_peers.h (how ranks meet), internal/comm_members.h (some of them), internal/buffer_ref.h (buffers of others), internal/push.h (writing to them),
// internal/operation.h (one collective), internal/message_matcher.h (messages), internal/host_communicator.h (queue, waiting,
// failure), internal/progress_service.h (threads), host_engine.cpp (the C table).
#pragma once

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm {

// The engine's table; valid for ever. Thread safe.
const lockstep_engine* host_engine();

}  // namespace lockstep::comm
