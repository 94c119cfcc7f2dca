// Large reductions and broadcasts, in slices and chunks. A slice is the part of the vector one rank is
// responsible for; a chunk is the part of a slice that moves as one message. Called when all ranks' calls are
// known to belong together.
#pragma once

#include "engines/gloo/collectives.h"

namespace lockstep::gloo_plugin {

// ALL_REDUCE, REDUCE and REDUCE_SCATTER: every rank gets the others' chunks of its slice, reduces them in
// rank order, and sends the result to whom it belongs.
void slice_reduce(Session& session, Operation& operation);

// BROADCAST: the root sends each other rank one slice, which that rank passes on to the rest. `data` is sent
// from at the root and received into elsewhere.
void broadcast_in_slices(Session& session, Operation& operation, char* data, std::size_t n_bytes);

}  // namespace lockstep::gloo_plugin
