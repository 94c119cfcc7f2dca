// The cases on DTensors against what python torch saw when the goldens were made (tools/parity.sh sharded
// --goldens), and the comparison itself.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/base/path_testing.h"
#include "lockstep/collective/collective.h"
#include "tests/parity/sharded_cases.h"

namespace parity {
namespace {

const std::filesystem::path kShardedGoldens = lockstep::path_testing::from_program(LOCKSTEP_SHARDED_GOLDENS);

PlacementTexts golden_placements(const ShardedWorld& world) {
  return read_placements(kShardedGoldens / (world.name + ".placements.txt"));
}

// By rank. The full values are the same on all ranks; the file of rank 0 has them.
std::vector<Sighting> goldens(const ShardedWorld& world) {
  std::vector<Sighting> all;
  for (int rank = 0; rank < world.n_ranks(); ++rank) {
    const auto file = world.name + ".rank" + std::to_string(rank) + ".txt";
    all.push_back({read_record(kShardedGoldens / file), golden_placements(world)});
    for (const auto& [name, values] : all.front().values) {
      if (name.ends_with(".full")) all.back().values[name] = values;
    }
  }
  return all;
}

// In f64: what another processor rounds differently then lies far below the bound.
std::vector<Sighting> see_all(const ShardedWorld& world, const std::vector<ShardedCase>& cases) {
  at::set_num_threads(1);
  const auto theirs = golden_placements(world);
  std::vector<Sighting> ours(static_cast<std::size_t>(world.n_ranks()));
  lockstep::run_threads(world.n_ranks(), [&](int rank) {
    ours[static_cast<std::size_t>(rank)] = run_sharded(world, cases, rank, at::kDouble, theirs);
  });
  return ours;
}

ShardedComparison compare_case(const std::vector<Sighting>& ours, const std::vector<Sighting>& theirs,
                               const std::string& name) {
  ShardedComparison all;
  for (std::size_t rank = 0; rank < theirs.size(); ++rank)
    all.add(compare(part_of(ours[rank], name), part_of(theirs[rank], name), Theirs::kSome));
  return all;
}

TEST(ShardedParity, EveryCaseLiesAndCountsAsInPythonTorch) {
  std::size_t n_cases = 0;
  for (const auto& world : sharded_worlds()) {
    const auto ours = see_all(world, world.cases), theirs = goldens(world);
    for (const auto& one : world.cases) {
      const auto result = compare_case(ours, theirs, one.name);
      EXPECT_TRUE(result.values.within())
          << one.name << ": " << result.values.worst_name << " is " << result.values.worst << " away";
      for (const auto& text : result.misplaced) ADD_FAILURE() << text;
      EXPECT_GE(result.n_placements, 1U) << one.name;
    }
    n_cases += world.cases.size();
  }
  RecordProperty("cases", static_cast<int>(n_cases));
  EXPECT_GE(n_cases, 32U);  // thirty operators and the transformer under two plans
}

TEST(ShardedParity, EveryGoldenBelongsToACase) {
  for (const auto& world : sharded_worlds()) {
    auto left = golden_placements(world);
    for (const auto& one : world.cases)
      std::erase_if(left, [&](const auto& item) { return item.first.starts_with(one.name + "."); });
    EXPECT_TRUE(left.empty()) << left.begin()->first;
  }
}

TEST(ShardedParity, AMissingReductionIsNoticedByItsValues) {
  const auto& line = sharded_worlds().front();
  const auto result = compare_case(see_all(line, broken_cases()), goldens(line), "partial_to_replicate");
  EXPECT_FALSE(result.values.within());
  EXPECT_LT(result.values.worst, std::numeric_limits<double>::infinity()) << result.values.worst_name;
  EXPECT_TRUE(result.misplaced.empty());
}

TEST(ShardedParity, AResultThatLiesElsewhereIsNoticedByItsPlacement) {
  const auto& line = sharded_worlds().front();
  const auto result = compare_case(see_all(line, broken_cases()), goldens(line), "transpose");
  ASSERT_EQ(result.misplaced.size(), 2U);  // on both ranks
  EXPECT_EQ(result.misplaced[0], "transpose.out is Shard(0), torch's is Shard(1)");
  EXPECT_FALSE(result.within());
}

TEST(ShardedParity, WhatIsListedAsPlacedDifferentlyIs) {
  PlacementTexts theirs;
  for (const auto& world : sharded_worlds()) theirs.merge(golden_placements(world));
  for (const auto& listed : differences()) {
    ASSERT_TRUE(theirs.contains(listed.tensor)) << listed.tensor;
    EXPECT_EQ(theirs[listed.tensor] == listed.ours, listed.kind == Difference::Kind::kOtherParts)
        << listed.tensor;
    EXPECT_FALSE(listed.why.empty()) << listed.tensor;
  }
}

// ---- the comparison ----

Sighting one_tensor(const std::string& placement) {
  return {{{"a.out.local", std::vector<double>{1}}, {"a.out.full", std::vector<double>{1, 2}}},
          {{"a.out", placement}}};
}

TEST(ShardedCompare, WhatIsMissingIsNotTheSame) {
  const auto whole = one_tensor("Shard(0)");
  EXPECT_TRUE(compare(whole, whole, Theirs::kComplete).within());
  EXPECT_FALSE(compare(Sighting{}, Sighting{}, Theirs::kComplete).within());
  EXPECT_FALSE(compare(Sighting{}, whole, Theirs::kComplete).within());
  auto less = whole;
  less.values.erase("a.out.local");
  EXPECT_FALSE(compare(less, whole, Theirs::kSome).within());
  EXPECT_FALSE(compare(whole, less, Theirs::kComplete).within());
  EXPECT_TRUE(compare(whole, less, Theirs::kSome).within());
  auto more = whole;
  more.placements["b.out"] = "Replicate()";
  EXPECT_FALSE(compare(more, whole, Theirs::kSome).within());
  EXPECT_FALSE(compare(whole, more, Theirs::kSome).within());
}

TEST(ShardedCompare, PlacementsAreComparedInEveryDimension) {
  EXPECT_FALSE(compare(one_tensor("Shard(0) Replicate()"), one_tensor("Shard(0) Shard(1)"), Theirs::kComplete)
                   .within());
}

TEST(ShardedCompare, OnlyShardsAndReplicasCanBeReached) {
  using lockstep::Placements;
  EXPECT_EQ(reachable("Shard(1) Replicate()"), (Placements{lockstep::Shard(1), lockstep::Replicate()}));
  for (const char* text :
       {"Partial(sum)", "Shard(0) Partial(max)", "_StridedShard(0,split_factor=2)", "plain"})
    EXPECT_FALSE(reachable(text).has_value()) << text;
}

}  // namespace
}  // namespace parity
