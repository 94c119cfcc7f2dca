// Large reductions and broadcasts, in blocks and chunks. A block is the part of the vector one rank is responsible for;
// a chunk is the part of a block that moves as one message. Called when all ranks' calls are known to belong together.
#pragma once

#include "engines/gloo/collectives.h"

namespace lockstep::gloo_plugin {

// ALL_REDUCE, REDUCE and REDUCE_SCATTER: every rank gets the others' chunks of its block, reduces them in rank order, and
// sends the result to whom it belongs.
void block_reduce(Session& session, Operation& operation);

// BROADCAST: the root sends each other rank one block, which that rank passes on to the rest. `data` is sent from at the
// root and received into elsewhere.
void broadcast_in_blocks(Session& session, Operation& operation, char* data, std::size_t n_bytes);

}  // namespace lockstep::gloo_plugin
