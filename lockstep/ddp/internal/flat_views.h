// Gradients side by side in memory that all ranks share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep::internal {

struct FlatViews {
  at::Tensor flat;                // as an engine reduces it: 1-D, real; complex numbers are pairs
  std::vector<at::Tensor> views;  // one per tensor, with its strides where these are dense
};
// For tensors of one type, at least one; uninitialised, and in `dtype` where it is given. The views are plain tensors to autograd. Raises kResource when
// the memory is not to be had.
FlatViews flat_views(const std::vector<at::Tensor>& like, const Group& group,
                     std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace lockstep::internal
