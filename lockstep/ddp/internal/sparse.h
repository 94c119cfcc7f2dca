// Sparse gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>

namespace lockstep::internal {

// A gradient without entries, row-sparse like an embedding's.
inline at::Tensor no_entries(const at::Tensor& parameter) {
  auto sizes = parameter.sizes().vec();
  sizes[0] = 0;
  const auto options = parameter.options().requires_grad(false);
  return at::sparse_coo_tensor(at::empty({1, 0}, options.dtype(at::kLong)), at::empty(sizes, options),
                               parameter.sizes());
}

}  // namespace lockstep::internal
