#include "lockstep/optim/in_backward.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/detail/optimizers_taken_over.h"

namespace lockstep {
namespace {

using torch::autograd::PostAccumulateGradHook;
using torch::optim::Optimizer;

// In the one place a parameter has for such a hook; a hook that was there before goes on working. Optimizers
// are held weakly: they belong to the OptimizersInBackward, and a parameter may outlive it. taken_over: DDP
// steps them itself, once the gradient is averaged.
class StepHook final : public PostAccumulateGradHook {
 public:
  struct Entry {
    std::weak_ptr<Optimizer> optimizer;
    bool fires;
    bool taken_over = false;
  };

  explicit StepHook(std::unique_ptr<PostAccumulateGradHook> before) : before_(std::move(before)) {}

  void operator()(const at::Tensor& parameter) override {
    if (before_) (*before_)(parameter);
    bool stepped = false;
    for (const Entry& entry : entries) {
      const auto optimizer = entry.fires && !entry.taken_over ? entry.optimizer.lock() : nullptr;
      if (!optimizer) continue;
      optimizer->step();
      stepped = true;
    }
    if (stepped) parameter.mutable_grad().reset();
  }

  std::vector<Entry> entries;

 private:
  const std::unique_ptr<PostAccumulateGradHook> before_;
};

StepHook* hook_of(const at::Tensor& parameter) {
  if (!parameter.defined() || torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  return dynamic_cast<StepHook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
}

void add(const at::Tensor& parameter, const std::shared_ptr<Optimizer>& optimizer, bool fires) {
  StepHook* hook = hook_of(parameter);
  if (hook == nullptr) {
    auto made = std::make_unique<StepHook>(std::move(torch::autograd::impl::post_acc_grad_hooks(parameter)));
    hook = made.get();
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(made));
  }
  std::erase_if(hook->entries, [](const StepHook::Entry& entry) { return entry.optimizer.expired(); });
  hook->entries.push_back({optimizer, fires});
}

}  // namespace

OptimizersInBackward::OptimizersInBackward(const std::vector<at::Tensor>& parameters, const Make& make,
                                           InBackwardOptions options) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].defined() || !parameters[i].is_leaf() || !parameters[i].requires_grad()) {
      base::raise(ErrorKind::kUsage, base::cat("apply_optimizer_in_backward: parameter ", i,
                                               " gets no gradient: it must be a leaf that requires one"));
    }
  }
  for (const auto& parameter : parameters) optimizers_.push_back(make({parameter}));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    add(parameters[i], optimizers_[i], options.register_hook);
}

std::vector<std::shared_ptr<Optimizer>> get_optimizers_in_backward(const at::Tensor& parameter) {
  std::vector<std::shared_ptr<Optimizer>> living;
  const StepHook* hook = hook_of(parameter);
  if (hook == nullptr) return living;
  for (const auto& entry : hook->entries) {
    if (auto optimizer = entry.optimizer.lock()) living.push_back(std::move(optimizer));
  }
  return living;
}

namespace internal {

std::vector<std::shared_ptr<Optimizer>> take_over_optimizers_in_backward(const at::Tensor& parameter) {
  if (StepHook* hook = hook_of(parameter)) {
    for (auto& entry : hook->entries) entry.taken_over = true;
  }
  return get_optimizers_in_backward(parameter);
}

void give_back_optimizers_in_backward(const at::Tensor& parameter) {
  if (StepHook* hook = hook_of(parameter)) {
    for (auto& entry : hook->entries) entry.taken_over = false;
  }
}

}  // namespace internal
}  // namespace lockstep
