// Collectives and the barrier over a store, ranks as threads.
#include "lockstep/store/store_collectives.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/slow_wait_testing.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

constexpr Milliseconds kShort{30};

// Runs `rank_main` on every rank of a world, over one store.
void run(int world_size, const std::function<void(StoreCollectives&)>& rank_main) {
  HashStore store;
  std::vector<std::future<void>> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank, handle = std::shared_ptr<Store>(store.clone())] {
      StoreCollectives collectives(handle, rank, world_size);
      rank_main(collectives);
    }));
  }
  for (auto& rank : ranks) rank.get();
}

std::string error_of(ErrorKind kind, const std::function<void()>& call) {
  try {
    call();
  } catch (const DistStoreError& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "raised nothing";
  return "";
}

Bytes text_of(int rank) {
  return to_bytes(base::cat("rank", rank));
}

class StoreCollectivesOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, StoreCollectivesOf, ::testing::Values(1, 2, 3, 4, 7, 8));

TEST_P(StoreCollectivesOf, NoRankLeavesABarrierBeforeAllHaveArrived) {
  std::atomic<int> came = 0;
  run(GetParam(), [&](StoreCollectives& world) {
    ++came;
    world.barrier("b");
    EXPECT_EQ(came, GetParam());
  });
}

TEST_P(StoreCollectivesOf, BroadcastGivesTheSendersValueToAll) {
  run(GetParam(), [&](StoreCollectives& world) {
    const int root = GetParam() - 1;
    if (world.rank() == root) return world.broadcast_send("b", text_of(root));
    EXPECT_EQ(world.broadcast_recv("b"), text_of(root));
  });
}

TEST_P(StoreCollectivesOf, GatherKeepsTheOrderOfRanks) {
  run(GetParam(), [&](StoreCollectives& world) {
    if (world.rank() != 0) return world.gather_send("g", text_of(world.rank()));
    const auto values = world.gather_recv("g", text_of(0));
    ASSERT_EQ(values.size(), static_cast<std::size_t>(GetParam()));
    for (int rank = 0; rank < GetParam(); ++rank)
      EXPECT_EQ(values[static_cast<std::size_t>(rank)], text_of(rank));
  });
}

TEST_P(StoreCollectivesOf, ScatterGivesEachRankItsValue) {
  run(GetParam(), [&](StoreCollectives& world) {
    std::vector<Bytes> values;
    for (int rank = 0; rank < GetParam(); ++rank) values.push_back(text_of(rank));
    const Bytes mine = world.rank() == 0 ? world.scatter_send("s", values) : world.scatter_recv("s");
    EXPECT_EQ(mine, text_of(world.rank()));
  });
}

TEST_P(StoreCollectivesOf, AllGatherAndAllSumGiveEveryoneTheSame) {
  run(GetParam(), [&](StoreCollectives& world) {
    const int n = GetParam();
    EXPECT_EQ(world.all_gather("g", text_of(world.rank())).at(static_cast<std::size_t>(n - 1)),
              text_of(n - 1));
    EXPECT_EQ(world.all_sum("s", world.rank() - 1), n * (n - 1) / 2 - n);
  });
}

TEST(StoreCollectives, ABarrierThatLastsSaysOnceWhoIsMissing) {
  const lockstep::testing::SlowLines lines(kShort);
  const std::string part =
      "slow: store barrier \"b\" on rank 0: 1 of 2 ranks arrived; missing: 1; waiting continues until ";
  run(2, [&](StoreCollectives& world) {
    if (world.rank() == 1) {
      EXPECT_NE(lines.await(part), "");
      std::this_thread::sleep_for(3 * kShort);  // time for a second line
    }
    world.barrier("b");
  });
  EXPECT_EQ(lines.with("slow: ").size(), 1u) << "the store below stays silent";
}

TEST(StoreCollectives, AKeyIsUsedOnce) {
  StoreCollectives world(std::make_shared<HashStore>(), 0, 1);
  world.barrier("key");
  EXPECT_NE(error_of(ErrorKind::kUsage, [&] { world.all_sum("key", 1); }).find("\"key\""), std::string::npos);
}

TEST(StoreCollectives, ATimeoutNamesTheRanksThatDidNotCome) {
  auto store = std::make_shared<HashStore>();
  StoreCollectives(store, 1, 4).gather_send("g", text_of(1));
  StoreCollectives world(store, 0, 4);
  const std::string text = error_of(ErrorKind::kTimeout, [&] { world.gather_recv("g", {}, kShort); });
  EXPECT_NE(text.find("30 ms"), std::string::npos) << text;
  EXPECT_NE(text.find("2 of 4 ranks arrived; missing: 2, 3"), std::string::npos) << text;
  error_of(ErrorKind::kTimeout, [&] { world.broadcast_recv("b", kShort); });
  error_of(ErrorKind::kTimeout, [&] { world.scatter_recv("s", kShort); });
  error_of(ErrorKind::kTimeout, [&] { world.all_gather("ag", {}, kShort); });
  error_of(ErrorKind::kTimeout, [&] { world.all_sum("as", 1, kShort); });
}

TEST(StoreCollectives, WithoutATimeoutWaitAsLongAsTheStoreDoes) {
  auto store = std::make_shared<HashStore>(HashStoreOptions{.timeout = kShort});
  StoreCollectives world(store, 0, 2);
  const std::string text = error_of(ErrorKind::kTimeout, [&] { world.barrier("b"); });
  EXPECT_NE(text.find("30 ms"), std::string::npos) << text;
  error_of(ErrorKind::kTimeout, [&] { world.broadcast_recv("br"); });
  error_of(ErrorKind::kTimeout, [&] { world.gather_recv("g", {}); });
  error_of(ErrorKind::kTimeout, [&] { world.scatter_recv("s"); });
  error_of(ErrorKind::kTimeout, [&] { world.all_gather("ag", {}); });
  error_of(ErrorKind::kTimeout, [&] { world.all_sum("as", 1); });
}

TEST(StoreCollectives, WrongArgumentsAreUsageErrors) {
  error_of(ErrorKind::kUsage, [] { StoreCollectives(nullptr, 0, 1); });
  error_of(ErrorKind::kUsage, [] { StoreCollectives(std::make_shared<HashStore>(), 2, 2); });
  error_of(ErrorKind::kUsage, [] {
    StoreCollectives(std::make_shared<HashStore>(), 0, 2).scatter_send("s", std::vector<Bytes>(3));
  });
}

TEST(StoreCollectives, ATimeoutOfZeroOrLessIsRefusedBeforeAnythingIsWritten) {
  auto store = std::make_shared<HashStore>();
  StoreCollectives world(store, 0, 2);
  for (const Milliseconds wrong : {Milliseconds(0), Milliseconds(-1)}) {
    error_of(ErrorKind::kUsage, [&] { store_barrier(*store, 0, 2, "b", wrong); });
    error_of(ErrorKind::kUsage, [&] { world.barrier("b", wrong); });
    error_of(ErrorKind::kUsage, [&] { world.broadcast_recv("br", wrong); });
    error_of(ErrorKind::kUsage, [&] { world.gather_recv("g", {}, wrong); });
    error_of(ErrorKind::kUsage, [&] { world.scatter_recv("s", wrong); });
    error_of(ErrorKind::kUsage, [&] { world.all_gather("ag", {}, wrong); });
    error_of(ErrorKind::kUsage, [&] { world.all_sum("as", 1, wrong); });
  }
  EXPECT_EQ(store->num_keys(), 0);
}

TEST(StoreBarrier, ATimeoutSaysHowManyCameAndWhoIsMissing) {
  HashStore store;
  error_of(ErrorKind::kTimeout, [&] { store_barrier(store, 2, 3, "b", kShort); });
  const std::string text = error_of(ErrorKind::kTimeout, [&] { store_barrier(store, 0, 3, "b", kShort); });
  EXPECT_NE(text.find("2 of 3 ranks arrived; missing: 1"), std::string::npos) << text;
}

TEST(StoreBarrier, AKeyUsedBeforeIsAnError) {
  HashStore store;
  store_barrier(store, 0, 1, "b");
  EXPECT_NE(error_of(ErrorKind::kUsage, [&] { store_barrier(store, 0, 1, "b"); }).find("used before"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep
