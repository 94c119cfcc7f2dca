#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/nn/checkpoint.h"
#include "lockstep/nn/detail/checkpoint_core.h"
#include "lockstep/nn/internal/forward_state.h"
#include "lockstep/tensor/gradient_access.h"

namespace lockstep::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Region : torch::CustomClassHolder {
  Region(CheckpointRun run_again, ForwardState forward_state)
      : again(std::move(run_again)), state(std::move(forward_state)) {}
  CheckpointRun again;
  ForwardState state;
  std::vector<std::vector<std::int64_t>> sizes{};  // of the first run's results
};

void check_same(const Region& region, const variable_list& outputs) {
  if (outputs.size() != region.sizes.size()) {
    base::raise(ErrorKind::kUsage, base::cat("checkpoint: the second run of the function returned ",
                                             outputs.size(), " tensors, the first ", region.sizes.size(),
                                             "; it must compute the same each time"));
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].sizes() == at::IntArrayRef(region.sizes[i])) continue;
    base::raise(ErrorKind::kUsage,
                base::cat("checkpoint: result ", i, " of the function was ", at::IntArrayRef(region.sizes[i]),
                          " in the first run and is ", outputs[i].sizes(),
                          " in the second; it must compute the same each time"));
  }
}

// Forward runs the function without recording a graph and saves the inputs only. Backward runs it again with
// a graph, on detached inputs, and runs a nested backward pass through that: the parameters inside get their
// gradients there, the inputs' are returned.
class Reentrant : public torch::autograd::Function<Reentrant> {
 public:
  static variable_list forward(AutogradContext* context, at::ArrayRef<at::Tensor> inputs,
                               const CheckpointRun& first, const c10::intrusive_ptr<Region>& region) {
    context->set_materialize_grads(false);
    context->save_for_backward(inputs.vec());
    context->saved_data["region"] = c10::IValue::make_capsule(region);
    variable_list outputs = first(inputs.vec()), unchanged;
    for (const at::Tensor& output : outputs) {
      region->sizes.push_back(output.sizes().vec());
      if (!torch::autograd::isDifferentiableType(output.scalar_type())) unchanged.push_back(output);
    }
    context->mark_non_differentiable(unchanged);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      base::raise(
          ErrorKind::kUsage,
          "checkpoint with use_reentrant works with backward() only, not with torch::autograd::grad or with "
          "backward() for chosen inputs; leave use_reentrant off");
    }
    if (in_redirected_backward()) {
      base::raise(
          ErrorKind::kUsage,
          "checkpoint with use_reentrant works with backward() only, not with autograd::backward across "
          "workers: its gradients would miss the context; leave use_reentrant off");
    }
    const auto region = c10::static_intrusive_pointer_cast<Region>(context->saved_data["region"].toCapsule());
    variable_list inputs = context->get_saved_variables();
    for (at::Tensor& input : inputs) {
      if (input.defined()) input = input.detach().requires_grad_(input.requires_grad());
    }
    variable_list outputs;
    {
      // Random numbers, autocast and the like as in the first run, otherwise the second would compute
      // something else.
      const ForwardState::Restored as_then(region->state);
      const at::AutoGradMode with_graph(true);
      outputs = region->again(inputs);
    }
    check_same(*region, outputs);
    variable_list roots, root_gradients;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    variable_list result;
    for (const at::Tensor& input : inputs) result.push_back(input.defined() ? input.grad() : at::Tensor());
    result.emplace_back();  // for `first`
    result.emplace_back();  // for `region`
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> checkpoint_reentrant(const Checkpoint& options, const std::vector<at::Tensor>& inputs,
                                             const CheckpointRun& first, CheckpointRun again) {
  const auto wants = [](const at::Tensor& input) { return input.defined() && input.requires_grad(); };
  if (std::ranges::none_of(inputs, wants)) {
    base::log(
        LogLevel::kWarn,
        "checkpoint with use_reentrant: no tensor among the arguments requires a gradient, so neither they "
        "nor the "
        "parameters in the function get any; leave use_reentrant off");
  }
  auto region =
      c10::make_intrusive<Region>(std::move(again), ForwardState::now(inputs, options.preserve_rng_state));
  return Reentrant::apply(at::ArrayRef<at::Tensor>(inputs), first, region);
}

}  // namespace lockstep::internal
