// Processes that die. The fake NCCL does not reach other processes: it makes communicators alone (FAKE_NCCL_ALONE) and its
// operations hang, which is all that a survivor sees of a dead peer. A program of its own, since ranks are forked.
#include <signal.h>

#include <atomic>

#include "engines/nccl/nccl_testing.h"
#include "lockstep/base/fork_testing.h"

namespace lockstep::nccl_plugin {
namespace {

const bool kAlone = ::setenv("FAKE_NCCL_ALONE", "1", 1) == 0;
constexpr int kSize = 3, kVictim = 1;

struct Board {
  std::atomic<int> waiting{0};
};

// In a child: posts something that waits for the victim, and reports how it ended.
void survive(NcclRank& rank, Board& board, const lockstep_op& op) {
  lockstep_handle* handle = nullptr;
  CHILD_EXPECT(plugin().post(rank.comm(), &op, &handle) == LOCKSTEP_OK, "post");
  // On the device, and not only in a queue, where it is a collective.
  if (op.kind == LOCKSTEP_ALL_REDUCE)
    CHILD_EXPECT(plugin().stream_wait(handle, rank.stream()) == LOCKSTEP_OK, "stream_wait");
  ++board.waiting;
  const auto status = rank.finish(handle);
  CHILD_EXPECT(status == LOCKSTEP_PEER_LOST, base::cat(status, ": ", rank.error()));
  const auto failure = rank.failure();
  CHILD_EXPECT(failure.rank == kVictim, failure.error);
  CHILD_EXPECT(failure.pid > 0, failure.error);
  CHILD_EXPECT(failure.error.find("rank 1") != std::string::npos, failure.error);
  CHILD_EXPECT(!failure.cause.empty(), failure.error);
  CHILD_EXPECT(fork_testing::eventually([&] { return rank.stream_is_idle(); }), "the stream still waits");
}

void kill_one_of_three(const std::function<lockstep_op(NcclRank&, const DeviceFloats&)>& make) {
  ASSERT_TRUE(kAlone);
  const fork_testing::Shared<Board> board;
  comm::testing::FolderKv kv;
  std::vector<pid_t> pids;
  for (int r = 0; r < kSize; ++r) {
    const pid_t pid = ::fork();
    if (pid != 0) {
      pids.push_back(pid);
      continue;
    }
    {
      NcclRank rank(kv, r, kSize, {});
      CHILD_EXPECT(rank.status() == LOCKSTEP_OK, rank.error());
      const auto x = rank.floats({1});
      const lockstep_op op = make(rank, x);
      if (r == kVictim) {
        if (op.kind == LOCKSTEP_ALL_REDUCE) rank.post(op);  // NCCL connects all ranks
        ++board->waiting;
        for (;;) ::pause();
      }
      survive(rank, *board, op);
    }
    std::exit(0);  // the fake driver joins its streams
  }
  EXPECT_TRUE(fork_testing::eventually([&] { return board->waiting == kSize; }));
  ::kill(pids[kVictim], SIGKILL);
  for (int r = 0; r < kSize; ++r) {
    int status = -1;
    ::waitpid(pids[static_cast<std::size_t>(r)], &status, 0);
    EXPECT_EQ(base::describe_wait_status(status),
              r == kVictim ? "killed by SIGKILL (9)" : "exited with code 0")
        << r;
  }
}

TEST(NcclLoss, AKilledRankEndsTheCollectivesOfTheOthers) {
  kill_one_of_three([](NcclRank& rank, const DeviceFloats& x) { return rank.all_reduce(x); });
}

TEST(NcclLoss, AKilledRankEndsTheReceivesOfTheOthers) {
  kill_one_of_three(
      [](NcclRank& rank, const DeviceFloats& x) { return rank.message(LOCKSTEP_RECV, x, kVictim, 0); });
}

TEST(NcclLoss, AKilledRankEndsTheSendsOfTheOthers) {
  kill_one_of_three(
      [](NcclRank& rank, const DeviceFloats& x) { return rank.message(LOCKSTEP_SEND, x, kVictim, 0); });
}

}  // namespace
}  // namespace lockstep::nccl_plugin
