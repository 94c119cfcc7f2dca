#include "lockstep/tensor/gradient_access.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <thread>

namespace lockstep {
namespace {

class OneAccess final : public GradientProvider {
 public:
  std::shared_ptr<GradientAccess> current() const override { return access; }
  bool in_backward() const noexcept override { return true; }
  std::shared_ptr<GradientAccess> access = std::make_shared<GradField>();
};

TEST(GradientProvider, WithoutOneGradientsAreThoseOfTheTensors) {
  EXPECT_EQ(current_gradients(), nullptr);
  EXPECT_FALSE(in_redirected_backward());
}

TEST(GradientProvider, IsAskedFromEveryThreadUntilItIsReplaced) {
  static const OneAccess provider;
  EXPECT_EQ(set_gradient_provider(&provider), nullptr);
  std::shared_ptr<GradientAccess> there;
  bool in_backward_there = false;
  std::thread([&] {
    there = current_gradients();
    in_backward_there = in_redirected_backward();
  }).join();
  EXPECT_EQ(there, provider.access);
  EXPECT_TRUE(in_backward_there);
  EXPECT_EQ(set_gradient_provider(nullptr), &provider);
  EXPECT_EQ(current_gradients(), nullptr);
  EXPECT_FALSE(in_redirected_backward());
}

TEST(GradField, ReadsAndReplacesTheGradientOfTheTensor) {
  const at::Tensor weight = torch::ones({2}).requires_grad_();
  GradField field;
  EXPECT_FALSE(field.get(weight).defined());
  const at::Tensor gradient = torch::full({2}, 3.0F);
  field.set(weight, gradient);
  EXPECT_TRUE(weight.grad().is_same(gradient));
  EXPECT_TRUE(field.get(weight).is_same(gradient));
  EXPECT_TRUE(field.entry_nodes().empty());
}

}  // namespace
}  // namespace lockstep
