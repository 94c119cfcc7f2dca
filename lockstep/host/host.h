// The built-in engine: ranks of one host over shared memory, as processes or as threads of one process.
//
// Each rank owns an arena, a sealed memfd that all others map. It holds one block per communicator (what this
// rank is doing there), staging areas, send queues and a heap. A collective begins with every rank publishing
// what it was called with; the calls are compared, so a mismatch between ranks is an error that names both
// lines. Then, by size and location:
//   inline   up to 8 KiB (128 B where buffers are in the arenas): the payload is sent beside the flag, every
//            rank reduces for itself, no rank waits twice
//   direct   buffers in the arenas (alloc), in one process, or where the kernel copies between processes:
//            slices are claimed and reduced in place
//   staged   anything else: through cache-sized chunks in the arenas, by a plan (plan.h)
// Once an error has been returned no rank writes into the caller's memory any more (internal/buffer_ref.h,
// take_back). Sends and receives run independently of collectives (internal/message_matcher.h).
// Operand order is rank order everywhere: results have the same bits on every rank and in every run.
//
// Files, in reading order: kernels.h (arithmetic), plan.h (who copies what when), internal/layout.h (what is
// in an arena), internal/host_peers.h (how ranks find each other), internal/comm_members.h (the ranks of one
// communicator), internal/buffer_ref.h (buffers of other ranks), internal/push.h (writing to them),
// internal/operation.h (one collective), internal/message_matcher.h (send and receive),
// internal/host_communicator.h (queue, waiting, failure), internal/progress_service.h (threads),
// host_engine.cpp (the C table).
// Thread safety: every entry of the table may be called from any thread, within the rules of engine_abi.h.
#pragma once

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm {

// The engine's table; valid for the life of the process.
const lockstep_engine* host_engine();

}  // namespace lockstep::comm
