// Optimizers that step inside backward(): each parameter has its own, which runs as soon as the parameter's
// gradient is complete; the gradient is then released. The gradients never exist all at once, and the
// training loop needs no step() and no zero_grad().
//
//   auto steps = lockstep::apply_optimizer_in_backward<torch::optim::SGD>(net->parameters(),
//                                                                         torch::optim::SGDOptions(0.1));
//   loss.backward();  // the parameters are updated
//
// Thread safety: hooks run on the thread that runs backward; everything else one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep {

struct InBackwardOptions {
  // False: the optimizers are only registered, and another component calls them (a DDP reducer, once
  // gradients are averaged).
  bool register_hook = true;
};

// Owns the optimizers; after its destruction backward no longer steps with them. A parameter cannot own its
// optimizer, since the optimizer holds the parameter: the reference cycle would leak both.
class [[nodiscard]] OptimizersInBackward {
 public:
  OptimizersInBackward() = default;
  // One per parameter, in order: for learning rates and state.
  const std::vector<std::shared_ptr<torch::optim::Optimizer>>& optimizers() const { return optimizers_; }

  // Private to the function below.
  using Make = std::function<std::shared_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters)>;
  OptimizersInBackward(const std::vector<at::Tensor>& parameters, const Make& make,
                       InBackwardOptions options);

 private:
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers_;
};

// One Optim with these options for each parameter. A second call adds another: they step in the order of the
// calls, then the gradient is released. Raises kUsage for a parameter that is undefined, not a leaf, or does
// not require a gradient.
template <class Optim, class Options>
OptimizersInBackward apply_optimizer_in_backward(const std::vector<at::Tensor>& parameters,
                                                 const Options& optimizer_options,
                                                 InBackwardOptions options = {}) {
  return {
      parameters,
      [&](std::vector<at::Tensor> one) { return std::make_shared<Optim>(std::move(one), optimizer_options); },
      options};
}

// The optimizers of a parameter, in the order of the calls, with or without hook.
std::vector<std::shared_ptr<torch::optim::Optimizer>> get_optimizers_in_backward(const at::Tensor& parameter);

}  // namespace lockstep
