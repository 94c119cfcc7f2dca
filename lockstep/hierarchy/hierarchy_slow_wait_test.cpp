// What waits of the hierarchical engine say when they last: four rank threads that say they are on two hosts.
#include <gtest/gtest.h>

#include <thread>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/slow_wait_testing.h"
#include "lockstep/engine/test_world.h"
#include "lockstep/hierarchy/hierarchy.h"
#include "lockstep/host/host.h"

namespace lockstep::comm {
namespace {

using lockstep::testing::SlowLines;
using testing::EngineRank;
using testing::KvSpace;
using testing::MapKv;

constexpr int kRanks = 4;
thread_local std::string pretended_host;  // of this rank

const lockstep_engine& table() {
  static const Engine host(host_engine(), "built in");
  static const HierarchicalEngine engine(host, host, {.identity = [] { return pretended_host; }});
  return *engine.table();
}

void on_two_hosts(
    const std::function<void(int rank, const std::function<std::unique_ptr<EngineRank>()>& join)>& body) {
  MapKv kv;
  KvSpace space(kv, "group");
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back([&, r] {
      pretended_host = base::cat("host ", r / 2);
      body(r, [&, r] {
        return std::make_unique<EngineRank>(table(), space.host(), r, kRanks, EngineRank::Options{});
      });
    });
  }
  for (auto& rank : ranks) rank.join();
}

constexpr Milliseconds kSlow{300};

TEST(HierarchySlowWait, NamesTheRankThatHasNotEnteredWhicheverHostItIsOn) {
  const SlowLines lines(kSlow);
  const auto line_of = [](int rank) {
    return base::cat(
        "slow: group \"test\": rank ", rank,
        " is in collective #1 at test.cpp:1: it waits for rank 3, which has not been seen to enter "
        "it; waiting "
        "continues until ");
  };
  on_two_hosts([&](int rank, const auto& join) {
    const auto end = join();
    for (int r = 0; r < 3 && rank == 3; ++r) EXPECT_NE(lines.await(line_of(r)), "") << r;
    if (rank == 3)
      std::this_thread::sleep_for(kSlow * 3 / 2);  // time for a second line, of a sub-communicator
    EXPECT_EQ(end->barrier(), LOCKSTEP_OK) << end->error();
  });
  for (int r = 0; r < 3; ++r) EXPECT_EQ(lines.with(line_of(r)).size(), 1u);
  EXPECT_EQ(lines.with("\"test, ").size(), 0u) << "the parts stay silent";
}

TEST(HierarchySlowWait, OfJoiningNamesTheRankThatHasNotCome) {
  const SlowLines lines(kSlow);
  const std::string line = "slow: rank 0 joins group \"test\": it waits for rank 3; waiting continues until ";
  on_two_hosts([&](int rank, const auto& join) {
    if (rank == 3) {
      EXPECT_NE(lines.await(line), "");
    }
    EXPECT_EQ(join()->barrier(), LOCKSTEP_OK);
  });
  EXPECT_EQ(lines.with(line).size(), 1u);
}

}  // namespace
}  // namespace lockstep::comm
