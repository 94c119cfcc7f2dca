// What hooks see during a pass across workers, and gradients of other kinds.
#include <ATen/ops/embedding_bag.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>

#include <atomic>

#include "lockstep/autograd/autograd_testing.h"

namespace lockstep::autograd {
namespace {

using namespace testing;
using rpc::rpc_sync;
using rpc::testing::Workers;
using torch::autograd::variable_list;

at::Tensor parameter_there = ones_with_grad();
at::Tensor scaled(const at::Tensor& x) {
  return x * parameter_there;
}
LOCKSTEP_RPC_FUNCTION(scaled);

// As DDP does: looks at the gradient after it was added up, changes it, and waits for the end of the pass.
class LikeDdp final : public torch::autograd::FunctionPostHook {
 public:
  LikeDdp(std::atomic<std::uint64_t>& context, std::atomic<int>& n_ends)
      : context_(context), n_ends_(n_ends) {}
  variable_list operator()(const variable_list& outputs, const variable_list& gradients) override {
    EXPECT_TRUE(gradients.at(0).defined());
    context_ = current_context()->id();
    const auto context = current_gradients();
    const auto gradient = context->get(parameter_there);
    EXPECT_TRUE(gradient.defined());
    context->set(parameter_there, gradient * 10);
    torch::autograd::Engine::get_default_engine().queue_callback([this] {
      if (current_context()->id() == context_) ++n_ends_;
    });
    return outputs;
  }

 private:
  std::atomic<std::uint64_t>& context_;
  std::atomic<int>& n_ends_;
};

TEST(Hooks, RunInAPassOfTheEngineWithTheContextCurrent) {
  std::atomic<std::uint64_t> seen{0};
  std::atomic<int> n_ends{0};
  const auto accumulator = torch::autograd::impl::grad_accumulator(parameter_there);
  const auto key = accumulator->add_post_hook(std::make_unique<LikeDdp>(seen, n_ends));
  std::atomic<int> n_tensor_hooks{0};
  const auto place = parameter_there.register_hook([&](const at::Tensor& gradient) {
    ++n_tensor_hooks;
    return gradient * 3;
  });
  run_workers(2, [&](int rank, Workers& workers) {
    if (rank != 0) return;
    const DistAutogradContext context;
    backward(context, {rpc_sync(1, scaled, {at::ones({3})}).sum()});
    EXPECT_EQ(seen, context.id());
    EXPECT_EQ(n_ends, 1) << "backward() returns after the callbacks of all workers";
    EXPECT_EQ(n_tensor_hooks, 1);
    const base::RankThreadScope there(workers.agents[1]->options().rank);
    EXPECT_TRUE(at::equal(context.gradients().find(parameter_there), at::ones({3}) * 30));
    EXPECT_FALSE(parameter_there.grad().defined());
  });
  accumulator->del_post_hook(key);
  parameter_there.remove_hook(place);
}

at::Tensor table = at::ones({10, 3}).set_requires_grad(true);
at::Tensor look_up(const at::Tensor& indices, const at::Tensor& offsets) {
  return std::get<0>(at::embedding_bag(table, indices, offsets, false, 0, /*sparse=*/true));
}
LOCKSTEP_RPC_FUNCTION(look_up);
at::Tensor table_gradient() {
  return current_context()->gradients().find(table);
}
LOCKSTEP_RPC_FUNCTION(table_gradient);

TEST(Backward, KeepsSparseGradientsSparse) {
  const auto indices = at::tensor({1, 2, 4, 5, 4, 3, 2, 9}, at::kLong);
  const auto offsets = at::tensor({0, 4}, at::kLong);
  const auto factor = at::tensor({2.0F, 3.0F}).reshape({2, 1});
  const auto alone = at::ones({10, 3}).set_requires_grad(true);
  (std::get<0>(at::embedding_bag(alone, indices, offsets, false, 0, true)) * factor).sum().backward();
  run_workers(2, [&](int rank, Workers&) {
    if (rank != 0) return;
    const DistAutogradContext context;
    const auto bags = rpc_sync(1, look_up, {indices, offsets});
    backward(context, {(bags * factor).sum()}, {.retain_graph = true});
    const auto gradient = rpc_sync(1, table_gradient);
    ASSERT_TRUE(gradient.is_sparse());
    EXPECT_TRUE(at::equal(gradient.to_dense(), alone.grad().to_dense()));
    backward(context, {(bags * factor).sum()});
    EXPECT_TRUE(at::equal(rpc_sync(1, table_gradient).to_dense(), alone.grad().to_dense() * 2));
  });
}

TEST(Backward, GoesThroughCallsToItself) {
  for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
    run_workers(1, [&](int, Workers& workers) {
      {
        const DistAutogradContext context;
        const auto x = ones_with_grad();
        backward(context, {pass_on(x, {0, 0}, kNone).sum()}, {.mode = mode});
        EXPECT_TRUE(at::equal(context.gradients().find(x), at::ones({3}) * 8));
      }
      await_released(workers);
    });
  }
}

}  // namespace
}  // namespace lockstep::autograd
