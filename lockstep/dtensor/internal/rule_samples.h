// Arguments for every operator that has a rule, for the test that compares each with plain tensors. Tests
// only.
#pragma once

#include <ATen/core/stack.h>

#include <vector>

#include "lockstep/dtensor/internal/op_call.h"

namespace lockstep::dtensor_internal {

// One or more lists of arguments, tensors plain. By the operator's name where the table has it, else made
// from its schema: tensors of one size, dimensions 1, numbers 0.5.
std::vector<torch::jit::Stack> samples_of(const Operator& op);

}  // namespace lockstep::dtensor_internal
