#include "lockstep/optim/in_backward.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "lockstep/optim/detail/optimizers_taken_over.h"
#include "lockstep/optim/optim_testing.h"

namespace lockstep::testing {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// Uses the first weight twice: its gradient is complete only once.
at::Tensor loss_of(const std::vector<at::Tensor>& weights, int step) {
  const auto x = drawn(500 + static_cast<std::uint64_t>(step), {4, 3});
  const auto hidden = at::tanh(at::linear(at::tanh(at::linear(x, weights[0])), weights[0]));
  return at::linear(hidden, weights[1]).square().mean();
}

std::vector<at::Tensor> make_weights() {
  return {drawn(1, {3, 3}).requires_grad_(), drawn(2, {2, 3}).requires_grad_()};
}

TEST(ApplyOptimizerInBackward, StepsEveryParameterAsOneOptimizerWould) {
  const auto expected = make_weights();
  Adam adam(expected, AdamOptions(0.05));
  const auto weights = make_weights();
  const auto steps = apply_optimizer_in_backward<Adam>(weights, AdamOptions(0.05));
  ASSERT_EQ(steps.optimizers().size(), 2U);
  for (int step = 0; step < 5; ++step) {
    adam.zero_grad();
    loss_of(expected, step).backward();
    adam.step();
    loss_of(weights, step).backward();
    for (const auto& weight : weights) EXPECT_FALSE(weight.grad().defined());
  }
  expect_close(weights, expected);
}

TEST(ApplyOptimizerInBackward, TakesSeveralOptimizersPerParameterAndListsThem) {
  const auto weight = at::ones({2}).requires_grad_();
  EXPECT_TRUE(get_optimizers_in_backward(weight).empty());
  EXPECT_TRUE(get_optimizers_in_backward(at::Tensor()).empty());
  const auto first = apply_optimizer_in_backward<SGD>({weight}, SGDOptions(0.25));
  {
    const auto second = apply_optimizer_in_backward<SGD>({weight}, SGDOptions(0.5));
    const auto listed = get_optimizers_in_backward(weight);
    ASSERT_EQ(listed.size(), 2U);
    EXPECT_EQ(listed[0], first.optimizers()[0]);
    EXPECT_EQ(listed[1], second.optimizers()[0]);
    weight.sum().backward();
    expect_equal(weight.detach(), at::full({2}, 0.25F));
  }
  // The second is gone with its owner.
  EXPECT_EQ(get_optimizers_in_backward(weight).size(), 1U);
  weight.sum().backward();
  expect_equal(weight.detach(), at::full({2}, 0.0F));
}

TEST(ApplyOptimizerInBackward, LeavesSteppingToTheCallerWithoutAHook) {
  const auto weight = at::ones({2}).requires_grad_();
  const auto listed_only =
      apply_optimizer_in_backward<SGD>({weight}, SGDOptions(1), {.register_hook = false});
  const auto hooked = apply_optimizer_in_backward<SGD>({weight}, SGDOptions(0.5));
  weight.sum().backward();
  expect_equal(weight.detach(), at::full({2}, 0.5F));
  EXPECT_EQ(internal::take_over_optimizers_in_backward(weight).size(), 2U);
  weight.sum().backward();
  expect_equal(weight.detach(), at::full({2}, 0.5F));
  expect_equal(weight.grad(), at::ones({2}));  // and the gradient is still there for them
}

TEST(ApplyOptimizerInBackward, KeepsNeitherParametersNorOptimizersAlive) {
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter(at::ones({1}).getIntrusivePtr());
  std::weak_ptr<torch::optim::Optimizer> optimizer;
  {
    const auto weight = at::ones({2}).requires_grad_();
    parameter = c10::weak_intrusive_ptr<c10::TensorImpl>(weight.getIntrusivePtr());
    const auto steps = apply_optimizer_in_backward<SGD>({weight}, SGDOptions(1));
    optimizer = steps.optimizers()[0];
  }
  EXPECT_TRUE(optimizer.expired());
  EXPECT_TRUE(parameter.expired());
}

struct Count final : torch::autograd::PostAccumulateGradHook {
  explicit Count(int& count) : n(count) {}
  void operator()(const at::Tensor& parameter) override { n += parameter.grad().defined() ? 1 : 0; }
  int& n;
};

TEST(ApplyOptimizerInBackward, CallsAHookThatWasThereBeforeWithTheGradient) {
  const auto weight = at::ones({2}).requires_grad_();
  int n = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<Count>(n));
  const auto steps = apply_optimizer_in_backward<SGD>({weight}, SGDOptions(1));
  weight.sum().backward();
  EXPECT_EQ(n, 1);
  EXPECT_FALSE(weight.grad().defined());
}

TEST(ApplyOptimizerInBackward, RefusesWhatGetsNoGradient) {
  const auto good = at::ones({2}).requires_grad_();
  for (const auto& bad : {at::Tensor(), at::ones({2}), good * 2}) {
    refused(
        [&] {
          (void)apply_optimizer_in_backward<SGD>({good, bad}, SGDOptions(1));
        },
        "parameter 1 gets no gradient");
  }
  EXPECT_TRUE(get_optimizers_in_backward(good).empty());
}

}  // namespace
}  // namespace lockstep::testing
