// Lookups in a table whose rows are cut over the ranks. The gradient of libtorch's own embedding does not know
// how the table is placed, and every rank would compute the gradient of all rows to keep its own; here it
// computes those of its rows only. Thread safety: as the mesh's groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep::dtensor_internal {

struct LookupOptions {
  std::int64_t padding_idx = -1;  // has no gradient; -1: none
  bool scale_grad_by_freq = false;
};

// Whether this is a sharded table to which embed_rows applies.
bool cuts_rows(const at::Tensor& table);

// at::embedding, recorded so that the gradient is placed as the table on the mesh dimensions that cut it.
at::Tensor embed_rows(const at::Tensor& table, const at::Tensor& indices, LookupOptions options);

}  // namespace lockstep::dtensor_internal
