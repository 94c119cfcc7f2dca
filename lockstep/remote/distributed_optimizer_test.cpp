// Steps of optimizers on several workers, workers as threads, against the same steps in one place.
#include "lockstep/remote/distributed_optimizer.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/embedding.h>
#include <torch/types.h>

#include <thread>

#include "lockstep/remote/remote_testing.h"

namespace lockstep::rpc {
namespace {

using testing::caught;
using testing::on_first;
using testing::run_workers;
using testing::says;
using testing::Workers;

at::Tensor leaf(double value) {
  return at::full({3}, value).requires_grad_();
}
LOCKSTEP_RPC_FUNCTION(leaf);

at::Tensor table_of_ones() {
  return at::ones({5, 2}).requires_grad_();
}
LOCKSTEP_RPC_FUNCTION(table_of_ones);

at::Tensor times(const RRef<at::Tensor>& weight, const at::Tensor& x) {
  return weight.local_value() * x;
}
LOCKSTEP_RPC_FUNCTION(times);

at::Tensor rows(const RRef<at::Tensor>& table, const at::Tensor& indices) {
  return torch::embedding(table.local_value(), indices, -1, false, /*sparse=*/true);
}
LOCKSTEP_RPC_FUNCTION(rows);

void set_grad(const RRef<at::Tensor>& weight, double value) {
  weight.local_value().mutable_grad() = at::full({3}, value);
}
LOCKSTEP_RPC_FUNCTION(set_grad);
at::Tensor grad_of(const RRef<at::Tensor>& weight) {
  return weight.local_value().grad();
}
LOCKSTEP_RPC_FUNCTION(grad_of);

// Of one worker's own, and counted.
struct Halver final : torch::optim::Optimizer {
  Halver(std::vector<at::Tensor> parameters, double rate, bool fails)
      : Optimizer(std::move(parameters), std::make_unique<torch::optim::SGDOptions>(rate)), fails_(fails) {}
  at::Tensor step(LossClosure) override {
    if (fails_) throw std::runtime_error("this one does not step");
    const at::NoGradGuard no_grad;
    const int now = ++n_running;
    n_most = std::max(n_most.load(), now);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) {
        if (parameter.grad().defined()) parameter.sub_(parameter.grad() * 0.5);
      }
    }
    --n_running;
    return {};
  }
  static inline std::atomic<int> n_running{0}, n_most{0};
  const bool fails_;
};
LOCKSTEP_RPC_OPTIMIZER(Halver, double, bool);

// Weights on workers 1, 2, 1 and 0.
std::vector<RRef<at::Tensor>> weights() {
  return {remote("worker1", leaf, {1.0}), remote("worker2", leaf, {2.0}), remote("worker1", leaf, {3.0}),
          RRef<at::Tensor>(leaf(4.0))};
}

at::Tensor loss_of(const std::vector<RRef<at::Tensor>>& list, double x) {
  at::Tensor sum;
  for (const auto& weight : list) {
    const auto product = rpc_sync(weight.owner(), times, {weight, at::full({3}, x)});
    sum = sum.defined() ? sum * product : product;
  }
  return sum.sum();
}

// Four steps there, and four here: the same weights.
template <class Optimizer, class Alone, class Options>
void expect_as_alone(const Options& options) {
  const auto list = weights();
  std::vector<at::Tensor> alone;
  for (const double value : {1.0, 2.0, 3.0, 4.0}) alone.push_back(leaf(value));
  const DistributedOptimizer<Optimizer> optimizer(list, Args{options});
  EXPECT_EQ(optimizer.remote_optimizers().size(), 3u) << "one for each owner";
  Alone optimizer_alone(alone, options);
  for (int step = 1; step < 5; ++step) {
    const autograd::DistAutogradContext context;
    autograd::backward(context, {loss_of(list, 0.1 * step)});
    optimizer.step(context);
    at::Tensor product = alone[0] * 0.1 * step;
    for (std::size_t i = 1; i < alone.size(); ++i) product = product * (alone[i] * 0.1 * step);
    optimizer_alone.zero_grad();
    product.sum().backward();
    optimizer_alone.step();
  }
  for (std::size_t i = 0; i < list.size(); ++i)
    EXPECT_TRUE(at::allclose(list[i].to_here(), alone[i], 1e-5, 1e-6)) << i << list[i].to_here() << alone[i];
}

TEST(DistributedOptimizer, StepsAsTheOptimizerDoesInOnePlace) {
  on_first(3, [] {
    using namespace torch::optim;
    expect_as_alone<SGD, SGD>(SGDOptions(0.1).momentum(0.5).weight_decay(0.01).nesterov(true));
    expect_as_alone<Adam, Adam>(AdamOptions(0.1).betas({0.8, 0.9}).amsgrad(true));
    expect_as_alone<AdamW, AdamW>(AdamWOptions(0.1).weight_decay(0.1));
    expect_as_alone<Adagrad, Adagrad>(AdagradOptions(0.1).lr_decay(0.1).initial_accumulator_value(0.5));
    expect_as_alone<RMSprop, RMSprop>(RMSpropOptions(0.1).alpha(0.9).momentum(0.5).centered(true));
  });
}

TEST(DistributedOptimizer, MayBeAFunctionalOne) {
  on_first(3, [] {
    using namespace torch::optim;
    expect_as_alone<FunctionalSGD, SGD>(SGDOptions(0.1).momentum(0.5));
    expect_as_alone<FunctionalAdam, Adam>(AdamOptions(0.1));
    const auto list = weights();
    const DistributedOptimizer<FunctionalAdadelta> optimizer(list, Args{AdadeltaOptions(0.5)});
    const autograd::DistAutogradContext context;
    autograd::backward(context, {loss_of(list, 1)});
    optimizer.step(context);
    EXPECT_FALSE(at::equal(list[0].to_here(), leaf(1.0)));
  });
}

TEST(DistributedOptimizer, TakesTheGradientsOfTheContextAndLeavesOthersAlone) {
  on_first(3, [] {
    const auto list = weights();
    const DistributedOptimizer<torch::optim::SGD> optimizer(list, Args{torch::optim::SGDOptions(1.0)});
    for (const auto& weight : list) rpc_sync(weight.owner(), set_grad, {weight, 100.0});
    const autograd::DistAutogradContext context;
    // Only the first and the last weight take part.
    autograd::backward(context, {loss_of({list[0], list[3]}, 1)});
    autograd::backward(context, {loss_of({list[1]}, 0)});
    optimizer.step(context);
    EXPECT_TRUE(at::allclose(list[0].to_here(), at::full({3}, 1.0 - 4.0)));
    EXPECT_TRUE(at::allclose(list[3].to_here(), at::full({3}, 4.0 - 1.0)));
    EXPECT_TRUE(at::equal(list[2].to_here(), leaf(3.0))) << "has no gradient in the context";
    for (const auto& weight : list)
      EXPECT_TRUE(at::equal(rpc_sync(weight.owner(), grad_of, {weight}), at::full({3}, 100.0)));
  });
}

TEST(DistributedOptimizer, AppliesSparseGradients) {
  on_first(3, [] {
    const auto table = remote("worker1", table_of_ones);
    const DistributedOptimizer<torch::optim::SGD> optimizer({table}, Args{torch::optim::SGDOptions(0.5)});
    const autograd::DistAutogradContext context;
    autograd::backward(context, {rpc_sync("worker1", rows, {table, torch::tensor({1, 1, 4})}).sum()});
    optimizer.step(context);
    const at::Tensor after = table.to_here();
    EXPECT_TRUE(at::equal(after[1], at::zeros({2}))) << after;
    EXPECT_TRUE(at::equal(after[4], at::full({2}, 0.5))) << after;
    EXPECT_TRUE(at::equal(after[0], at::ones({2}))) << after;
  });
}

TEST(DistributedOptimizer, RunsStepsOfOneWorkerOneAtATime) {
  Halver::n_most = 0;
  const auto shared = std::make_shared<std::atomic<int>>(0);
  run_workers(
      3,
      [&](int rank, Workers&) {
        const auto weight = remote("worker0", leaf, {static_cast<double>(rank)});
        const DistributedOptimizer<Halver> optimizer({weight}, Args{0.1, false});
        for (int step = 0; step < 5; ++step) {
          const autograd::DistAutogradContext context;
          autograd::backward(context, {rpc_sync("worker0", times, {weight, at::ones({3})}).sum()});
          optimizer.step(context);
        }
        EXPECT_TRUE(at::allclose(weight.to_here(), at::full({3}, rank - 2.5)));
        ++*shared;
        while (*shared != 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      },
      testing::with_remote());
  EXPECT_EQ(Halver::n_most, 1);
}

TEST(DistributedOptimizer, ReportsWhatWentWrong) {
  on_first(3, [] {
    const auto list = weights();
    EXPECT_TRUE(says(caught([] { DistributedOptimizer<Halver>({}, Args{0.1, false}); }), "no parameters"));
    EXPECT_TRUE(says(caught([&] {
                       DistributedOptimizer<Halver>({RRef<at::Tensor>()}, Args{0.1, false});
                     }),
                     "empty"));
    EXPECT_TRUE(says(
        caught([&] { DistributedOptimizer<torch::optim::SGD>(list, Args{torch::optim::SGDOptions(-1.0)}); }),
        "learning rate"));
    const DistributedOptimizer<torch::optim::SGD> optimizer(list, Args{torch::optim::SGDOptions(0.1)});
    const auto unknown = caught([&] { optimizer.step(autograd::Context(12345)); });
    EXPECT_EQ(unknown.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(unknown, "12345"));
    EXPECT_TRUE(at::equal(list[0].to_here(), leaf(1.0))) << "nothing was changed";
    const DistributedOptimizer<Halver> failing(list, Args{0.1, true});
    const autograd::DistAutogradContext context;
    autograd::backward(context, {loss_of(list, 1)});
    EXPECT_TRUE(says(caught([&] { failing.step(context); }), "this one does not step"));
  });
}

}  // namespace
}  // namespace lockstep::rpc
