// Passes that go wrong: errors, losses, timeouts, bytes nobody sent.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <atomic>

#include "lockstep/autograd/autograd_testing.h"
#include "lockstep/base/slow_wait_testing.h"

namespace lockstep::autograd {
namespace {

using namespace std::chrono_literals;
using namespace testing;
using rpc::rpc_sync;
using rpc::testing::caught;
using rpc::testing::says;
using rpc::testing::until;
using rpc::testing::Workers;

LOCKSTEP_RPC_FUNCTION(pass_on, "autograd_test.pass_on");

TEST(BackwardFailure, NamesTheWorkerAndLeavesTheContextUsable) {
  trouble = {.leaving = [] { throw std::runtime_error("no such luck"); }};
  for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
    for (const int worker : {0, 1, 2}) {
      run_workers(3, [&](int rank, Workers& workers) {
        if (rank != 0) return;
        {
          const DistAutogradContext context;
          const auto x = ones_with_grad();
          const auto loss = pass_on(x, {1, 2}, worker).sum();
          try {
            backward(context, {loss}, {.mode = mode});
            ADD_FAILURE() << "nothing was raised";
          } catch (const Error& error) {
            const std::string start = "Error on Node " + std::to_string(worker) + ": no such luck";
            EXPECT_EQ(std::string(error.what()).rfind(start, 0), 0u) << error.what();
            const auto* remote = dynamic_cast<const rpc::RemoteError*>(&error);
            EXPECT_EQ(remote != nullptr, worker != 0);
            if (remote != nullptr) {
              EXPECT_EQ(remote->worker().name, "worker" + std::to_string(worker));
            }
          }
          await_no_pass(workers);
          if (mode == Mode::kFast) return;  // the sends of the failed pass would be waited for
          backward(context, {pass_on(x, {1, 2}, kNone).sum()});
          EXPECT_TRUE(at::equal(context.gradients().find(x), at::ones({3}) * 8));
        }
        await_released(workers);
      });
    }
  }
}

// Worker 2 is slow; the others wait for it, each for its own reason.
TEST(BackwardSlowWait, NamesTheWorkersWhoseGradientsHaveNotCome) {
  const lockstep::testing::SlowLines lines(100ms);
  for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
    run_workers(3, [&](int rank, Workers& workers) {
      if (rank != 0) return;
      {
        const DistAutogradContext context;
        const std::string head = "slow: the backward pass of autograd context " +
                                 std::to_string(context.id()) + ", begun by worker worker0: worker ";
        trouble = {.leaving = [&] {
          EXPECT_NE(
              lines.await(head + "worker0 waits for gradients of worker worker1; waiting continues until "),
              "");
          EXPECT_NE(
              lines.await(head + "worker1 waits for gradients of worker worker2; waiting continues until "),
              "");
        }};
        const auto x = ones_with_grad();
        backward(context, {pass_on(x, {1, 2}, 2).sum()}, {.mode = mode});
        EXPECT_TRUE(at::equal(context.gradients().find(x), at::ones({3}) * 8));
      }
      await_released(workers);
    });
  }
  trouble = {};
}

TEST(BackwardFailure, OfAWorkerThatDiesIsALossThatNamesIt) {
  for (const auto& [dies, mode] :
       {std::pair{1, Mode::kSmart}, {2, Mode::kSmart}, {1, Mode::kFast}, {2, Mode::kFast}}) {
    std::atomic<bool> over{false};  // a thread of the dead looks at it until the end
    run_workers(3, [&](int rank, Workers& workers) {
      if (rank != 0) return;
      {
        trouble = {.leaving = [&] {
          workers.exchange->kill(static_cast<rpc::WorkerId>(dies), "killed by SIGKILL (9)");
          until([&] { return over.load(); });
        }};
        const DistAutogradContext context;
        const auto x = ones_with_grad();
        const auto loss = pass_on(x, {1, 2}, dies).sum();
        const auto failure = caught([&] { backward(context, {loss}, {.mode = mode}); });
        over = true;
        EXPECT_EQ(failure.kind, ErrorKind::kPeerLost) << failure.message;
        ASSERT_TRUE(failure.peer);
        EXPECT_EQ(failure.peer->rank, dies);
        EXPECT_TRUE(says(failure, "SIGKILL"));
        backward(context, {pass_on(x, {3 - dies}, kNone).sum()});
        EXPECT_TRUE(at::equal(context.gradients().find(x), at::ones({3}) * 4)) << "among those that live";
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
      trouble = {.leaving = [&] {
        until([&] { return n_passes(*workers.agents[1]) == "1"; });
        workers.exchange->kill(0, "killed by SIGKILL (9)");
      }};
      EXPECT_THROW(backward(context, {one.sum() + two.sum()}, {.timeout = 2s}), Error);
    } else {
      until([&] { return workers.agents[0]->closed() || workers.agents[1]->workers().size() == 2; });
      await_released(workers, 0);
    }
  });
}

TEST(BackwardFailure, AtItsTimeoutGivesThePassUpEverywhere) {
  std::atomic<bool> go_on{false};
  run_workers(2, [&](int rank, Workers& workers) {
    if (rank != 0) return;
    {
      trouble = {.leaving = [&] { until([&] { return go_on.load(); }); }};
      const DistAutogradContext context;
      const auto x = ones_with_grad();
      const auto slow = pass_on(x, {1}, 1).sum();
      const auto failure = caught([&] { backward(context, {slow}, {.timeout = 100ms}); });
      EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
      EXPECT_TRUE(says(failure, "RPCErr:1"));
      EXPECT_TRUE(says(failure, "100 milliseconds"));
      // The thread that is stuck there is no obstacle.
      backward(context, {pass_on(x, {1}, kNone).sum()});
      EXPECT_TRUE(at::equal(context.gradients().find(x), at::ones({3}) * 4));
      go_on = true;
    }
    await_released(workers);
  });
}

TEST(BackwardFailure, OfASecondPassOfTheContextLeavesTheFirstAlone) {
  std::atomic<bool> inside{false}, go_on{false};
  run_workers(2, [&](int rank, Workers&) {
    if (rank != 0) return;
    trouble = {.leaving = [&] {
      inside = true;
      until([&] { return go_on.load(); });
    }};
    const DistAutogradContext context;
    const auto x = ones_with_grad();
    const auto first = pass_on(x, {1}, 1).sum();
    const auto second = pass_on(x, {1}, kNone).sum();
    base::RankThread* const here = base::this_rank_thread();
    {
      const base::Thread thread("first pass", [&] {
        const base::RankThreadScope scope(here);
        backward(context, {first});
      });
      until([&] { return inside.load(); });
      const auto failure = caught([&] { backward(context, {second}); });
      EXPECT_EQ(failure.kind, ErrorKind::kUsage);
      EXPECT_TRUE(says(failure, "one at a time"));
      go_on = true;
    }
    EXPECT_TRUE(at::equal(context.gradients().find(x), at::ones({3}) * 4));
    backward(context, {second});
  });
}

TEST(BackwardFailure, ForATensorOfAnotherContextNamesBothContexts) {
  run_workers(2, [&](int rank, Workers&) {
    if (rank != 0) return;
    at::Tensor stale;
    {
      const DistAutogradContext context;
      stale = pass_on(ones_with_grad(), {1}, kNone);
    }
    const DistAutogradContext context;
    const auto failure = caught([&] { backward(context, {stale.sum()}); });
    EXPECT_TRUE(says(failure, "received in autograd context"));
  });
}

TEST(BackwardFailure, OfForgedBytesLeavesOtherPassesIntact) {
  run_workers(2, [&](int rank, Workers& workers) {
    if (rank != 0) return;
    const auto agent = rpc::current_agent("test");
    using rpc::MessageKind;
    for (const auto kind :
         {MessageKind::kBackward, MessageKind::kBackwardPlan, MessageKind::kCleanup,
          MessageKind::kContextHeld, MessageKind::kBackwardDone, MessageKind::kBackwardAbort}) {
      for (const auto& body :
           {Bytes{}, Bytes{1, 2, 3}, Bytes(27, 0xFF), Bytes(27, 1), Bytes(40, 1), Bytes(200, 0xFF)}) {
        // Answered, one way or the other.
        const auto answer = agent->request(1, kind, {.body = body}, 10s, "a damaged message");
        EXPECT_TRUE(answer.state()->wait_over(Deadline::after(10s)));
        if (answer.error()) {
          EXPECT_NE(answer.state()->failure()->failure.kind, ErrorKind::kTimeout);
        }
      }
    }
    {
      const DistAutogradContext context;
      const auto x = ones_with_grad();
      backward(context, {pass_on(x, {1}, kNone).sum()});
      EXPECT_TRUE(at::equal(context.gradients().find(x), at::ones({3}) * 4));
    }
    await_no_pass(workers);
  });
}

}  // namespace
}  // namespace lockstep::autograd
