// What waits of RPC say when they last. Whoever is waited for comes once the line was seen.
#include <gtest/gtest.h>

#include "lockstep/base/slow_wait_testing.h"
#include "lockstep/rpc/gather.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/rpc_testing.h"
#include "lockstep/store/hash_store.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using lockstep::testing::SlowLines;
using testing::Gate;
using testing::run_workers;
using testing::Workers;

constexpr Milliseconds kSlow{100};

Gate* gate = nullptr;  // of the test that runs
int held_up() {
  gate->pass();
  return 3;
}
LOCKSTEP_RPC_FUNCTION(held_up);

// Opens the gate for whoever is held up by it, once `part` was said.
void open_when_said(const SlowLines& lines, const std::string& part) {
  EXPECT_NE(lines.await(part), "") << part;
  gate->open();
}

void one_waits(const std::function<void()>& wait, const std::string& part) {
  const SlowLines lines(kSlow);
  Gate mine;
  gate = &mine;
  run_workers(2, [&](int rank, Workers&) { rank == 0 ? wait() : open_when_said(lines, part); });
  EXPECT_EQ(lines.with(part).size(), 1u);
}

TEST(RpcSlowWait, ACallSaysWhichWorkerRunsWhatAndUntilWhen) {
  const auto call = [] { EXPECT_EQ(rpc_sync("worker1", held_up, {}, {.timeout = 3600s}), 3); };
  one_waits(
      call,
      "slow: worker worker0 waits for worker worker1: worker1's function held_up; waiting continues until ");
}

TEST(RpcSlowWait, OfACallWithoutATimeoutSaysThatItHasNoEnd) {
  const auto call = [] { EXPECT_EQ(rpc_sync("worker1", held_up, {}, {.timeout = kNoTimeout}), 3); };
  one_waits(call, "worker1's function held_up; waiting continues without a deadline");
}

TEST(RpcSlowWait, AFutureMadeOfAnotherSaysWhichCallsHaveNoAnswer) {
  const auto wait = [] {
    const auto later =
        rpc_async("worker1", held_up).then([](const Future<int>& three) { return three.result() + 1; });
    EXPECT_EQ(later.wait(), 4);
  };
  one_waits(wait, "its calls without an answer: worker1 (worker1's function held_up); waiting continues");
}

TEST(RpcSlowWait, AnRRefSaysWhoseValueItWaitsFor) {
  const auto fetch = [] { EXPECT_EQ(remote("worker1", held_up).to_here(), 3); };
  one_waits(fetch, "slow: worker worker0 waits for worker worker1: the value of ");
}

TEST(RpcSlowWait, AGatheringNamesThoseThatHaveNotCome) {
  const SlowLines lines(kSlow);
  const std::string part =
      "slow: worker worker0 waits in a gathering of 2 workers; these have not arrived: worker1; ";
  run_workers(2, [&](int rank, Workers&) {
    if (rank == 1) {
      EXPECT_NE(lines.await(part), "");
    }
    barrier();
  });
  EXPECT_EQ(lines.with(part).size(), 1u);
}

// Two workers that meet in a store; fn(rank) runs between init_rpc, which waits for `before` first on worker
// 1, and shutdown.
void two_workers(const std::function<void(int)>& before, const std::function<void(int)>& fn) {
  const auto store = std::make_shared<HashStore>();
  std::vector<base::Thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back("rank", [&, rank] {
      base::RankThread self;
      const base::RankThreadScope scope(&self);
      before(rank);
      start("worker" + std::to_string(rank),
            {.rank = rank, .world_size = 2, .store = store->clone(), .init_timeout = 60s});
      fn(rank);
      shutdown();
    });
  }
}

TEST(RpcSlowWait, InitNamesTheRanksThatHaveNotCome) {
  const SlowLines lines(kSlow);
  const std::string part = "slow: init_rpc of worker0 waits for workers that have not arrived yet: ranks 1; ";
  const auto late = [&](int rank) {
    if (rank == 1) {
      EXPECT_NE(lines.await(part), "");
    }
  };
  two_workers(late, [](int) {});
  EXPECT_EQ(lines.with(part).size(), 1u);
}

TEST(RpcSlowWait, ShutdownNamesTheWorkersThatHaveNotCome) {
  const SlowLines lines(kSlow);
  const std::string part =
      "slow: shutdown of worker0, which waits for all 2 workers; these have not arrived: worker1; ";
  const auto late = [&](int rank) {
    if (rank == 1) {
      EXPECT_NE(lines.await(part), "");
    }
  };
  two_workers([](int) {}, late);
  EXPECT_EQ(lines.with(part).size(), 1u);
}

TEST(RpcSlowWait, ShutdownNamesCallsThatHaveNoAnswer) {
  const SlowLines lines(kSlow);
  Gate mine;
  gate = &mine;
  const std::string part =
      "slow: shutdown of worker0 waits for answers to its calls: worker1 (worker1's function held_up); ";
  two_workers([](int) {},
              [&](int rank) {
                if (rank == 0) rpc_async("worker1", held_up);
                if (rank == 1) open_when_said(lines, part);
              });
  EXPECT_EQ(lines.with(part).size(), 1u);
}

}  // namespace
}  // namespace lockstep::rpc
