// RRefs that were on their way from one worker to another when the one that passed them on died.
#include <gtest/gtest.h>

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

// Worker 1 has a value at worker 0, and tells worker 2 of it; the owner never hears from worker 2.
TEST(RRefLoss, OfAWorkerThatPassedOneOnIsNamedByTheOwner) {
  const auto lose = [](WorkerId from, WorkerId, const courier::Message& message) {
    return from == 2 && message.kind == static_cast<std::uint8_t>(Kind::kRRefFork);
  };
  run_workers(3,
              [](int rank, Workers& workers) {
                if (rank != 1) return;
                const auto number = remote(0, seven);
                EXPECT_EQ(number.to_here(), 7);
                rpc_sync(2, keep, {number});
                workers.exchange->kill(1, "killed by SIGKILL (9)");
                until([&] { return workers.agents[0]->debug_info().at("num_owner_rrefs") == "0"; });
                const RankThreadScope there(workers.agents[2]->options().rank);
                const auto failure = caught([] { kept.to_here(); });
                EXPECT_EQ(failure.kind, ErrorKind::kPeerLost) << failure.message;
                EXPECT_TRUE(says(failure, "lost so far: worker1"));
                EXPECT_TRUE(failure.peer && failure.peer->rank == 1);
                kept = {};
              },
              {.exchange = {.lose = lose}});
}

}  // namespace
}  // namespace lockstep::rpc
