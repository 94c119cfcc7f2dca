// All-gather and barrier: values of all, and what is said of those that do not come.
#include "lockstep/rpc/gather.h"

#include <gtest/gtest.h>

#include <atomic>

#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using testing::caught;
using testing::run_workers;
using testing::says;
using testing::until;
using testing::Workers;

std::string name_of(int rank) {
  return "worker" + std::to_string(rank);
}

TEST(Gather, GivesEveryoneTheValuesOfAll) {
  run_workers(3, [](int rank, Workers&) {
    for (int round = 0; round < 3; ++round) {
      const auto values = all_gather(Object(rank * 10 + round));
      ASSERT_EQ(values.size(), 3u);
      for (int i = 0; i < 3; ++i) EXPECT_EQ(values.at(name_of(i)).as<int>(), i * 10 + round);
    }
    if (rank != 1) {
      EXPECT_EQ(all_gather(Object(rank), {"worker0", "worker2"}).size(), 2u);
    } else {
      EXPECT_TRUE(says(caught([] { all_gather(Object(1), {"worker0", "worker2"}); }), "not among"));
    }
    barrier();
  });
}

TEST(Gather, NamesThoseThatDidNotComeInTime) {
  std::atomic<bool> timed_out{false};
  run_workers(4, [&](int rank, Workers& workers) {
    if (rank == 2) {
      until([&] { return workers.agents[0]->debug_info().at("agent.num_waiting_in_gatherings") == "1"; });
      const auto failure = caught([&] { barrier({}, {.timeout = 50ms}); });
      EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
      EXPECT_TRUE(says(failure, "RPCErr:1")) << failure.message;
      EXPECT_TRUE(says(failure, "these have not arrived: worker0, worker3")) << failure.message;
      timed_out = true;
      return;
    }
    if (rank != 1) until([&] { return timed_out.load(); });
    barrier();  // for the others it has come
  });
}

TEST(Gather, ReportsThatItsLeaderDoesNotAnswer) {
  run_workers(
      2,
      [](int rank, Workers&) {
        if (rank != 1) return;
        const auto failure = caught([] { barrier({}, {.timeout = 50ms}); });
        EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
        EXPECT_TRUE(says(failure, "worker0, which leads it, does not answer")) << failure.message;
      },
      {.exchange = {.lose = [](WorkerId, WorkerId to, const transport::Message&) { return to == 0; }}});
}

TEST(Gather, NamesAWorkerThatDiesWhileOthersWaitForIt) {
  run_workers(3, [](int rank, Workers& workers) {
    if (rank == 2) {
      until([&] { return workers.agents[0]->debug_info().at("agent.num_waiting_in_gatherings") == "2"; });
      workers.exchange->kill(2, "killed by SIGKILL (9)");
      return;
    }
    const auto failure = caught([] { barrier(); });
    EXPECT_EQ(failure.kind, ErrorKind::kPeerLost);
    EXPECT_TRUE(says(failure, "worker worker2 is gone: killed by SIGKILL (9)")) << failure.message;
  });
}

TEST(Gather, NamesAWorkerThatHadDiedBefore) {
  run_workers(3, [](int rank, Workers& workers) {
    if (rank == 2) {
      workers.exchange->kill(2, "killed by SIGKILL (9)");
      return;
    }
    until([&] { return workers.agents[0]->workers().size() == 2; });
    const auto failure = caught([] { barrier({"worker0", "worker1", "worker2"}); });
    EXPECT_EQ(failure.kind, ErrorKind::kPeerLost);
    EXPECT_TRUE(says(failure, "worker2")) << failure.message;
    EXPECT_TRUE(says(failure, "SIGKILL")) << failure.message;
  });
}

TEST(Gather, NamesItsLeaderWhenThatDies) {
  run_workers(3, [](int rank, Workers& workers) {
    if (rank == 0) {
      until([&] { return workers.agents[0]->debug_info().at("agent.num_waiting_in_gatherings") == "2"; });
      workers.exchange->kill(0, "killed by SIGKILL (9)");
      return;
    }
    const auto failure = caught([] { barrier(); });
    EXPECT_EQ(failure.kind, ErrorKind::kPeerLost);
    EXPECT_TRUE(says(failure, "worker worker0 (number 0) is gone")) << failure.message;
  });
}

}  // namespace
}  // namespace lockstep::rpc
