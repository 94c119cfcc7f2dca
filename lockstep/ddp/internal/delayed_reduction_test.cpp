// Gradients outside the buckets, and optimizers inside backward(), each alone.
#include "lockstep/ddp/internal/delayed_reduction.h"

#include <torch/torch.h>

#include "lockstep/ddp/internal/backward_optimizers.h"
#include "lockstep/ddp/internal/reducer_testing.h"
#include "lockstep/optim/functional_optimizer.h"

namespace lockstep::internal {
namespace {

using namespace reducer_testing;

TEST(DelayedReduction, AveragesWhenTheTriggersGradientArrives) {
  run_threads(2, [](int rank) {
    const auto delayed = parameters_of_sizes({3, 2});
    const auto trigger = torch::ones({1}).requires_grad_();
    const auto reduction =
        DelayedReduction::create(delayed, trigger, default_group(), std::source_location::current());
    for (int step = 1; step <= 2; ++step) {
      for (const auto& parameter : delayed.tensors) parameter.mutable_grad() = at::Tensor();
      trigger.mutable_grad() = at::Tensor();
      reduction->follow_parameters();
      reduction->expect();
      // The trigger is the first of the graph, so its gradient comes last.
      const auto y = trigger * (rank + step);
      ((y * delayed.tensors[0]).sum() + (y * delayed.tensors[1]).sum()).backward();
      reduction->check();
      for (const auto& parameter : delayed.tensors)
        EXPECT_TRUE(parameter.grad().equal(torch::full_like(parameter, step + 0.5)));
      EXPECT_EQ(trigger.grad().item<double>(), 5.0 * (rank + step)) << "its own is not averaged";
    }
  });
}

TEST(DelayedReduction, AGradientAfterTheTriggersIsAnError) {
  run_threads(1, [](int) {
    const auto delayed = parameters_of_sizes({3});
    const auto trigger = torch::ones({1}).requires_grad_();
    const auto reduction =
        DelayedReduction::create(delayed, trigger, default_group(), std::source_location::current());
    reduction->expect();
    EXPECT_ANY_THROW((delayed.tensors[0] * 2 * trigger).sum().backward());
    EXPECT_TRUE(refuses(ErrorKind::kUsage, "the gradient of p0 arrived after", [&] { reduction->check(); }));
  });
}

TEST(BackwardOptimizers, StepTheParametersTheyWereFusedTo) {
  run_threads(1, [](int) {
    const auto named = parameters_of_sizes({2, 2});
    BackwardOptimizers optimizers;
    const auto sgd = std::make_shared<FunctionalSGD>(std::vector<at::Tensor>{named.tensors[0].detach()},
                                                     torch::optim::SGDOptions(0.5));
    const std::vector<bool> dense{false, false};
    EXPECT_TRUE(refuses(ErrorKind::kUsage, "", [&] { optimizers.fuse(nullptr, {}, named.tensors, dense); }));
    const auto stranger = torch::ones({2}).requires_grad_();
    EXPECT_TRUE(
        refuses(ErrorKind::kUsage, "", [&] { optimizers.fuse(sgd, {stranger}, named.tensors, dense); }));
    EXPECT_FALSE(optimizers.any());
    optimizers.fuse(sgd, {named.tensors[0]}, named.tensors, dense);
    EXPECT_TRUE(optimizers.any());
    EXPECT_TRUE(refuses(ErrorKind::kUsage, "", [&] { optimizers.fuse(sgd, {}, named.tensors, dense); }));
    // The gradients stay: no optimizer of the parameters' own has taken them.
    for (const auto& parameter : named.tensors) EXPECT_FALSE(optimizers.step(parameter, torch::ones({2})));
    EXPECT_TRUE(named.tensors[0].equal(torch::full({2}, 0.5)));
    EXPECT_TRUE(named.tensors[1].equal(torch::ones({2})));
    optimizers.finish();
  });
}

}  // namespace
}  // namespace lockstep::internal
