// Backward passes across workers as threads: gradients equal those of one process, whatever the way they
// take.
#include "lockstep/autograd/autograd.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/embedding_bag.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>

#include <atomic>
#include <thread>

#include "lockstep/autograd/autograd_testing.h"
#include "lockstep/rpc/remote.h"

namespace lockstep::autograd {
namespace {

using namespace std::chrono_literals;
using rpc::rpc_async;
using rpc::rpc_sync;
using rpc::testing::caught;
using rpc::testing::says;
using rpc::testing::Workers;
using testing::await_released;
using testing::run_workers;
using testing::self;
using torch::autograd::variable_list;

// Each worker's own parameter, the same value on all.
at::Tensor fresh_weight() {
  return at::linspace(-1, 1, 9).reshape({3, 3}).set_requires_grad(true);
}
at::Tensor& weight_of(int worker) {
  static std::array<at::Tensor, 8> weights = [] {
    std::array<at::Tensor, 8> list;
    for (auto& weight : list) weight = fresh_weight();
    return list;
  }();
  return weights[static_cast<std::size_t>(worker)];
}

at::Tensor layer(const at::Tensor& x) {
  return at::matmul(x, weight_of(self())).tanh();
}
LOCKSTEP_RPC_FUNCTION(layer);

at::Tensor identity(const at::Tensor& x) {
  return x;
}
LOCKSTEP_RPC_FUNCTION(identity);

// Through the worker's own layer and then those of the others in turn.
at::Tensor chain(const at::Tensor& x, const std::vector<int>& rest) {
  const auto mine = layer(x);
  if (rest.empty()) return mine;
  return rpc_sync(rest[0], chain, {mine, std::vector<int>(rest.begin() + 1, rest.end())});
}
LOCKSTEP_RPC_FUNCTION(chain);

// A gradient of this context on the callee.
at::Tensor gradient_here() {
  return current_context()->gradients().find(weight_of(self()));
}
LOCKSTEP_RPC_FUNCTION(gradient_here);

at::Tensor input() {
  return at::linspace(0, 1, 6).reshape({2, 3});
}
// x behind one more node, so that something is left to be done here.
at::Tensor loss_of(const at::Tensor& x) {
  return (x * x).sum();
}

// d(loss)/d(weight) of layers 0..n-1 one after the other, all with weights like fresh_weight().
std::vector<at::Tensor> reference(int n, const at::Tensor& x) {
  std::vector<at::Tensor> weights;
  at::Tensor value = x;
  for (int i = 0; i < n; ++i) {
    weights.push_back(fresh_weight());
    value = at::matmul(value, weights.back()).tanh();
  }
  loss_of(value).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& weight : weights) gradients.push_back(weight.grad());
  return gradients;
}

const std::array kModes = {Mode::kSmart, Mode::kFast};

TEST(Backward, ThroughOneCallGivesTheGradientsOfOneProcess) {
  const auto expected = reference(2, input());
  for (const Mode mode : kModes) {
    run_workers(2, [&](int rank, Workers&) {
      if (rank != 0) return;
      const DistAutogradContext context;
      const auto loss = loss_of(rpc_sync(1, layer, {layer(input())}));
      backward(context, {loss}, {.mode = mode});
      EXPECT_TRUE(at::allclose(context.gradients().find(weight_of(0)), expected[0]));
      EXPECT_TRUE(at::allclose(rpc_sync(1, gradient_here), expected[1]));
      EXPECT_EQ(context.gradients().size(), 1u);
      EXPECT_FALSE(weight_of(0).grad().defined()) << "gradients are the context's";
    });
  }
}

TEST(Backward, ThroughThreeWorkersAndBackToTheFirst) {
  const auto expected = reference(4, input());
  for (const Mode mode : kModes) {
    run_workers(3, [&](int rank, Workers&) {
      if (rank != 0) return;
      const DistAutogradContext context;
      // Worker 1's function calls worker 2's, which calls one of worker 0.
      const auto out = rpc_sync(1, chain, {layer(input()), std::vector<int>{2, 0}});
      backward(context, {loss_of(out)}, {.mode = mode});
      const auto mine = context.gradients().find(weight_of(0));
      EXPECT_TRUE(at::allclose(mine, expected[0] + expected[3]));
      EXPECT_TRUE(at::allclose(rpc_sync(1, gradient_here), expected[1]));
      EXPECT_TRUE(at::allclose(rpc_sync(2, gradient_here), expected[2]));
    });
  }
}

TEST(Backward, FromEveryWorkerAtOnceKeepsContextsApart) {
  const auto once = reference(2, input());
  const auto twice = reference(2, input() * 2);
  run_workers(3, [&](int rank, Workers&) {
    for (int round = 0; round < 10; ++round) {
      const DistAutogradContext context;
      const bool doubled = (rank + round) % 2 == 1;
      const auto out = rpc_sync((rank + 1) % 3, layer, {layer(input() * (doubled ? 2 : 1))});
      backward(context, {loss_of(out)});
      const auto& expected = doubled ? twice : once;
      EXPECT_TRUE(at::allclose(context.gradients().find(weight_of(rank)), expected[0]));
      EXPECT_TRUE(at::allclose(rpc_sync((rank + 1) % 3, gradient_here), expected[1]));
    }
  });
}

TEST(Backward, RunsSeveralContextsOfOneWorkerAtOnce) {
  const auto expected = reference(2, input());
  run_workers(2, [&](int rank, Workers&) {
    if (rank != 0) return;
    std::vector<base::Thread> threads;
    base::RankThread* const here = base::this_rank_thread();
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back("trainer", [&] {
        const base::RankThreadScope scope(here);
        for (int round = 0; round < 5; ++round) {
          const DistAutogradContext context;
          backward(context, {loss_of(rpc_sync(1, layer, {layer(input())}))});
          EXPECT_TRUE(at::allclose(context.gradients().find(weight_of(0)), expected[0]));
        }
      });
    }
  });
}

TEST(Backward, GoesThroughValuesBehindRRefs) {
  const auto expected = reference(3, input());
  for (const Mode mode : kModes) {
    run_workers(3, [&](int rank, Workers& workers) {
      if (rank != 0) return;
      {
        const DistAutogradContext context;
        const auto there = rpc::remote(1, layer, {layer(input())});
        const auto out = rpc_sync(2, layer, {there.to_here()});
        backward(context, {loss_of(out)}, {.mode = mode});
        EXPECT_TRUE(at::allclose(context.gradients().find(weight_of(0)), expected[0]));
        EXPECT_TRUE(at::allclose(rpc_sync(1, gradient_here), expected[1]));
        EXPECT_TRUE(at::allclose(rpc_sync(2, gradient_here), expected[2]));
      }
      await_released(workers);
    });
  }
}

at::Tensor loss_there(const at::Tensor& x) {
  return loss_of(layer(x));
}
LOCKSTEP_RPC_FUNCTION(loss_there);

TEST(Backward, StartsAtTheOwnerOfAnRRef) {
  const auto expected = reference(2, input());
  run_workers(2, [&](int rank, Workers& workers) {
    if (rank != 0) return;
    {
      const DistAutogradContext context;
      const auto loss = rpc::remote(1, loss_there, {layer(input())});
      backward(context, loss, {.retain_graph = true});
      EXPECT_TRUE(at::allclose(context.gradients().find(weight_of(0)), expected[0]));
      EXPECT_TRUE(at::allclose(rpc_sync(1, gradient_here), expected[1]));
      const rpc::RRef<at::Tensor> mine(loss.to_here());
      backward(context, mine);
      EXPECT_TRUE(at::allclose(context.gradients().find(weight_of(0)), expected[0] * 2));
      const auto vector = rpc::remote(1, layer, {input()});
      EXPECT_TRUE(says(caught([&] { backward(context, vector); }), "root 0 is not a scalar"));
      EXPECT_EQ(caught([&] { backward(context, rpc::RRef<at::Tensor>()); }).kind, ErrorKind::kUsage);
    }
    await_released(workers);
  });
}

// Counts how often a node runs.
class Counter final : public torch::autograd::FunctionPreHook {
 public:
  explicit Counter(std::atomic<int>& n) : n_(n) {}
  variable_list operator()(const variable_list& gradients) override {
    ++n_;
    return gradients;
  }

 private:
  std::atomic<int>& n_;
};

TEST(Backward, RunsANodeOnceThatIsUsedHereAndThere) {
  for (const Mode mode : kModes) {
    run_workers(3, [&](int rank, Workers&) {
      if (rank != 0) return;
      const auto leaf = at::ones({2, 3}).set_requires_grad(true);
      const DistAutogradContext context;
      const auto shared = leaf.sin();
      std::atomic<int> n_runs{0};
      shared.grad_fn()->add_pre_hook(std::make_unique<Counter>(n_runs));
      const auto there = rpc_async(1, layer, {shared});
      const auto elsewhere = rpc_async(2, chain, {shared, std::vector<int>{1}});
      const auto loss = loss_of(shared) + loss_of(there.wait()) + loss_of(elsewhere.wait());
      backward(context, {loss}, {.mode = mode});
      EXPECT_EQ(n_runs, 1) << "once, with all gradients";
      const auto alone = at::ones({2, 3}).set_requires_grad(true);
      const auto s = alone.sin();
      const auto w = fresh_weight();
      const auto one = at::matmul(s, w).tanh();
      (loss_of(s) + loss_of(one) + loss_of(at::matmul(one, w).tanh())).backward();
      EXPECT_TRUE(at::allclose(context.gradients().find(leaf), alone.grad()));
    });
  }
}

TEST(Backward, EndsInSmartModeWhereTheLossDoesNotUseACall) {
  const auto expected = reference(2, input());
  run_workers(3, [&](int rank, Workers&) {
    if (rank != 0) return;
    const DistAutogradContext context;
    const auto x = layer(input());
    const auto unused = rpc_sync(2, layer, {x});
    const auto half_used = rpc_sync(1, chain, {x, std::vector<int>{2}});
    const auto out = rpc_sync(1, layer, {x});
    backward(context, {loss_of(out)});
    EXPECT_TRUE(at::allclose(context.gradients().find(weight_of(0)), expected[0]));
    const auto failure =
        caught([&] { backward(context, {loss_of(unused)}, {.mode = Mode::kFast, .timeout = 200ms}); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << "the limit of FAST: " << failure.message;
  });
}

TEST(Backward, OfAGraphThatWasNotRetainedRaises) {
  for (const Mode mode : kModes) {
    run_workers(2, [&](int rank, Workers&) {
      if (rank != 0) return;
      const DistAutogradContext context;
      const auto x = at::ones({3}).set_requires_grad(true);
      // Nothing here nor there saves a tensor: only we can tell.
      const auto loss = rpc_sync(1, identity, {x + 1}).sum();
      backward(context, {loss}, {.mode = mode});
      const auto failure = caught([&] { backward(context, {loss}, {.mode = mode}); });
      EXPECT_EQ(failure.kind, ErrorKind::kUsage);
      EXPECT_TRUE(says(failure, "retain_graph")) << failure.message;
      EXPECT_TRUE(at::equal(context.gradients().find(x), at::ones({3}))) << "as the first pass left it";
      const auto again = rpc_sync(1, identity, {x + 1}).sum();
      backward(context, {again}, {.mode = mode});
      EXPECT_TRUE(at::equal(context.gradients().find(x), at::ones({3}) * 2)) << "a new graph is fine";
    });
  }
}

TEST(Backward, TwiceThroughARetainedGraphAddsUp) {
  const auto expected = reference(2, input());
  for (const Mode mode : kModes) {
    run_workers(2, [&](int rank, Workers&) {
      if (rank != 0) return;
      const DistAutogradContext context;
      const auto loss = loss_of(rpc_sync(1, layer, {layer(input())}));
      backward(context, {loss}, {.retain_graph = true, .mode = mode});
      backward(context, {loss}, {.mode = mode});
      EXPECT_TRUE(at::allclose(context.gradients().find(weight_of(0)), expected[0] * 2));
      EXPECT_TRUE(at::allclose(rpc_sync(1, gradient_here), expected[1] * 2));
      EXPECT_THROW(backward(context, {loss}, {.mode = mode}), Error);
    });
  }
}

TEST(Backward, TakesOnlyScalarRootsWithAHistory) {
  run_workers(1, [](int, Workers&) {
    const DistAutogradContext context;
    const auto leaf = at::ones({2}).set_requires_grad(true);
    const auto refused = [&](const std::vector<at::Tensor>& roots) {
      const auto failure = caught([&] { backward(context, roots); });
      EXPECT_EQ(failure.kind, ErrorKind::kUsage);
      return failure.message;
    };
    EXPECT_EQ(refused({}), "autograd::backward: no roots were given");
    EXPECT_EQ(
        refused({leaf * 2}),
        "autograd::backward: root 0 is not a scalar but of shape [2]; a loss is one number, as .sum() or "
        ".mean() gives");
    EXPECT_EQ(
        refused({leaf.sum(), at::ones({})}),
        "autograd::backward: root 1 does not require gradients; results of remote calls do when the call "
        "was made in an autograd context, with gradients enabled");
    EXPECT_EQ(refused({at::ones({}).set_requires_grad(true)}),
              "autograd::backward: root 0 is a leaf: it has no gradient function to go back through");
    EXPECT_EQ(refused({at::Tensor()}), "autograd::backward: root 0 is an undefined tensor");
    EXPECT_TRUE(says(caught([&] { backward(Context(77), {leaf.sum()}); }), "has no autograd context 77"));
    EXPECT_TRUE(says(caught([] { Context(77).gradients(); }), "has no autograd context 77"));
    backward(context, {leaf.sum(), (leaf * 2).sum()});
    EXPECT_TRUE(at::equal(context.gradients().find(leaf), at::ones({2}) * 3)) << "several roots add up";
  });
}

TEST(Backward, OfAnOrdinaryKindIsRefusedWhereTheGraphGoesOnElsewhere) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    const DistAutogradContext context;
    const auto loss = loss_of(rpc_sync(1, layer, {input()}));
    EXPECT_TRUE(says(caught([&] { loss.backward(); }), "autograd::backward"));
  });
}

TEST(Context, HasANumberOfItsWorkerAndDoesNotNest) {
  run_workers(2, [](int rank, Workers&) {
    EXPECT_FALSE(current_context().has_value());
    EXPECT_EQ(current_gradients(), nullptr);
    std::uint64_t first = 0;
    {
      const auto scope = context();
      first = scope.id();
      EXPECT_EQ(first >> 48, static_cast<std::uint64_t>(rank));
      EXPECT_EQ(current_context()->id(), first);
      EXPECT_TRUE(says(caught([] { const DistAutogradContext nested; }), "do not nest"));
      EXPECT_EQ(current_context()->id(), first) << "the outer one stays current";
    }
    EXPECT_FALSE(current_context().has_value());
    EXPECT_EQ(caught([&] { Context(first).gradients(); }).kind, ErrorKind::kUsage);
    const DistAutogradContext second;
    EXPECT_NE(second.id(), first);
  });
}

std::uint64_t context_there() {
  return current_context()->id();
}
LOCKSTEP_RPC_FUNCTION(context_there);

TEST(Context, TravelsWithCalls) {
  run_workers(2, [](int rank, Workers&) {
    const DistAutogradContext context;
    EXPECT_EQ(rpc_sync(1 - rank, context_there), context.id());
  });
}

TEST(Context, IsReleasedOnEveryWorkerItReached) {
  run_workers(4, [](int rank, Workers& workers) {
    if (rank != 0) return;
    std::uint64_t id = 0;
    {
      const DistAutogradContext context;
      id = context.id();
      // Worker 3 is reached through 1 and 2 only; 2 in no tensor that requires gradients.
      const auto out = rpc_sync(1, chain, {layer(input()), std::vector<int>{2, 3}});
      EXPECT_EQ(rpc_sync(3, context_there), id);
      backward(context, {loss_of(out)});
      EXPECT_EQ(workers.agents[3]->debug_info().at("num_autograd_contexts"), "1");
    }
    await_released(workers);
  });
}

TEST(Context, IsReleasedThoughCallsInItEndLater) {
  // What arrives after the release must not bring it back.
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    run_workers(3,
                [&](int rank, Workers& workers) {
                  if (rank != 0) return;
                  std::vector<rpc::Future<at::Tensor>> late;
                  {
                    const DistAutogradContext context;
                    for (int i = 0; i < 5; ++i)
                      late.push_back(rpc_async(1, chain, {layer(input()), std::vector<int>{2}}));
                  }
                  rpc::wait_all(late);
                  await_released(workers);
                },
                {.exchange = {.seed = seed, .hold_back = 300}});
  }
}

TEST(Backward, GivesTheSameHoweverMessagesAreShuffled) {
  const auto expected = reference(4, input());
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    run_workers(
        3,
        [&](int rank, Workers& workers) {
          if (rank != 0) return;
          {
            const DistAutogradContext context;
            const auto out = rpc_sync(1, chain, {layer(input()), std::vector<int>{2, 0}});
            backward(context, {loss_of(out)}, {.mode = seed % 2 == 0 ? Mode::kFast : Mode::kSmart});
            EXPECT_TRUE(at::allclose(context.gradients().find(weight_of(0)), expected[0] + expected[3]));
            EXPECT_TRUE(at::allclose(rpc_sync(2, gradient_here), expected[2]));
          }
          await_released(workers);
        },
        {.exchange = {.seed = seed, .hold_back = 300}});
  }
}

}  // namespace
}  // namespace lockstep::autograd
