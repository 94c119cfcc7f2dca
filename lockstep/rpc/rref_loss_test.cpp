// RRefs that were on their way from one worker to another when the one that passed them on died.
#include <gtest/gtest.h>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc {
namespace {

using testing::caught;
using testing::run_workers;
using testing::says;
using testing::until;
using testing::Workers;

int seven() {
  return 7;
}
LOCKSTEP_RPC_FUNCTION(seven);

RRef<int> kept;
void keep(const RRef<int>& number) {
  kept = number;
}
LOCKSTEP_RPC_FUNCTION(keep);

// Worker 1 has a value at worker 0, and passes it to worker 2; the owner never gets a message from worker 2.
TEST(RRefLoss, OfAWorkerThatPassedOneOnIsNamedByTheOwner) {
  const auto lose = [](WorkerId from, WorkerId, const transport::Message& message) {
    return from == 2 && message.kind == static_cast<std::uint8_t>(MessageKind::kRRefFork);
  };
  run_workers(3,
              [](int rank, Workers& workers) {
                if (rank != 1) return;
                const auto number = remote(0, seven);
                EXPECT_EQ(number.to_here(), 7);
                rpc_sync(2, keep, {number});
                workers.exchange->kill(1, "killed by SIGKILL (9)");
                until([&] { return workers.agents[0]->debug_info().at("num_owner_rrefs") == "0"; });
                const base::RankThreadScope there(workers.agents[2]->options().rank);
                const auto failure = caught([] { kept.to_here(); });
                EXPECT_EQ(failure.kind, ErrorKind::kPeerLost) << failure.message;
                EXPECT_TRUE(says(failure, "lost so far: worker1"));
                EXPECT_TRUE(failure.peer && failure.peer->rank == 1);
                kept = {};
              },
              {.exchange = {.lose = lose}});
}

// Questions for a value that is not made yet, some of them handled while the owner closes: they must not keep
// each other alive.
TEST(RRefLoss, OfTheOwnersAgentLeavesNothingBehind) {
  for (int round = 0; round < 40; ++round) {
    std::weak_ptr<RRefManager> manager;
    std::atomic<bool> over{false};
    run_workers(2, [&](int rank, Workers& workers) {
      if (rank == 1) {
        manager = rref_manager(*workers.agents[1]).weak_from_this();
        std::this_thread::sleep_for(std::chrono::microseconds(round * 25));
        workers.agents[1]->close();
        over = true;
        return;
      }
      for (int i = 0; !over && i < 10'000; ++i) {
        const auto agent = workers.agents[0];
        base::ByteWriter fetch;
        fetch.put(std::uint64_t{0}).put(agent->new_id()).put(agent->new_id()).put(std::uint8_t{0});
        agent->request(1, MessageKind::kRRefFetch, {.body = fetch.take()}, kNoTimeout, "a value",
                       [](Agent::Answer*, const CallFailure*) {});
      }
    });
    ASSERT_TRUE(manager.expired()) << "round " << round;
  }
}

}  // namespace
}  // namespace lockstep::rpc
