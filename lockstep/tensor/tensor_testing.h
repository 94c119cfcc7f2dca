// For tests: tensors that every rank can make for itself.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>

#include <cstdint>

namespace lockstep::tensor_testing {

// Normally distributed values of its own per (seed, shape): the default generator is shared by rank threads.
inline at::Tensor drawn(std::uint64_t seed, at::IntArrayRef sizes) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kFloat));
}

}  // namespace lockstep::tensor_testing
