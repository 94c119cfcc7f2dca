#include "lockstep/collective/collective_utils.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <map>
#include <stdexcept>

#include "lockstep/base/detail/raise.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

using namespace testing;
using Words = std::map<std::string, std::vector<int>>;

TEST(BroadcastResult, GivesEveryRankWhatOneComputed) {
  for (const int n : {1, 3}) {
    world(n, [n](int rank) {
      int n_calls = 0;
      const auto words = broadcast_result(
          [&] {
            ++n_calls;
            return Words{{"rank", {rank}}};
          },
          {.src = n - 1});
      EXPECT_EQ(words, (Words{{"rank", {n - 1}}}));
      EXPECT_EQ(n_calls, rank == n - 1 ? 1 : 0);
      bool ran = false;
      broadcast_result([&] { ran = true; });  // nothing to return: the others know that it is done
      EXPECT_EQ(ran, rank == 0);
    });
  }
}

TEST(BroadcastResult, TheRankThatComputesIsOneOfTheGroupsWorld) {
  const auto store = std::make_shared<HashStore>();
  world(3, [&](int rank) {
    const auto backwards = create_group(
        {.store = store, .rank = 2 - rank, .size = 3, .name = "backwards", .timeout = kPatience});
    EXPECT_EQ(broadcast_result([&] { return rank; }, {.src = 0, .group = backwards}), 2);
  });
}

TEST(BroadcastResult, RaisesOnEveryRankWhatTheFunctionThrew) {
  world(3, [](int) {
    const auto failure = caught([] {
      broadcast_result([]() -> int { throw std::runtime_error("no such file"); },
                       {.src = 1, .stage = "load the words"});
    });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(failure, "rank 1 threw: no such file") && says(failure, "\"load the words\"") &&
                says(failure, "collective_utils_test.cpp:"))
        << failure.message;
    const auto ours =
        caught([] { broadcast_result([] { base::raise(ErrorKind::kResource, "the disk is full"); }); });
    EXPECT_EQ(ours.kind, ErrorKind::kResource) << ours.message;
    EXPECT_EQ(sum_over({}), 6.0f) << "the group goes on";
    refused([] { broadcast_result([] { return 1; }, {.src = 3}); }, "src is 3");
  });
}

TEST(AllGatherResults, GivesEveryRankAllResultsInOrder) {
  world(3, [](int rank) {
    const auto group = new_group({0, 2});
    EXPECT_EQ(all_gather_results([&] { return rank * 10; }), (std::vector<int>{0, 10, 20}));
    const auto some = all_gather_results([&] { return std::to_string(rank); }, {.group = group});
    EXPECT_EQ(some, rank == 1 ? std::vector<std::string>{} : (std::vector<std::string>{"0", "2"}));
    const int first = broadcast_result([&] { return rank + 5; }, {.group_src = 1, .group = group});
    EXPECT_EQ(first, rank == 1 ? 0 : 7);
    all_gather_results([] {});
  });
}

TEST(AllGatherResults, NamesEveryRankWhoseFunctionThrew) {
  world(4, [](int rank) {
    const auto failure = caught([&] {
      all_gather_results(
          [&] {
            if (rank % 2 == 1) throw std::invalid_argument("shard " + std::to_string(rank));
            return rank;
          },
          {.stage = "open shards"});
    });
    EXPECT_TRUE(says(failure, "rank 1 threw: shard 1; rank 3 threw: shard 3") && says(failure, "open shards"))
        << failure.message;
    EXPECT_EQ(sum_over({}), 10.0f) << "the group goes on";
  });
}

TEST(CheckRngSync, NamesOnEveryRankWhichRanksDrewOtherNumbers) {
  world(3, [](int rank) {
    auto generator = at::detail::createCPUGenerator(7);
    check_rng_sync({.generator = generator});
    check_rng_sync();  // rank threads share the default one
    if (rank == 2) at::rand({1}, generator);
    const auto failure = caught([&] { check_rng_sync({.generator = generator}); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(failure, "ranks 0 1 have ") && says(failure, "ranks 2 have ")) << failure.message;
  });
}

}  // namespace
}  // namespace lockstep
