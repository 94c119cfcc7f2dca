// checkpoint() in a context of distributed autograd.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "lockstep/autograd/autograd.h"
#include "lockstep/nn/checkpoint.h"
#include "lockstep/rpc/rpc_testing.h"
#include "lockstep/tensor/tensor_testing.h"

namespace lockstep {
namespace {

using tensor_testing::drawn;
using tensor_testing::refusal;

torch::nn::Sequential two_layers() {
  torch::nn::Sequential block(torch::nn::Linear(6, 10), torch::nn::Tanh(), torch::nn::Linear(10, 6));
  const torch::NoGradGuard no_grad;
  std::uint64_t seed = 0;
  for (auto& parameter : block->parameters()) parameter.copy_(0.3 * drawn(++seed, parameter.sizes()));
  return block;
}

class CheckpointInContext : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Both, CheckpointInContext, ::testing::Bool(),
                         [](const auto& which) { return which.param ? "Reentrant" : "NonReentrant"; });

TEST_P(CheckpointInContext, WorksUnlessItIsReentrant) {
  auto block = two_layers();
  const auto run = [&](const at::Tensor& x) { return block->forward(x); };
  const at::Tensor input = drawn(9, {3, 6}).requires_grad_();
  const auto expected = torch::autograd::grad({run(input).sum()}, block->parameters());
  rpc::testing::run_workers(
      1,
      [&](int, rpc::testing::Workers&) {
        const autograd::DistAutogradContext context;
        const auto loss = Checkpoint{.use_reentrant = GetParam()}(run, input).sum();
        if (GetParam()) {
          const std::string text = refusal([&] { autograd::backward(context, {loss}); });
          EXPECT_NE(text.find("leave use_reentrant off"), std::string::npos) << text;
          Checkpoint{.use_reentrant = true}(run, input).sum().backward();  // is fine
          return;
        }
        autograd::backward(context, {loss});
        const auto gradients = context.gradients();
        const auto parameters = block->parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i)
          EXPECT_TRUE(torch::equal(gradients.find(parameters[i]), expected[i])) << "parameter " << i;
      },
      {.extensions = {autograd::extension}});
}

}  // namespace
}  // namespace lockstep
