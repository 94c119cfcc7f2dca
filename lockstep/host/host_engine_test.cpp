// The engine through its C table, ranks as threads: every collective by every path, order, waiting, abort,
// mismatch, leaving. process_test.cpp does the same between real processes.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <numeric>

#include "lockstep/base/log.h"
#include "lockstep/base/slow_wait_testing.h"
#include "lockstep/host/test_world.h"

namespace lockstep::comm {
namespace {

using testing::Rank;
using testing::with_threads;

class Sizes : public ::testing::TestWithParam<int> {};

// Around every border: tiny, inline, direct, odd tails.
const std::size_t kCounts[] = {0, 1, 12, 13, 100, 500, 2048, 2049, 5000, 70'001};

// Rank 1 comes once the other's line was seen. On a busy machine joining lasts, too, and has lines of its own.
TEST(HostEngine, AWaitThatLastsSaysOnceWhoWaitsForWhom) {
  const lockstep::testing::SlowLines slow(Milliseconds(5));
  const std::string begin = "slow: group \"test\": rank 0 waits in barrier() ";
  with_threads(2, [&](Rank& rank) {
    if (rank.rank() == 1) {
      EXPECT_NE(slow.await(begin), "");
    }
    EXPECT_EQ(rank.barrier(), LOCKSTEP_OK) << rank.error();
  });
  const auto lines = slow.with(begin);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_TRUE(lines[0].starts_with(begin)) << lines[0];
  EXPECT_NE(lines[0].find("for rank 1 (pid "), std::string::npos) << lines[0];
}

TEST_P(Sizes, AllReduceSumsInRankOrder) {
  with_threads(GetParam(), [](Rank& rank) {
    for (const std::size_t count : kCounts) {
      std::vector<float> x(count);
      for (std::size_t i = 0; i < count; ++i)
        x[i] = 0.1f * static_cast<float>(rank.rank() + 1) + static_cast<float>(i % 17);
      ASSERT_EQ(rank.all_reduce(x), LOCKSTEP_OK) << rank.error();
      for (std::size_t i = 0; i < count; ++i) {
        float sum = 0.1f + static_cast<float>(i % 17);
        for (int r = 1; r < rank.size(); ++r)
          sum += 0.1f * static_cast<float>(r + 1) + static_cast<float>(i % 17);
        ASSERT_EQ(x[i], sum) << "element " << i << " of " << count;
      }
    }
  });
}

TEST_P(Sizes, AllGatherReduceScatterAndBroadcast) {
  with_threads(GetParam(), [](Rank& rank) {
    const auto n = static_cast<std::size_t>(rank.size()), me = static_cast<std::size_t>(rank.rank());
    for (const std::size_t count : kCounts) {
      std::vector<std::int32_t> part(count), all(count * n), out(count);
      for (std::size_t i = 0; i < count; ++i) part[i] = static_cast<std::int32_t>(i * 10 + me);
      ASSERT_EQ(rank.run(Rank::op(LOCKSTEP_ALL_GATHER, part.data(), all.data(), count, LOCKSTEP_I32)),
                LOCKSTEP_OK);
      for (std::size_t r = 0; r < n; ++r) {
        for (std::size_t i = 0; i < count; ++i)
          ASSERT_EQ(all[r * count + i], static_cast<std::int32_t>(i * 10 + r));
      }
      ASSERT_EQ(rank.run(Rank::op(LOCKSTEP_REDUCE_SCATTER, all.data(), out.data(), count, LOCKSTEP_I32)),
                LOCKSTEP_OK);
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], static_cast<std::int32_t>((i * 10 + me) * n));
      auto op = Rank::op(LOCKSTEP_BROADCAST, part.data(), part.data(), count, LOCKSTEP_I32);
      op.root = rank.size() - 1;
      ASSERT_EQ(rank.run(op), LOCKSTEP_OK);
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(part[i], static_cast<std::int32_t>(i * 10 + n - 1));
    }
  });
}

TEST_P(Sizes, PostedOperationsRunInOrderAndBlockingOnesQueueBehindThem) {
  with_threads(GetParam(), [](Rank& rank) {
    const auto& engine = Rank::engine();
    constexpr int kOps = 40;
    std::vector<std::vector<float>> x(kOps, std::vector<float>(3000));
    std::vector<lockstep_handle*> handles;
    for (int k = 0; k < kOps; ++k) {
      std::fill(x[k].begin(), x[k].end(), static_cast<float>(k));
      const auto op = Rank::op(LOCKSTEP_ALL_REDUCE, x[k].data(), x[k].data(), k % 2 == 0 ? 3000 : 5);
      lockstep_handle* handle = nullptr;
      ASSERT_EQ(engine.post(rank.comm(), &op, &handle), LOCKSTEP_OK);
      handles.push_back(handle);
    }
    ASSERT_EQ(rank.barrier(), LOCKSTEP_OK);
    for (int k = 0; k < kOps; ++k) {
      EXPECT_EQ(engine.test(handles[k]), LOCKSTEP_OK) << "the barrier came after operation " << k;
      EXPECT_EQ(engine.wait(handles[k], LOCKSTEP_NEVER), LOCKSTEP_OK);
      EXPECT_EQ(x[k][0], static_cast<float>(k * rank.size()));
      engine.release(handles[k]);
    }
  });
}

TEST_P(Sizes, AllocatedMemoryIsReducedAndReused) {
  with_threads(GetParam(), [](Rank& rank) {
    const auto& engine = Rank::engine();
    for (int round = 0; round < 3; ++round) {
      void* memory = nullptr;
      ASSERT_EQ(engine.alloc(rank.comm(), 400'000, &memory), LOCKSTEP_OK);
      auto* x = static_cast<float*>(memory);
      for (int i = 0; i < 100'000; ++i) {
        ASSERT_EQ(x[i], 0.f) << "memory given back is zero when taken again";
        x[i] = static_cast<float>(rank.rank());
      }
      auto op = Rank::op(LOCKSTEP_ALL_REDUCE, x, x, 100'000);
      op.reduce = LOCKSTEP_AVG;
      ASSERT_EQ(rank.run(op), LOCKSTEP_OK);
      for (int i = 0; i < 100'000; ++i) ASSERT_NEAR(x[i], static_cast<float>(rank.size() - 1) / 2, 1e-6);
      engine.free(rank.comm(), memory);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Host, Sizes, ::testing::Values(1, 2, 3, 4, 7, 8));

TEST(HostEngine, DifferentCallsAreAnErrorOnEveryRankThatNamesBoth) {
  with_threads(3, [](Rank& rank) {
    std::vector<float> x(64);
    auto op = Rank::op(LOCKSTEP_ALL_REDUCE, x.data(), x.data(), rank.rank() == 2 ? 63 : 64);
    op.where = rank.rank() == 2 ? "other.cpp:9" : "train.cpp:5";
    EXPECT_EQ(rank.run(op), LOCKSTEP_USAGE);
    EXPECT_NE(rank.error().find("rank 2 called all_reduce(sum, f32, 63 elements) #1 at other.cpp:9"),
              std::string::npos)
        << rank.error();
    EXPECT_NE(rank.error().find("train.cpp:5"), std::string::npos) << rank.error();
    EXPECT_EQ(rank.barrier(), LOCKSTEP_USAGE) << "a broken group stays broken";
  });
}

TEST(HostEngine, ATimeoutNamesWhoIsMissingAndBreaksTheGroup) {
  std::atomic<bool> over{false};
  with_threads(3, [&](Rank& rank) {
    ASSERT_EQ(rank.barrier(), LOCKSTEP_OK);
    if (rank.rank() == 1) {
      while (!over) std::this_thread::yield();
      EXPECT_EQ(rank.barrier(), LOCKSTEP_TIMEOUT) << "late ranks learn what happened";
      return;
    }
    std::vector<float> x(8);
    EXPECT_EQ(rank.run(Rank::op(LOCKSTEP_ALL_REDUCE, x.data(), x.data(), 8, LOCKSTEP_F32, Milliseconds(50))),
              LOCKSTEP_TIMEOUT);
    EXPECT_NE(rank.error().find("waits for rank 1"), std::string::npos) << rank.error();
    EXPECT_NE(rank.error().find("last entered barrier() #1"), std::string::npos) << rank.error();
    over = true;
  });
}

TEST(HostEngine, AWaitThatTimesOutLeavesTheOperationRunning) {
  std::atomic<bool> waited{false};
  with_threads(2, [&](Rank& rank) {
    const auto& engine = Rank::engine();
    if (rank.rank() == 1) {
      while (!waited) std::this_thread::yield();
      EXPECT_EQ(rank.barrier(), LOCKSTEP_OK);
      return;
    }
    const auto op = Rank::op(LOCKSTEP_BARRIER, nullptr, nullptr, 0);
    lockstep_handle* handle = nullptr;
    ASSERT_EQ(engine.post(rank.comm(), &op, &handle), LOCKSTEP_OK);
    EXPECT_EQ(engine.wait(handle, Deadline::after(Milliseconds(20)).monotonic_ns()), LOCKSTEP_TIMEOUT);
    EXPECT_EQ(engine.test(handle), LOCKSTEP_PENDING);
    waited = true;
    EXPECT_EQ(engine.wait(handle, LOCKSTEP_NEVER), LOCKSTEP_OK);
    engine.release(handle);
  });
}

TEST(HostEngine, AbortFromAnotherThreadEndsWhatIsPendingOnAllRanks) {
  with_threads(3, [](Rank& rank) {
    const auto& engine = Rank::engine();
    if (rank.rank() == 2) {
      engine.comm_abort(rank.comm(), "enough");
      EXPECT_EQ(rank.barrier(), LOCKSTEP_ABORTED);
      return;
    }
    std::vector<float> x(100'000);
    const auto op = Rank::op(LOCKSTEP_ALL_REDUCE, x.data(), x.data(), x.size());
    lockstep_handle* first = nullptr;
    lockstep_handle* second = nullptr;
    ASSERT_EQ(engine.post(rank.comm(), &op, &first), LOCKSTEP_OK);
    ASSERT_EQ(engine.post(rank.comm(), &op, &second), LOCKSTEP_OK);
    EXPECT_EQ(engine.wait(second, LOCKSTEP_NEVER), LOCKSTEP_ABORTED);
    EXPECT_EQ(engine.wait(first, LOCKSTEP_NEVER), LOCKSTEP_ABORTED);
    char error[512];
    engine.last_error(first, error, sizeof(error));
    EXPECT_NE(std::string(error).find("rank 2 aborted the group: enough"), std::string::npos) << error;
    engine.release(first);
    engine.release(second);
  });
}

TEST(HostEngine, ARankThatLeavesIsNamedToThoseWhoStillNeedIt) {
  with_threads(3, [](Rank& rank) {
    ASSERT_EQ(rank.barrier(), LOCKSTEP_OK);
    if (rank.rank() == 1) return rank.destroy();
    EXPECT_EQ(rank.barrier(), LOCKSTEP_PEER_LOST);
    EXPECT_EQ(rank.failure().rank, 1);
    EXPECT_EQ(rank.failure().cause, "left the group");
  });
}

TEST(HostEngine, ARankThatGivesUpPublishesWhy) {
  with_threads(4, [](Rank& rank) {
    if (rank.rank() == 3) return rank.destroy("out of coffee");
    const auto& engine = Rank::engine();
    const auto op = Rank::op(LOCKSTEP_BARRIER, nullptr, nullptr, 0);
    lockstep_handle* handle = nullptr;
    ASSERT_EQ(engine.post(rank.comm(), &op, &handle), LOCKSTEP_OK);
    EXPECT_EQ(engine.wait(handle, LOCKSTEP_NEVER), LOCKSTEP_PEER_LOST);
    engine.release(handle);
    EXPECT_EQ(rank.failure().rank, 3);
    EXPECT_EQ(rank.failure().cause, "out of coffee");
  });
}

TEST(HostEngine, ABlockedGroupDoesNotHoldUpAnother) {
  testing::MapKv kv_a, kv_b;
  const testing::KvSpace host_a(kv_a), host_b(kv_b);
  std::atomic<bool> b_done{false};
  const auto body = [&](int r) {
    Rank a(host_a.host(), r, 2), b(host_b.host(), r, 2);
    const auto& engine = Rank::engine();
    const auto op = Rank::op(LOCKSTEP_BARRIER, nullptr, nullptr, 0);
    lockstep_handle* pending = nullptr;
    if (r == 0) {
      ASSERT_EQ(engine.post(a.comm(), &op, &pending), LOCKSTEP_OK);
    }
    for (int i = 0; i < 100; ++i) {
      lockstep_handle* handle = nullptr;
      ASSERT_EQ(engine.post(b.comm(), &op, &handle), LOCKSTEP_OK);
      ASSERT_EQ(engine.wait(handle, LOCKSTEP_NEVER), LOCKSTEP_OK);
      engine.release(handle);
    }
    if (r == 0) {
      EXPECT_EQ(engine.test(pending), LOCKSTEP_PENDING);
      b_done = true;
      EXPECT_EQ(engine.wait(pending, LOCKSTEP_NEVER), LOCKSTEP_OK);
      engine.release(pending);
    } else {
      while (!b_done) std::this_thread::yield();
      EXPECT_EQ(a.barrier(), LOCKSTEP_OK);
    }
  };
  std::thread other(body, 1);
  body(0);
  other.join();
}

TEST(HostEngine, AFullSendQueueHoldsUpNoMessagesToOtherRanks) {
  constexpr int kSender = 5, kFar = 64;  // 64 ranks from rank 0
  with_threads(66, [](Rank& rank) {
    std::vector<std::int32_t> x(1);
    const auto message = [&](lockstep_op_kind kind, int peer) {
      auto op = Rank::op(kind, x.data(), x.data(), 1, LOCKSTEP_I32);
      op.root = peer;
      return op;
    };
    if (rank.rank() ==
        0) {  // asks for none of the sender's point-to-point operations before the far rank has heard from it
      EXPECT_EQ(rank.run(message(LOCKSTEP_RECV, kFar)), LOCKSTEP_OK) << rank.error();
      for (int i = 0; i < 12; ++i) EXPECT_EQ(rank.run(message(LOCKSTEP_RECV, kSender)), LOCKSTEP_OK);
    } else if (rank.rank() == kSender) {
      std::vector<lockstep_handle*> handles;
      for (int i = 0; i < 12; ++i) handles.push_back(rank.post(message(LOCKSTEP_SEND, 0)));
      handles.push_back(rank.post(message(LOCKSTEP_SEND, kFar)));
      for (auto* handle : handles) EXPECT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
    } else if (rank.rank() == kFar) {
      EXPECT_EQ(rank.run(message(LOCKSTEP_RECV, kSender)), LOCKSTEP_OK) << rank.error();
      EXPECT_EQ(rank.run(message(LOCKSTEP_SEND, 0)), LOCKSTEP_OK) << rank.error();
    }
  });
}

TEST(HostEngine, BadCallsAreRefusedBeforeAnythingIsSent) {
  with_threads(2, [](Rank& rank) {
    std::vector<float> x(4);
    auto op = Rank::op(LOCKSTEP_BROADCAST, x.data(), x.data(), 4);
    op.root = 2;
    EXPECT_EQ(rank.run(op), LOCKSTEP_USAGE);
    op = Rank::op(LOCKSTEP_ALL_REDUCE, x.data(), x.data(), 4, LOCKSTEP_I32);
    op.reduce = LOCKSTEP_AVG;
    EXPECT_EQ(rank.run(op), LOCKSTEP_USAGE);
    EXPECT_EQ(rank.run(Rank::op(LOCKSTEP_ALL_REDUCE, nullptr, nullptr, 4)), LOCKSTEP_USAGE);
    EXPECT_EQ(rank.barrier(), LOCKSTEP_OK) << "the group is still well";
  });
}

TEST(HostEngine, MoreMemoryThanTheArenaHasIsAResourceError) {
  with_threads(2, [](Rank& rank) {
    void* memory = nullptr;
    EXPECT_EQ(Rank::engine().alloc(rank.comm(), 1ull << 50, &memory), LOCKSTEP_RESOURCE);
    EXPECT_EQ(memory, nullptr);
    EXPECT_EQ(rank.barrier(), LOCKSTEP_OK);
  });
}

TEST(HostEngine, ARankThatNeverComesIsNamed) {
  testing::MapKv kv;
  const testing::KvSpace space(kv);
  try {
    Rank rank(space.host(), 0, 2, Milliseconds(50));
    FAIL() << "joined a group whose other rank does not exist";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 did not join"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lockstep::comm
