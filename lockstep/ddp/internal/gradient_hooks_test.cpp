#include "lockstep/ddp/internal/gradient_hooks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <utility>
#include <vector>

namespace lockstep::internal {
namespace {

struct Told {
  std::size_t index;
  float incoming;  // first element; -1: undefined
  bool operator==(const Told&) const = default;
};

// Hooks on two parameters of three elements each, and what their listener got.
struct Listening {
  at::Tensor a = torch::ones({3}).requires_grad_();
  at::Tensor b = torch::ones({3}).requires_grad_();
  std::vector<Told> told;
  GradientHooks hooks{{a, b}, [this](std::size_t index, const at::Tensor& incoming) {
                        told.push_back({index, incoming.defined() ? incoming[0].item<float>() : -1.0f});
                      }};
};

// As torch::load does: the parameter is the same, its accumulator is not.
void replace_data(const at::Tensor& parameter) {
  parameter.set_data(parameter.to(torch::kDouble));
  parameter.set_data(parameter.to(torch::kFloat));
}

TEST(GradientHooks, TheListenerIsCalledForEachGradientOnceItIsAccumulated) {
  Listening listening;
  std::vector<float> accumulated;
  const at::Tensor c = torch::ones({3}).requires_grad_();
  GradientHooks hooks(
      {c}, [&](std::size_t, const at::Tensor&) { accumulated.push_back(c.grad()[0].item<float>()); });
  (c.sum() * 2).backward();
  (c.sum() * 3).backward();
  EXPECT_EQ(accumulated, (std::vector<float>{2, 5}));
  (listening.b.sum() * 4).backward();
  (listening.a.sum() * 5).backward();
  EXPECT_EQ(listening.told, (std::vector<Told>{{1, 4}, {0, 5}}));
}

TEST(GradientHooks, AFrozenParameterHasNone) {
  const at::Tensor frozen = torch::ones({3});
  const at::Tensor trained = torch::ones({3}).requires_grad_();
  GradientHooks hooks({frozen, trained}, [](std::size_t, const at::Tensor&) {});
  EXPECT_EQ(hooks.accumulators()[0], nullptr);
  EXPECT_NE(hooks.accumulators()[1], nullptr);
}

TEST(GradientHooks, FollowAParameterToItsNewAccumulator) {
  Listening listening;
  const auto before = listening.hooks.accumulators()[0];
  replace_data(listening.a);
  listening.hooks.follow();
  EXPECT_NE(listening.hooks.accumulators()[0], before);
  (listening.a.sum() * 7 + listening.b.sum() * 7).backward();
  EXPECT_EQ(listening.told.size(), 2U) << "each once, also where the accumulator stayed";
}

TEST(GradientHooks, StayWhereTheyAreWhileAccumulatorsDo) {
  Listening listening;
  const auto before = listening.hooks.accumulators()[0];
  listening.hooks.follow();
  listening.hooks.renew();
  EXPECT_EQ(listening.hooks.accumulators()[0], before);
  listening.a.sum().backward();
  EXPECT_EQ(listening.told.size(), 1U);
}

TEST(GradientHooks, OfAGraphThatWasBuiltBeforeStillCallTheListener) {
  Listening listening;
  const at::Tensor old_loss = listening.a.sum() * 6;
  replace_data(listening.a);
  listening.hooks.follow();
  old_loss.backward();
  EXPECT_EQ(listening.told, (std::vector<Told>{{0, 6}}));
}

TEST(GradientHooks, AreGoneForGoodOnceDetached) {
  Listening listening;
  const at::Tensor old_loss = listening.a.sum();
  replace_data(listening.a);
  listening.hooks.follow();
  listening.hooks.detach();
  listening.hooks.follow();
  old_loss.backward();
  (listening.a.sum() + listening.b.sum()).backward();
  EXPECT_TRUE(listening.told.empty());
}

}  // namespace
}  // namespace lockstep::internal
