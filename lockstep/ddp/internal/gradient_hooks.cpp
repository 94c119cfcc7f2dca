#include "lockstep/ddp/internal/gradient_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::internal {

using torch::autograd::impl::grad_accumulator;
using torch::autograd::impl::try_get_grad_accumulator;

GradientHooks::GradientHooks(std::vector<at::Tensor> parameters, MakeHook make)
    : parameters_(std::move(parameters)), make_hook_(std::move(make)) {
  attach();
}

void GradientHooks::attach() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool trained = parameters_[i].requires_grad();  // false: frozen after wrapping
    accumulators_.push_back(trained ? grad_accumulator(parameters_[i]) : nullptr);
    keys_.push_back(trained ? accumulators_.back()->add_post_hook(make_hook_(i)) : 0);
  }
}

bool GradientHooks::all_current() const {
  for (std::size_t i = 0; i < accumulators_.size(); ++i) {
    const auto now = try_get_grad_accumulator(parameters_[i]);
    if (now != accumulators_[i] || (!now && parameters_[i].requires_grad())) return false;
  }
  return true;
}

void GradientHooks::follow() {
  if (!all_current()) renew();
}

void GradientHooks::renew() {
  std::erase_if(former_, [](const auto& hook) { return hook.first.expired(); });
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    if (!accumulators_[i]) continue;
    if (accumulators_[i] == try_get_grad_accumulator(parameters_[i])) {
      accumulators_[i]->del_post_hook(keys_[i]);  // attach() adds it again
    } else {
      former_.emplace_back(accumulators_[i], keys_[i]);
    }
  }
  accumulators_.clear();
  keys_.clear();
  attach();
}

void GradientHooks::detach() noexcept {
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    if (accumulators_[i]) accumulators_[i]->del_post_hook(keys_[i]);
  }
  for (const auto& [node, key] : former_) {
    if (const auto alive = node.lock()) alive->del_post_hook(key);
  }
  accumulators_.clear();
  keys_.clear();
  former_.clear();
}

}  // namespace lockstep::internal
