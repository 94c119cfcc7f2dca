// Arguments for every operator that has a rule, for the test that compares each with plain tensors. Tests
// only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <map>
#include <string>
#include <vector>

#include "lockstep/dtensor/internal/op_call.h"

namespace lockstep::dtensor_internal {

// One or more lists of arguments, tensors plain. By the operator's name where the table has it, else made
// from its schema: tensors of one size, dimensions 1, numbers 0.5.
std::vector<torch::jit::Stack> samples_of(const Operator& op);

// The table, in parts, and what its rows are made of.
namespace samples {
using Integers = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;
using torch::jit::Stack;
using Table = std::map<std::string, std::vector<Stack>>;

// Different in every element, between 0.1 and 0.9, where most functions are defined and no two elements are
// equal.
at::Tensor some(at::IntArrayRef sizes, double shift = 0);
at::Tensor whole_numbers(at::IntArrayRef sizes, std::int64_t below, std::int64_t shift = 0);
at::Tensor truths(at::IntArrayRef sizes);
inline c10::IValue none() {
  return {};
}

Table element_samples();
Table view_samples();
Table layer_samples();
}  // namespace samples

}  // namespace lockstep::dtensor_internal
