// Gradients packed into memory that all ranks share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep::internal {

struct FlatViews {
  at::Tensor flat;                // as an engine reduces it: 1-D, real; complex numbers are pairs
  std::vector<at::Tensor> views;  // one per tensor, with its strides if these are dense
};
// For tensors of one type, at least one; uninitialised, and of type `dtype` if given. To autograd the views
// are plain tensors. Raises kResource when the memory cannot be allocated.
FlatViews flat_views(const std::vector<at::Tensor>& like, const Group& group,
                     std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace lockstep::internal
