// Copies inside one rank, of host or device memory. Private to group/.
// Thread safety: a function without state.
#pragma once

#include <cstddef>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::internal {

// As memmove. Of device memory, which op says, the copy is enqueued in the current stream of op's device; the two
// must not overlap then.
void copy_bytes(void* to, const void* from, std::size_t n_bytes, const lockstep_op& op);
// Blocks until what the current stream of op's device holds has completed; nothing for host memory.
void await_copies(const lockstep_op& op);

}  // namespace lockstep::internal
