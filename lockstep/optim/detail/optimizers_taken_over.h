// Optimizers in backward (in_backward.h) that another component steps: DDP, which must average the gradient
// first.
// Thread safety: one thread at a time per parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

namespace lockstep::internal {

// The optimizers of a parameter, in the order of the calls. backward no longer calls them: the caller steps
// them and releases the gradient.
std::vector<std::shared_ptr<torch::optim::Optimizer>> take_over_optimizers_in_backward(
    const at::Tensor& parameter);
// Reverts it: backward calls them again.
void give_back_optimizers_in_backward(const at::Tensor& parameter);

}  // namespace lockstep::internal
