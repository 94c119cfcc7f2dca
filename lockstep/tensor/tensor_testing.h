// For tests above this folder.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::tensor_testing {

// Values of its own per (seed, shape): the default generator is shared by rank threads.
inline at::Tensor drawn(std::uint64_t seed, at::IntArrayRef sizes) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kFloat));
}

// What the Error says that `call` raises.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace lockstep::tensor_testing
