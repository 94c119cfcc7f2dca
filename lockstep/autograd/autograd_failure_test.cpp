// What hooks see during a pass across workers, and passes that go wrong: errors, losses, timeouts, bytes nobody sent.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/embedding_bag.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>

#include <atomic>
#include <thread>

#include "lockstep/autograd/autograd.h"
#include "lockstep/autograd/autograd_testing.h"

namespace lockstep::autograd {
namespace {

using namespace std::chrono_literals;
using rpc::rpc_async;
using rpc::rpc_sync;
using rpc::testing::run_workers;
using rpc::testing::Workers;
using testing::await_released;
using testing::caught;
using testing::says;
using torch::autograd::variable_list;

int self() {
  return rpc::current_agent("test")->self().id;
}
at::Tensor ones_with_grad() {
  return at::ones({3}).set_requires_grad(true);
}
void await(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + 20s;
  while (!condition() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(condition());
}

// x * 2 on worker `path[0]`, then on the next one. On worker `trouble`, `what` happens when the gradient comes by.
std::function<void()> what_happens;
at::Tensor pass_on(const at::Tensor& x, const std::vector<int>& path, int trouble) {
  auto doubled = x * 2;
  if (self() == trouble) {
    doubled.register_hook([](const at::Tensor& gradient) {
      what_happens();
      return gradient;
    });
  }
  if (path.empty()) return doubled;
  return rpc_sync(path[0], pass_on, {doubled, std::vector<int>(path.begin() + 1, path.end()), trouble});
}
LOCKSTEP_RPC_FUNCTION(pass_on);
constexpr int kNone = -1;

TEST(BackwardFailure, NamesTheWorkerAndLeavesTheContextUsable) {
  what_happens = [] { throw std::runtime_error("no such luck"); };
  for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
    for (const int trouble : {0, 1, 2}) {
      run_workers(3, [&](int rank, Workers& workers) {
        if (rank != 0) return;
        {
          const DistAutogradContext context;
          const auto x = ones_with_grad();
          const auto loss = pass_on(x, {1, 2}, trouble).sum();
          try {
            backward(context.id(), {loss}, {.mode = mode});
            ADD_FAILURE() << "nothing was raised";
          } catch (const Error& error) {
            const std::string start = "Error on Node " + std::to_string(trouble) + ": no such luck";
            EXPECT_EQ(std::string(error.what()).rfind(start, 0), 0u) << error.what();
            const auto* remote = dynamic_cast<const rpc::RemoteError*>(&error);
            EXPECT_EQ(remote != nullptr, trouble != 0);
            if (remote != nullptr) {
              EXPECT_EQ(remote->worker().name, "worker" + std::to_string(trouble));
            }
          }
          for (const auto& agent : workers.agents) {
            await([&] { return agent->debug_info().at("num_current_backward_passes") == "0"; });
          }
          if (mode == Mode::kFast) return;  // the sends of the failed pass would be waited for
          backward(context.id(), {pass_on(x, {1, 2}, kNone).sum()});
          EXPECT_TRUE(at::equal(get_gradients(context.id()).find(x), at::ones({3}) * 8));
        }
        await_released(workers);
      });
    }
  }
}

TEST(BackwardFailure, OfAWorkerThatDiesIsALossThatNamesIt) {
  for (const int dies : {1, 2}) {
    std::atomic<bool> over{false};  // a thread of the dead looks at it until the end
    run_workers(3, [&](int rank, Workers& workers) {
      if (rank != 0) return;
      {
        what_happens = [&] {
          workers.exchange->kill(static_cast<rpc::WorkerId>(dies), "killed by SIGKILL (9)");
          await([&] { return over.load(); });
        };
        const DistAutogradContext context;
        const auto x = ones_with_grad();
        const auto loss = pass_on(x, {1, 2}, dies).sum();
        const auto begin = std::chrono::steady_clock::now();
        const auto failure = caught([&] { backward(context.id(), {loss}); });
        EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s) << "not at the timeout of a minute";
        over = true;
        EXPECT_EQ(failure.kind, ErrorKind::kPeerLost) << failure.message;
        ASSERT_TRUE(failure.peer);
        EXPECT_EQ(failure.peer->rank, dies);
        EXPECT_TRUE(says(failure, "SIGKILL")) << failure.message;
        backward(context.id(), {pass_on(x, {3 - dies}, kNone).sum()});
        EXPECT_TRUE(at::equal(get_gradients(context.id()).find(x), at::ones({3}) * 4))
            << "among those that live";
      }
      await_released(workers, dies);
    });
  }
}

TEST(BackwardFailure, OfTheOneThatStartedItReleasesTheOthers) {
  run_workers(3, [&](int rank, Workers& workers) {
    if (rank == 0) {
      const DistAutogradContext context;
      const auto x = ones_with_grad();
      const auto one = rpc_sync(1, pass_on, {x, {2}, kNone});
      // Worker 1 has one of two gradients when worker 0 dies.
      const auto two = pass_on(rpc_sync(1, pass_on, {x, {}, kNone}), {}, 0);
      what_happens = [&] {
        await([&] { return workers.agents[1]->debug_info().at("num_current_backward_passes") == "1"; });
        workers.exchange->kill(0, "killed by SIGKILL (9)");
      };
      EXPECT_THROW(backward(context.id(), {one.sum() + two.sum()}, {.timeout = 2s}), Error);
    } else {
      await([&] { return workers.agents[0]->closed() || workers.agents[1]->workers().size() == 2; });
      await_released(workers, 0);
    }
  });
}

TEST(BackwardFailure, AtItsTimeoutGivesThePassUpEverywhere) {
  std::atomic<bool> go_on{false};
  run_workers(2, [&](int rank, Workers& workers) {
    if (rank != 0) return;
    {
      what_happens = [&] { await([&] { return go_on.load(); }); };
      const DistAutogradContext context;
      const auto x = ones_with_grad();
      const auto slow = pass_on(x, {1}, 1).sum();
      const auto failure = caught([&] { backward(context.id(), {slow}, {.timeout = 100ms}); });
      EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
      EXPECT_TRUE(says(failure, "RPCErr:1")) << failure.message;
      EXPECT_TRUE(says(failure, "100 milliseconds")) << failure.message;
      // The thread that is stuck there is no obstacle.
      backward(context.id(), {pass_on(x, {1}, kNone).sum()});
      EXPECT_TRUE(at::equal(get_gradients(context.id()).find(x), at::ones({3}) * 4));
      go_on = true;
    }
    await_released(workers);
  });
}

TEST(BackwardFailure, OfASecondPassOfTheContextLeavesTheFirstAlone) {
  std::atomic<bool> inside{false}, go_on{false};
  run_workers(2, [&](int rank, Workers&) {
    if (rank != 0) return;
    what_happens = [&] {
      inside = true;
      await([&] { return go_on.load(); });
    };
    const DistAutogradContext context;
    const auto x = ones_with_grad();
    const auto first = pass_on(x, {1}, 1).sum();
    const auto second = pass_on(x, {1}, kNone).sum();
    RankThread* const here = this_rank_thread();
    {
      const Thread thread("first pass", [&] {
        const RankThreadScope scope(here);
        backward(context.id(), {first});
      });
      await([&] { return inside.load(); });
      const auto failure = caught([&] { backward(context.id(), {second}); });
      EXPECT_EQ(failure.kind, ErrorKind::kUsage);
      EXPECT_TRUE(says(failure, "one at a time")) << failure.message;
      go_on = true;
    }
    EXPECT_TRUE(at::equal(get_gradients(context.id()).find(x), at::ones({3}) * 4));
    backward(context.id(), {second});
  });
}

TEST(BackwardFailure, ForATensorOfAnotherContextSaysSo) {
  run_workers(2, [&](int rank, Workers&) {
    if (rank != 0) return;
    at::Tensor stale;
    {
      const DistAutogradContext context;
      stale = pass_on(ones_with_grad(), {1}, kNone);
    }
    const DistAutogradContext context;
    const auto failure = caught([&] { backward(context.id(), {stale.sum()}); });
    EXPECT_TRUE(says(failure, "received in autograd context")) << failure.message;
  });
}

TEST(BackwardFailure, OfBytesNobodySentHarmsNobody) {
  run_workers(2, [&](int rank, Workers& workers) {
    if (rank != 0) return;
    const auto agent = rpc::current_agent("test");
    using rpc::Kind;
    for (const auto kind : {Kind::kBackward, Kind::kBackwardPlan, Kind::kCleanup, Kind::kContextHeld,
                            Kind::kBackwardDone, Kind::kBackwardAbort}) {
      for (const auto& body :
           {Bytes{}, Bytes{1, 2, 3}, Bytes(27, 0xFF), Bytes(27, 1), Bytes(40, 1), Bytes(200, 0xFF)}) {
        // Answered, one way or the other.
        const auto answer = agent->request(1, kind, {.body = body}, 10s, "a damaged message");
        EXPECT_TRUE(answer.state()->wait_over(Deadline::after(10s)));
        if (answer.has_error()) {
          EXPECT_NE(answer.state()->failure()->failure.kind, ErrorKind::kTimeout);
        }
      }
    }
    {
      const DistAutogradContext context;
      const auto x = ones_with_grad();
      backward(context.id(), {pass_on(x, {1}, kNone).sum()});
      EXPECT_TRUE(at::equal(get_gradients(context.id()).find(x), at::ones({3}) * 4));
    }
    await([&] { return workers.agents[1]->debug_info().at("num_current_backward_passes") == "0"; });
  });
}

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
    context_ = get_context_id();
    const auto context = current_context();
    const auto gradient = context->get(parameter_there);
    EXPECT_TRUE(gradient.defined());
    context->set(parameter_there, gradient * 10);
    torch::autograd::Engine::get_default_engine().queue_callback([this] {
      if (get_context_id() == context_) ++n_ends_;
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
    backward(context.id(), {rpc_sync(1, scaled, {at::ones({3})}).sum()});
    EXPECT_EQ(seen, context.id());
    EXPECT_EQ(n_ends, 1) << "backward() returns after the callbacks of all workers";
    EXPECT_EQ(n_tensor_hooks, 1);
    const RankThreadScope there(workers.agents[1]->options().rank);
    EXPECT_TRUE(at::equal(get_gradients(context.id()).find(parameter_there), at::ones({3}) * 30));
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
  return get_gradients(get_context_id()).find(table);
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
    backward(context.id(), {(bags * factor).sum()}, {.retain_graph = true});
    const auto gradient = rpc_sync(1, table_gradient);
    ASSERT_TRUE(gradient.is_sparse());
    EXPECT_TRUE(at::equal(gradient.to_dense(), alone.grad().to_dense()));
    backward(context.id(), {(bags * factor).sum()});
    EXPECT_TRUE(at::equal(rpc_sync(1, table_gradient).to_dense(), alone.grad().to_dense() * 2));
  });
}

TEST(Backward, GoesThroughCallsToItself) {
  for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
    run_workers(1, [&](int, Workers& workers) {
      {
        const DistAutogradContext context;
        const auto x = ones_with_grad();
        backward(context.id(), {pass_on(x, {0, 0}, kNone).sum()}, {.mode = mode});
        EXPECT_TRUE(at::equal(get_gradients(context.id()).find(x), at::ones({3}) * 8));
      }
      await_released(workers);
    });
  }
}

}  // namespace
}  // namespace lockstep::autograd
