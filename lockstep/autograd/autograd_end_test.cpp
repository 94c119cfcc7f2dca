// How passes and contexts end before their time, and what they must not leave behind.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <atomic>

#include "lockstep/autograd/autograd_testing.h"
#include "lockstep/rpc/remote.h"

namespace lockstep::autograd {
namespace {

using namespace std::chrono_literals;
using namespace testing;
using rpc::remote;
using rpc::rpc_async;
using rpc::rpc_sync;
using rpc::testing::caught;
using rpc::testing::Gate;
using rpc::testing::says;
using rpc::testing::until;
using rpc::testing::Workers;

void await_one_at(const Gate& gate) {
  until([&] { return gate.n_came() > 0; }, "nobody comes to the gate");
}

// backward() on another thread of this worker.
class InBackground {
 public:
  InBackground(const Context& context, at::Tensor loss)
      : thread_("pass", [this, context, loss, here = base::this_rank_thread()] {
          const base::RankThreadScope scope(here);
          failure_ = caught([&] { backward(context, {loss}); });
        }) {}
  // What it raised, once it has.
  Failure failure() {
    thread_.join();
    return failure_;
  }

 private:
  Failure failure_;
  base::Thread thread_;
};

TEST(PassEnd, ReachesThoseThatWaitForGradientsOfTheOneThatFailed) {
  run_workers(3, [](int rank, Workers& workers) {
    if (rank != 0) return;
    std::string n_planned;
    trouble = {.coming = [&] {
      n_planned = n_passes(*workers.agents[2]);
      throw std::runtime_error("before anything went to worker 2");
    }};
    const DistAutogradContext context;
    const auto loss = pass_on(ones_with_grad(), {1, 2}, 1).sum();
    const auto failure = caught([&] { backward(context, {loss}); });
    EXPECT_TRUE(says(failure, "Error on Node 1: before anything"));
    EXPECT_EQ(n_planned, "1") << "worker 2 was told of the pass";
    await_no_pass(workers);
  });
}

TEST(PassEnd, ComesWithTheReleaseOfItsContext) {
  Gate gate;
  run_workers(2, [&](int rank, Workers& workers) {
    if (rank != 0) return;
    trouble = {.leaving = [&] { gate.pass(); }};
    std::optional<DistAutogradContext> context(std::in_place);
    InBackground pass(*context, pass_on(ones_with_grad(), {1}, 1).sum());
    await_one_at(gate);
    context.reset();
    const auto failure = pass.failure();
    EXPECT_EQ(failure.kind, ErrorKind::kAborted) << failure.message;
    EXPECT_TRUE(says(failure, "the autograd context was released"));
    gate.open();
    await_released(workers);
  });
}

TEST(PassEnd, AtATimeoutLeavesARetainedGraphUsable) {
  for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
    Gate gate;
    std::atomic<bool> first{true};
    run_workers(2, [&](int rank, Workers& workers) {
      if (rank != 0) return;
      trouble = {.leaving = [&] {
        if (first) gate.pass();
      }};
      {
        const DistAutogradContext context;
        const auto x = ones_with_grad();
        const auto loss = pass_on(x, {1}, 1).sum();
        const auto failure = caught(
            [&] { backward(context, {loss}, {.retain_graph = true, .mode = mode, .timeout = 200ms}); });
        EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
        first = false;
        backward(context, {loss}, {.retain_graph = true, .mode = mode});
        gate.open();  // what is left of the first pass adds nothing
        backward(context, {loss}, {.mode = mode});
        EXPECT_TRUE(at::equal(context.gradients().find(x), at::ones({3}) * 8)) << "two passes";
      }
      await_released(workers);
    });
  }
}

TEST(PassEnd, ComesWithTheEndOfTheAgentWhereItBegan) {
  Gate gate;
  run_workers(2, [&](int rank, Workers& workers) {
    if (rank != 0) return;
    trouble = {.leaving = [&] { gate.pass(); }};
    std::weak_ptr<GradientAccess> left;
    {
      const DistAutogradContext context;
      left = current_gradients();
      InBackground pass(context, pass_on(ones_with_grad(), {1}, 1).sum());
      await_one_at(gate);
      workers.agents[0]->close();
      const auto failure = pass.failure();
      EXPECT_EQ(failure.kind, ErrorKind::kAborted) << failure.message;
    }
    gate.open();
    until([&] { return left.expired(); }, "the context is kept, perhaps by its pass");
  });
}

std::array<std::weak_ptr<GradientAccess>, 3> contexts;
void note_context() {
  contexts[static_cast<std::size_t>(self())] = current_gradients();
}
LOCKSTEP_RPC_FUNCTION(note_context);

TEST(PassEnd, ComesWithTheEndOfAnAgentThatWaitedForItsPart) {
  Gate gate;
  run_workers(3, [&](int rank, Workers& workers) {
    if (rank != 0) return;
    trouble = {.coming = [&] { gate.pass(); }};
    const DistAutogradContext context;
    InBackground pass(context, pass_on(ones_with_grad(), {1, 2}, 1).sum());
    rpc_sync(2, note_context);
    await_one_at(gate);
    EXPECT_EQ(n_passes(*workers.agents[2]), "1");
    workers.agents[2]->close();
    until([&] { return contexts[2].expired(); }, "the context is kept, perhaps by its pass");
    gate.open();
    const auto failure = pass.failure();
    EXPECT_EQ(failure.kind, ErrorKind::kPeerLost) << failure.message;
    EXPECT_TRUE(says(failure, "worker2"));
  });
}

std::unique_ptr<Gate> owner_holds;
void hold_at_the_owner() {
  owner_holds->pass();
}
LOCKSTEP_RPC_FUNCTION(hold_at_the_owner);

at::Tensor tensor_there(bool with_grad) {
  return with_grad ? ones_with_grad() * 2 : at::ones({3});
}
LOCKSTEP_RPC_FUNCTION(tensor_there);
at::Tensor tensor_there_later() {
  owner_holds->pass();
  return ones_with_grad() * 2;
}
LOCKSTEP_RPC_FUNCTION(tensor_there_later);

TEST(ContextEnd, ReachesTheOwnerOfAnRRefThatWasFetched) {
  run_workers(2, [](int rank, Workers& workers) {
    if (rank != 0) return;
    for (const bool with_grad : {false, true}) {
      const auto there = remote(1, tensor_there, {with_grad});
      there.to_here();
      EXPECT_EQ(n_contexts(*workers.agents[1]), "0");
      {
        const DistAutogradContext context;
        EXPECT_EQ(there.to_here().requires_grad(), with_grad);
        EXPECT_EQ(n_contexts(*workers.agents[1]), "1");
      }
      await_released(workers);
    }
  });
}

TEST(ContextEnd, ReachesTheOwnerOfAnRRefThatIsFetchedLater) {
  owner_holds = std::make_unique<Gate>();
  run_workers(2, [](int rank, Workers& workers) {
    if (rank != 0) return;
    const auto there = remote(1, tensor_there_later);
    rpc::Future<at::Tensor> later;
    {
      const DistAutogradContext context;
      later = there.to_here_async();
      await_one_at(*owner_holds);
    }
    // The release has been answered.
    until([&] { return n_waiting(*workers.agents[0]) == "2"; });
    owner_holds->open();
    later.wait();
    await_released(workers);
  });
}

std::atomic<bool> loss_is_known{false};
std::atomic<bool> outlived{false};

// Runs on worker 2 in a context of worker 0, which is dead by then.
void outlive() {
  until([] { return loss_is_known.load(); });
  pass_on(ones_with_grad(), {1}, kNone);
  outlived = true;
}
LOCKSTEP_RPC_FUNCTION(outlive);

TEST(ContextEnd, OfADeadOwnerIsForGood) {
  loss_is_known = outlived = false;
  owner_holds = std::make_unique<Gate>();
  run_workers(3, [](int rank, Workers& workers) {
    if (rank == 0) {
      const DistAutogradContext context;
      const auto call = rpc_async(2, outlive);
      until([&] { return workers.agents[2]->debug_info().at("agent.server_active_calls") == "1"; });
      await_one_at(*owner_holds);
      workers.exchange->kill(0, "killed by SIGKILL (9)");
      until([] { return outlived.load(); });
      owner_holds->open();
      return;
    }
    if (rank == 2) {
      // Whatever waited for the dead has failed, and all of the agent knows.
      EXPECT_EQ(caught([] { rpc_sync(0, hold_at_the_owner); }).kind, ErrorKind::kPeerLost);
      loss_is_known = true;
    }
    until([] { return outlived.load(); });
    await_released(workers, 0);
  });
}

// On worker 1: leaves its result on worker 2.
rpc::RRef<at::Tensor> leave_at_two(const at::Tensor& x) {
  return remote(2, pass_on, {pass_on(x, {}, 1), std::vector<int>{}, 1});
}
LOCKSTEP_RPC_FUNCTION(leave_at_two);

// Gradients go from 0 to 2 to 1 and back to 0, which never talks to the dead worker during the pass.
TEST(PassEnd, ComesWithTheLossOfAWorkerThatOnlyOthersTalkTo) {
  for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
    Gate gate;
    run_workers(3, [&](int rank, Workers& workers) {
      if (rank != 0) return;
      trouble = {.leaving = [&] {
        // Worker 2 has nothing to do with the pass any more.
        until([&] { return n_passes(*workers.agents[2]) == "0" && n_waiting(*workers.agents[2]) == "0"; });
        workers.exchange->kill(1, "killed by SIGKILL (9)");
        gate.pass();
      }};
      {
        const DistAutogradContext context;
        const auto loss = rpc_sync(1, leave_at_two, {ones_with_grad() * 1}).to_here().sum();
        const auto failure = caught([&] { backward(context, {loss}, {.mode = mode}); });
        EXPECT_EQ(failure.kind, ErrorKind::kPeerLost) << failure.message;
        EXPECT_TRUE(says(failure, "worker1"));
        gate.open();
      }
      await_released(workers, 1);
    });
  }
}

}  // namespace
}  // namespace lockstep::autograd
