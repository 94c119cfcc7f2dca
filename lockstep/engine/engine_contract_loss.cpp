// What survivors see when a rank's process is killed or stopped, during every kind of operation.
#include <signal.h>

#include <algorithm>
#include <cstdio>

#include "lockstep/engine/engine_contract_case.h"

namespace lockstep::comm {
namespace {

constexpr int kSize = 3, kVictim = 1;
constexpr int kKilledAt = 60;  // the board's word for when, in ns

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(Deadline::now().monotonic_ns());
}

// An operation that needs the victim on every other rank; messages go from each rank to the next one, so that
// the victim is both a sender and a receiver, and rank 0 and 2 need it as one of them.
std::vector<lockstep_op> ops_of(PlainOp& plain, PlainOp& second, int rank) {
  const auto kind = plain.op.kind;
  plain.op.root = kVictim;
  if (kind != LOCKSTEP_SEND && kind != LOCKSTEP_RECV) return {plain.op};
  second.op.kind = LOCKSTEP_RECV;
  plain.op.kind = LOCKSTEP_SEND;
  plain.op.root = (rank + 1) % kSize;
  second.op.root = (rank + kSize - 1) % kSize;
  return {plain.op, second.op};
}

// Repeats the operation until it fails; returns how.
lockstep_status repeat(ContractRank& rank, lockstep_op_kind kind, std::uint64_t count, bool posted,
                       Milliseconds timeout) {
  for (;;) {
    PlainOp plain(rank, kind, count, timeout), second(rank, kind, count, timeout);
    const auto ops = ops_of(plain, second, rank.rank());
    if (ops.size() == 1) {
      if (const auto status = rank.call(ops[0], posted); status != LOCKSTEP_OK) return status;
    } else {
      auto* const sent = rank.post(ops[0]);
      auto* const received = rank.post(ops[1]);
      const auto first = rank.finish(sent);
      const auto status = rank.finish(received);
      if (status != LOCKSTEP_OK || first != LOCKSTEP_OK) return status != LOCKSTEP_OK ? status : first;
    }
    rank.word(rank.rank()).fetch_add(1);
  }
}

// Every kind in two sizes, or in one of them by turns; SEND stands for both kinds of message.
enum class Sizes : std::uint8_t { kBoth, kByTurns };
void for_each_kind(const Engine& engine, Sizes sizes,
                   const std::function<void(lockstep_op_kind, std::uint64_t)>& call) {
  for (int k = 0; k <= LOCKSTEP_SEND; ++k) {
    const auto kind = static_cast<lockstep_op_kind>(k);
    if (!engine.offers(kind)) continue;
    for (const bool large : {false, true}) {
      if (sizes == Sizes::kBoth || large == (k % 2 == 1)) call(kind, large ? 100'000 : 50);
    }
  }
}

TEST_P(EngineContract, AKilledRankIsNamedByEverySurvivorOfEveryKind) {
  if (!processes()) GTEST_SKIP() << "needs ranks that are processes";
  std::uint64_t slowest_ns = 0;  // printed, not asserted: a busy machine proves nothing
  const auto sizes = kSanitized && !long_testing::enabled() ? Sizes::kByTurns : Sizes::kBoth;
  for_each_kind(engine(), sizes, [&](lockstep_op_kind kind, std::uint64_t count) {
    if (HasFailure()) return;
    const auto pids = start_processes(kSize, [&](Rank& rank) {
      const auto status = repeat(rank, kind, count, count > 1000, testing::kPatience);
      rank.word(kKilledAt + 1 + rank.rank()) = now_ns() - rank.word(kKilledAt);
      EXPECT_EQ(status, LOCKSTEP_PEER_LOST)
          << "kind " << kind << " rank " << rank.rank() << ": " << rank.error();
      EXPECT_EQ(rank.failure().rank, kVictim) << rank.failure().error;
      EXPECT_NE(rank.failure().error.find(base::cat("rank ", kVictim)), std::string::npos)
          << rank.failure().error;
    });
    const Deadline patience = Deadline::after(testing::kPatience);
    while (board().words[kVictim] < 20 && !patience.expired()) ::usleep(200);
    board().words[kKilledAt] = now_ns();
    ::kill(pids[kVictim], SIGKILL);
    EXPECT_EQ(end_of(pids[kVictim]), "killed by SIGKILL (9)");
    for (const int r : {0, 2}) {
      EXPECT_EQ(end_of(pids[static_cast<std::size_t>(r)]), "exited with code 0")
          << "rank " << r << " kind " << kind << " count " << count;
      slowest_ns = std::max(slowest_ns, board().words[kKilledAt + 1 + r].load());
    }
  });
  std::printf("the slowest survivor heard of it after %.1f ms\n", static_cast<double>(slowest_ns) * 1e-6);
}

TEST_P(EngineContract, AStoppedRankEndsInATimeoutThatNamesIt) {
  if (!processes()) GTEST_SKIP() << "needs ranks that are processes";
  // Each takes as long as its timeout.
  const auto sizes = long_testing::enabled() ? Sizes::kBoth : Sizes::kByTurns;
  for_each_kind(engine(), sizes, [&](lockstep_op_kind kind, std::uint64_t count) {
    if (HasFailure()) return;
    const auto pids = start_processes(kSize, [&](Rank& rank) {
      if (rank.rank() == kVictim) ::raise(SIGSTOP);
      const auto status = repeat(rank, kind, count, count > 1000, Milliseconds(200));
      if (rank.rank() == kVictim) return;
      // A message fails alone: rank 0 waits for rank 2, which waits for the stopped one; it may see it leave,
      // or run out of time with it.
      const bool behind = kind == LOCKSTEP_SEND && rank.rank() == 0;
      if (behind && status == LOCKSTEP_PEER_LOST) return;
      EXPECT_EQ(status, LOCKSTEP_TIMEOUT)
          << "kind " << kind << " rank " << rank.rank() << ": " << rank.error();
      const std::string error = rank.error().empty() ? rank.failure().error : rank.error();
      const auto waited_for = error.substr(std::min(error.size(), error.find("waits for")));
      EXPECT_NE(waited_for.find(behind ? "rank " : base::cat("rank ", kVictim)), std::string::npos) << error;
    });
    for (const int r : {0, 2}) {
      EXPECT_EQ(end_of(pids[static_cast<std::size_t>(r)]), "exited with code 0")
          << "rank " << r << " kind " << kind << " count " << count;
    }
    ::kill(pids[kVictim], SIGKILL);
    EXPECT_EQ(end_of(pids[kVictim]), "killed by SIGKILL (9)");
  });
}

}  // namespace
}  // namespace lockstep::comm
