// Random operators on sharded tensors: every rank draws the numbers of the whole tensor from a generator that
// all ranks advance alike, and keeps those of its piece. The result is that of one process with the same
// seed, on any mesh, without communication.
#pragma once

#include <ATen/core/stack.h>

#include "lockstep/dtensor/internal/op_call.h"

namespace lockstep::dtensor_internal {

// kUsage when the mesh has no seed yet (manual_seed) and the call names no generator.
void run_random(OpCall& call, torch::jit::Stack& stack);

}  // namespace lockstep::dtensor_internal
