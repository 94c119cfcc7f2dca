// Bad input, deadlines, abort and leaving.
#include <thread>

#include "lockstep/engine/engine_contract_case.h"

namespace lockstep::comm {
namespace {

// ---- bad input ----

TEST_P(EngineContract, BadCallsAreRefusedAndTheGroupIsStillWell) {
  on_ranks(2, [&](Rank& rank) {
    const auto refused = [&](const char* what, lockstep_op_kind kind,
                             const std::function<void(lockstep_op&)>& spoil) {
      if (kind < LOCKSTEP_OP_KINDS && !engine().offers(kind)) return;
      PlainOp plain(rank, kind < LOCKSTEP_OP_KINDS ? kind : LOCKSTEP_ALL_REDUCE, 4);
      spoil(plain.op);
      EXPECT_EQ(rank.run(plain.op), LOCKSTEP_USAGE) << what << " with kind " << kind;
      EXPECT_TRUE(rank.table().run == nullptr || !rank.error().empty()) << what;
      lockstep_handle* handle = nullptr;
      const auto status = rank.table().post(rank.comm(), &plain.op, &handle);
      EXPECT_EQ(handle == nullptr ? status : rank.finish(handle), LOCKSTEP_USAGE)
          << what << " with kind " << kind;
    };
    refused("an unknown kind", LOCKSTEP_OP_KINDS, [](lockstep_op& op) { op.kind = LOCKSTEP_OP_KINDS; });
    refused("a kind far off", LOCKSTEP_OP_KINDS,
            [](lockstep_op& op) { op.kind = static_cast<lockstep_op_kind>(77); });
    refused("an unknown type", LOCKSTEP_ALL_REDUCE, [](lockstep_op& op) { op.dtype = LOCKSTEP_DTYPES; });
    refused("an unknown reduction", LOCKSTEP_ALL_REDUCE,
            [](lockstep_op& op) { op.reduce = LOCKSTEP_REDUCE_OPS; });
    refused("the mean of integers", LOCKSTEP_ALL_REDUCE, [](lockstep_op& op) {
      op.dtype = LOCKSTEP_I32;
      op.reduce = LOCKSTEP_AVG;
    });
    for (int k = LOCKSTEP_BROADCAST; k < LOCKSTEP_OP_KINDS; ++k) {
      const auto kind = static_cast<lockstep_op_kind>(k);
      refused("no buffers", kind, [](lockstep_op& op) { op.send = op.recv = nullptr; });
      if (!has_root(kind) && kind < LOCKSTEP_SEND) continue;
      refused("a root beyond the group", kind, [](lockstep_op& op) { op.root = 2; });
      refused("a negative root", kind, [](lockstep_op& op) { op.root = -2; });
    }
    refused("no peer to send to", LOCKSTEP_SEND, [](lockstep_op& op) { op.root = -1; });
    for (const auto kind : {LOCKSTEP_SEND, LOCKSTEP_RECV})
      refused("a negative tag", kind, [](lockstep_op& op) { op.tag = -1; });
    for (const auto kind : {LOCKSTEP_ALL_TO_ALL_V, LOCKSTEP_ALL_GATHER_V})
      refused("no counts", kind, [](lockstep_op& op) { op.send_counts = op.recv_counts = nullptr; });
    EXPECT_EQ(rank.failure().status, LOCKSTEP_OK) << rank.failure().error;
    EXPECT_EQ(rank.barrier(), LOCKSTEP_OK) << rank.error();
  });
}

TEST_P(EngineContract, CallsThatDifferBetweenRanksFailOnAllOfThem) {
  if (!GetParam().compares_calls) GTEST_SKIP() << "this engine does not compare calls";
  const std::pair<const char*, std::function<void(lockstep_op&)>> spoils[] = {
      {"count", [](lockstep_op& op) { op.count = op.count / 2 + 1; }},
      {"dtype", [](lockstep_op& op) { op.dtype = LOCKSTEP_I32; }},
      {"reduction", [](lockstep_op& op) { op.reduce = LOCKSTEP_MAX; }},
      {"kind", [](lockstep_op& op) { op.kind = LOCKSTEP_BARRIER; }},
  };
  for (const auto& [what, spoil] : spoils) {
    for (const std::uint64_t count : {4u, 500u, 50'000u}) {
      for (const int size : {2, 3}) {
        on_ranks(size, [&, name = what, &change = spoil](Rank& rank) {
          GuardedBuffer buffer(rank, count * 4, false);
          auto op = Rank::op(LOCKSTEP_ALL_REDUCE, buffer.data(), buffer.data(), count);
          if (rank.rank() == 1) change(op);
          EXPECT_EQ(rank.call(op, rank.rank() == 0), LOCKSTEP_USAGE) << name << ": " << rank.error();
          EXPECT_TRUE(buffer.margins_whole()) << name;
          EXPECT_EQ(rank.failure().status, LOCKSTEP_USAGE);
        });
      }
    }
  }
}

TEST_P(EngineContract, BlocksThatDoNotFitTogetherAreAnErrorAndOverrunNothing) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_TO_ALL_V);
  if (!GetParam().compares_calls) GTEST_SKIP() << "this engine does not compare calls";
  for (const std::uint64_t count : {3u, 90'000u}) {
    on_ranks(3, [&](Rank& rank) {
      GuardedBuffer send(rank, 3 * count * 4, false), recv(rank, 3 * count * 4, false);
      std::vector<std::uint64_t> out(3, count), in(3, count);
      if (rank.rank() == 2) in[0] = count - 1;  // rank 0 sends one more than rank 2 expects
      auto op = Rank::op(LOCKSTEP_ALL_TO_ALL_V, send.data(), recv.data(), 0);
      op.send_counts = out.data();
      op.recv_counts = in.data();
      EXPECT_EQ(rank.run(op), LOCKSTEP_USAGE) << rank.error();
      EXPECT_TRUE(recv.margins_whole());
    });
  }
}

// ---- deadlines ----

TEST_P(EngineContract, AnOperationPastItsDeadlineFailsOnEveryRank) {
  for (int k = 0; k < LOCKSTEP_SEND; ++k) {
    const auto kind = static_cast<lockstep_op_kind>(k);
    if (!engine().offers(kind)) continue;
    on_ranks(3, [&](Rank& rank) {
      // Every kind but a rooted one waits for all: rank 2 stays away, and is what the others wait for.
      if (rank.rank() != 2) {
        PlainOp plain(rank, kind, 20'000, Milliseconds(40));
        plain.op.root = 2;
        const auto status = rank.call(plain.op, rank.rank() == 0);
        if (status != LOCKSTEP_OK || !may_end_early(engine(), kind)) {
          EXPECT_EQ(status, LOCKSTEP_TIMEOUT) << "kind " << k << ": " << rank.error();
          EXPECT_NE(rank.error() + rank.failure().error, "");
        }
        rank.word(rank.rank()) = 1;
      } else {
        rank.await(0, 1);
        rank.await(1, 1);
      }
      if (may_end_early(engine(), kind)) return;  // then nothing need be broken
      PlainOp after(rank, LOCKSTEP_BARRIER, 0);
      auto status = rank.run(after.op);
      // Across hosts the one that stayed away may get, once, what the others had sent before it notices that
      // they gave up.
      const bool may_not_know = rank.rank() == 2 && engine().capabilities().crosses_hosts != 0;
      if (may_not_know && status == LOCKSTEP_OK) status = rank.run(after.op);
      if (may_not_know) {
        EXPECT_NE(status, LOCKSTEP_OK) << "kind " << k;
      } else {
        EXPECT_EQ(status, LOCKSTEP_TIMEOUT) << "the group is broken: " << rank.error();
      }
    });
  }
}

TEST_P(EngineContract, AReceiveWithoutASendEndsAtItsDeadline) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_SEND, LOCKSTEP_RECV);
  for (const int source : {1, -1}) {
    on_ranks(2, [&](Rank& rank) {
      if (rank.rank() == 0) {
        PlainOp plain(rank, LOCKSTEP_RECV, 100, Milliseconds(40));
        plain.op.root = source;
        EXPECT_EQ(rank.call(plain.op, source == 1), LOCKSTEP_TIMEOUT) << rank.error();
        EXPECT_NE(rank.error(), "");
        rank.word(0) = 1;
      } else {
        rank.await(0, 1);
      }
    });
  }
}

TEST_P(EngineContract, AnOperationBehindAStuckOneEndsAtItsOwnDeadline) {
  on_ranks(2, [&](Rank& rank) {
    if (rank.rank() == 1) return rank.await(0, 1);
    PlainOp stuck(rank, LOCKSTEP_BARRIER, 0), behind(rank, LOCKSTEP_ALL_REDUCE, 100, Milliseconds(40));
    auto* const first = rank.post(stuck.op);
    auto* const second = rank.post(behind.op);
    EXPECT_EQ(rank.finish(second), LOCKSTEP_TIMEOUT) << rank.error();
    EXPECT_EQ(rank.finish(first), LOCKSTEP_TIMEOUT) << "a gap would part the ranks: " << rank.error();
    rank.word(0) = 1;
  });
}

TEST_P(EngineContract, AReceiveFromAnyoneEndsWhenAllOthersHaveLeft) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_SEND, LOCKSTEP_RECV);
  for (const bool posted : {false, true}) {
    on_ranks(3, [&](Rank& rank) {
      if (rank.rank() != 0) return;
      PlainOp plain(rank, LOCKSTEP_RECV, 100);
      plain.op.root = -1;
      EXPECT_EQ(rank.call(plain.op, posted), LOCKSTEP_PEER_LOST) << rank.error();
    });
  }
}

TEST_P(EngineContract, AWaitMayGiveUpWhileTheOperationGoesOn) {
  on_ranks(2, [&](Rank& rank) {
    PlainOp plain(rank, LOCKSTEP_ALL_REDUCE, 1000);
    if (rank.rank() == 0) {
      auto* const handle = rank.post(plain.op);
      EXPECT_EQ(rank.table().wait(handle, Deadline::after(Milliseconds(10)).monotonic_ns()),
                LOCKSTEP_TIMEOUT);
      EXPECT_EQ(rank.table().test(handle), LOCKSTEP_PENDING);
      rank.word(0) = 1;
      EXPECT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
    } else {
      rank.await(0, 1);
      EXPECT_EQ(rank.run(plain.op), LOCKSTEP_OK) << rank.error();
    }
  });
}

// ---- abort and leaving ----

TEST_P(EngineContract, AbortFromAnotherThreadEndsEveryKindAndItsReasonStays) {
  for (int k = 0; k < LOCKSTEP_OP_KINDS; ++k) {
    const auto kind = static_cast<lockstep_op_kind>(k);
    if (!engine().offers(kind)) continue;
    for (const bool posted : {false, true}) {
      on_ranks(3, [&](Rank& rank) {
        if (rank.rank() == 2) {  // never takes part
          rank.await(0, 1);
          rank.await(1, 1);
          std::this_thread::sleep_for(Milliseconds(2));
          std::thread([&] { rank.table().comm_abort(rank.comm(), "enough of this"); }).join();
          rank.table().comm_abort(rank.comm(), "a second thought");
        } else {
          PlainOp plain(rank, kind, 20'000);
          plain.op.root = 2;
          rank.word(rank.rank()) = 1;
          const auto status = rank.call(plain.op, posted);
          EXPECT_TRUE(status == LOCKSTEP_ABORTED || (status == LOCKSTEP_OK && may_end_early(engine(), kind)))
              << "kind " << k << " status " << status << ": " << rank.error();
        }
        EXPECT_EQ(rank.barrier(), LOCKSTEP_ABORTED);
        const auto failure = rank.failure();
        EXPECT_EQ(failure.status, LOCKSTEP_ABORTED);
        EXPECT_NE(failure.error.find("enough of this"), std::string::npos) << failure.error;
        rank.meet();
      });
    }
  }
}

TEST_P(EngineContract, ARankThatGivesUpIsNamedWithItsCause) {
  for (int k = 0; k < LOCKSTEP_OP_KINDS; ++k) {
    const auto kind = static_cast<lockstep_op_kind>(k);
    if (!engine().offers(kind)) continue;
    on_ranks(3, [&](Rank& rank) {
      if (rank.rank() == 2) {
        rank.await(0, 1);
        rank.await(1, 1);
        return rank.destroy("out of coffee");
      }
      PlainOp plain(rank, kind, 20'000);
      plain.op.root = 2;
      rank.word(rank.rank()) = 1;
      const auto status = rank.call(plain.op, rank.rank() == 0);
      EXPECT_TRUE(status == LOCKSTEP_PEER_LOST || (status == LOCKSTEP_OK && may_end_early(engine(), kind)))
          << "kind " << k << " status " << status << ": " << rank.error();
      EXPECT_EQ(rank.barrier(), LOCKSTEP_PEER_LOST) << rank.error();
      EXPECT_EQ(rank.failure().rank, 2) << rank.failure().error;
      EXPECT_NE(rank.failure().cause.find("out of coffee"), std::string::npos) << rank.failure().cause;
    });
  }
}

TEST_P(EngineContract, LeavingEndsWhatIsPendingAndMemoryStaysUntilDestroy) {
  if (engine().table().comm_leave == nullptr) GTEST_SKIP() << "this engine leaves in comm_destroy";
  on_ranks(2, [&](Rank& rank) {
    if (rank.rank() == 1) return rank.await(0, 1);
    PlainOp plain(rank, LOCKSTEP_ALL_REDUCE, 50'000);
    void* const memory = has_alloc() ? rank.take_memory(10'000).second : nullptr;
    auto* const handle = rank.post(plain.op);
    rank.table().comm_leave(rank.comm(), nullptr);
    EXPECT_EQ(rank.finish(handle), LOCKSTEP_ABORTED) << rank.error();
    EXPECT_EQ(rank.run(plain.op), LOCKSTEP_ABORTED);
    if (memory != nullptr) {
      const std::vector<char> ones(10'000, 1);
      if (on_device()) {
        rank.memory()->copy_in(memory, ones.data(), ones.size());
      } else {
        std::memcpy(memory, ones.data(), ones.size());
      }
      rank.table().free(rank.comm(), memory);
    }
    rank.word(0) = 1;
  });
}

}  // namespace
}  // namespace lockstep::comm
