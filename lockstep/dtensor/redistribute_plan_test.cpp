// The planner alone: every pair of layouts on meshes of one and two dimensions, replayed on numbers instead
// of tensors.
#include "lockstep/dtensor/redistribute_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "lockstep/dtensor/internal/shard_math.h"

namespace lockstep {
namespace {

using Kind = RedistributeStep::Kind;
using Steps = std::vector<RedistributeStep>;

const Placements kAll{Replicate(), Shard(0), Shard(1), Partial(), Partial(ReduceOp::kMax)};

std::vector<Placements> layouts(std::size_t ndim) {
  std::vector<Placements> found{{}};
  for (std::size_t m = 0; m < ndim; ++m) {
    std::vector<Placements> longer;
    for (const auto& start : found) {
      for (const auto& placement : kAll) {
        auto layout = start;
        layout.push_back(placement);
        longer.push_back(layout);
      }
    }
    found = longer;
  }
  return found;
}

// A step is valid when it changes what the layout has there, by a collective that does that, and no later
// mesh dimension cuts the tensor dimension whose cut it changes.
void expect_valid(const Steps& plan, Placements layout, const Placements& to) {
  for (const auto& step : plan) {
    const auto m = static_cast<std::size_t>(step.mesh_dim);
    ASSERT_LT(m, layout.size());
    EXPECT_EQ(layout[m], step.from);
    EXPECT_NE(step.from, step.to) << to_string(step);
    for (const auto& changed : {step.from, step.to}) {
      for (std::size_t later = m + 1; changed.is_shard() && later < layout.size(); ++later) {
        EXPECT_FALSE(layout[later].is_shard(changed.dim()))
            << to_string(step) << " under " << to_string(layout);
      }
    }
    switch (step.kind) {
      case Kind::kAllGather:
        EXPECT_TRUE(step.from.is_shard() && step.to.is_replicate());
        break;
      case Kind::kAllToAll:
        EXPECT_TRUE(step.from.is_shard() && step.to.is_shard() && step.from.dim() != step.to.dim());
        break;
      case Kind::kAllReduce:
        EXPECT_TRUE(step.from.is_partial() && step.to.is_replicate());
        break;
      case Kind::kReduceScatter:
        EXPECT_TRUE(step.from.is_partial() && step.to.is_shard());
        break;
      case Kind::kChunk:
        EXPECT_TRUE(step.from.is_replicate() && step.to.is_shard());
        break;
      case Kind::kMask:
        EXPECT_TRUE(step.from.is_replicate() && step.to.is_partial());
        break;
    }
    layout[m] = step.to;
  }
  EXPECT_EQ(layout, to);
}

TEST(RedistributePlan, ReachesEveryLayoutFromEveryOtherOnOneDimension) {
  for (const auto& from : layouts(1)) {
    for (const auto& to : layouts(1)) {
      const auto plan = plan_redistribute({12, 8}, 4, {4}, from, to);
      expect_valid(plan, from, to);
      EXPECT_LE(plan.size(), 2U);
      EXPECT_EQ(plan.empty(), from == to);
    }
  }
}

TEST(RedistributePlan, ReachesEveryLayoutFromEveryOtherOnTwoAndThreeDimensions) {
  int pairs = 0;
  for (const auto& mesh : {std::vector<std::int64_t>{2, 3}, {2, 2, 2}}) {
    for (const auto& from : layouts(mesh.size())) {
      for (const auto& to : layouts(mesh.size())) {
        SCOPED_TRACE(to_string(from) + " -> " + to_string(to));
        const auto plan = plan_redistribute({12, 8}, 4, mesh, from, to);
        expect_valid(plan, from, to);
        ++pairs;
      }
      if (HasFailure()) return;
    }
  }
  EXPECT_EQ(pairs, 25 * 25 + 125 * 125);
}

// What a plan costs, each step 1 more than its bytes.
double cost_of(const Steps& plan, const std::vector<std::int64_t>& sizes,
               const std::vector<std::int64_t>& mesh, Placements layout) {
  double cost = 0;
  for (const auto& step : plan) {
    double bytes = 4;
    const std::vector<std::int64_t> first(mesh.size(), 0);
    for (const auto size : dtensor_internal::local_sizes(sizes, layout, mesh, first))
      bytes *= static_cast<double>(size);
    const auto m = static_cast<std::size_t>(step.mesh_dim);
    cost += 1 + redistribute_cost(step.from, step.to, bytes, mesh[m]);
    layout[m] = step.to;
  }
  return cost;
}

// Whether some collective leads from one to the other, and no later cut forbids it.
bool is_step(const Placements& layout, std::size_t m, const Placement& to) {
  const auto& from = layout[m];
  if (from == to || (from.is_partial() && to.is_partial()) || (from.is_shard() && to.is_partial()))
    return false;
  for (std::size_t later = m + 1; later < layout.size(); ++later) {
    for (const auto& changed : {from, to}) {
      if (changed.is_shard() && layout[later].is_shard(changed.dim())) return false;
    }
  }
  return true;
}

// The least cost of every way, through any layouts at all: by relaxing every step until nothing changes.
double least_cost(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& mesh,
                  const Placements& from, const Placements& to) {
  const auto all = layouts(mesh.size());
  std::vector<double> least(all.size(), std::numeric_limits<double>::infinity());
  const auto index = [&](const Placements& layout) {
    return static_cast<std::size_t>(std::ranges::find(all, layout) - all.begin());
  };
  least[index(from)] = 0;
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t i = 0; i < all.size(); ++i) {
      for (std::size_t m = 0; m < mesh.size(); ++m) {
        for (const auto& option : kAll) {
          if (!is_step(all[i], m, option)) continue;
          auto next = all[i];
          next[m] = option;
          const RedistributeStep step{{}, static_cast<int>(m), all[i][m], option};
          const auto cost = least[i] + cost_of({step}, sizes, mesh, all[i]);
          if (cost >= least[index(next)]) continue;
          least[index(next)] = cost;
          changed = true;
        }
      }
    }
  }
  return least[index(to)];
}

TEST(RedistributePlan, IsTheCheapestOfAllWays) {
  for (const auto& sizes : {std::vector<std::int64_t>{12, 8}, {4096, 3000}}) {
    for (const auto& mesh : {std::vector<std::int64_t>{4}, {2, 3}}) {
      for (const auto& from : layouts(mesh.size())) {
        for (const auto& to : layouts(mesh.size())) {
          const auto plan = plan_redistribute(sizes, 4, mesh, from, to);
          EXPECT_DOUBLE_EQ(cost_of(plan, sizes, mesh, from), least_cost(sizes, mesh, from, to))
              << to_string(from) << " -> " << to_string(to) << " of " << sizes[0] << " rows";
        }
      }
    }
  }
}

TEST(RedistributePlan, EachPairOfKindsIsItsCollective) {
  const auto only = [](const Placement& from, const Placement& to) {
    const auto plan = plan_redistribute({64, 64}, 4, {4}, {from}, {to});
    EXPECT_EQ(plan.size(), 1U);
    return plan.at(0).kind;
  };
  EXPECT_EQ(only(Shard(0), Replicate()), Kind::kAllGather);
  EXPECT_EQ(only(Shard(0), Shard(1)), Kind::kAllToAll);
  EXPECT_EQ(only(Partial(), Replicate()), Kind::kAllReduce);
  EXPECT_EQ(only(Partial(), Shard(1)), Kind::kReduceScatter);
  EXPECT_EQ(only(Replicate(), Shard(1)), Kind::kChunk);
  EXPECT_EQ(only(Replicate(), Partial()), Kind::kMask);
}

TEST(RedistributePlan, CutsBeforeItReduces) {
  const Steps expected{{Kind::kChunk, 1, Replicate(), Shard(0)},
                       {Kind::kAllReduce, 0, Partial(), Replicate()}};
  EXPECT_EQ(plan_redistribute({1024, 1024}, 4, {2, 4}, {Partial(), Replicate()}, {Replicate(), Shard(0)}),
            expected);
}

TEST(RedistributePlan, ReducesBeforeItGathers) {
  const Steps expected{{Kind::kAllReduce, 0, Partial(), Replicate()},
                       {Kind::kAllGather, 1, Shard(0), Replicate()}};
  EXPECT_EQ(plan_redistribute({1024, 1024}, 4, {2, 4}, {Partial(), Shard(0)}, {Replicate(), Replicate()}),
            expected);
}

TEST(RedistributePlan, AnInnerCutIsUndoneBeforeTheOuterOneChanges) {
  const auto plan = plan_redistribute({16, 16}, 4, {2, 2}, {Shard(0), Shard(0)}, {Shard(1), Shard(0)});
  ASSERT_GE(plan.size(), 2U);
  EXPECT_EQ(plan.front().mesh_dim, 1);
}

TEST(ShardMath, FollowsTorchsChunkRule) {
  using dtensor_internal::chunk;
  // 5 over 4: 2, 2, 1, 0.
  const std::int64_t lengths[] = {2, 2, 1, 0};
  for (int r = 0; r < 4; ++r) EXPECT_EQ(chunk(5, 4, r).length, lengths[r]);
  EXPECT_EQ(chunk(5, 4, 3).offset, 5);
  EXPECT_EQ(chunk(0, 3, 1).length, 0);
  EXPECT_EQ(dtensor_internal::local_sizes({10, 7}, {Shard(0), Shard(0)}, {2, 2}, {1, 0}),
            (std::vector<std::int64_t>{3, 7}));
  EXPECT_EQ(dtensor_internal::local_sizes({12}, {Shard(0, 3)}, {2}, {0}), (std::vector<std::int64_t>{6}));
}

TEST(Placement, SaysWhatItIs) {
  EXPECT_EQ(to_string(Placements{Shard(-1), Replicate(), Partial(ReduceOp::kAvg), Shard(0, 4)}),
            "[Shard(-1), Replicate(), Partial(avg), Shard(0, interleave 4)]");
}

}  // namespace
}  // namespace lockstep
