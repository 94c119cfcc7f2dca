#include "lockstep/dtensor/redistribute_plan.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/internal/shard_math.h"

namespace lockstep {
namespace {

using Kind = RedistributeStep::Kind;

// A collective of a few bytes costs about as much as moving this many.
constexpr double kCollectiveBytes = 32.0 * 1024;
// A byte that is copied locally costs this much of one that is sent.
constexpr double kLocalShare = 1.0 / 16;

// The step between two placements of one mesh dimension; none when it takes two.
std::optional<Kind> direct_step(const Placement& from, const Placement& to) {
  if (from.is_replicate()) return to.is_shard() ? Kind::kChunk : Kind::kMask;
  if (from.is_shard()) {
    if (to.is_replicate()) return Kind::kAllGather;
    // Between two cuts of one dimension (they differ in their interleaving) there is no direct exchange.
    if (to.is_shard() && from.dim() != to.dim()) return Kind::kAllToAll;
    return std::nullopt;
  }
  if (to.is_replicate()) return Kind::kAllReduce;
  if (to.is_shard()) return Kind::kReduceScatter;
  return std::nullopt;
}

// The layouts that the search can be in. A state is a number whose m-th digit, in base candidates[m].size(),
// is the index of mesh dimension m's placement.
struct Search {
  const std::vector<std::int64_t>& sizes;
  double item_size;
  const std::vector<std::int64_t>& mesh_shape;
  std::vector<Placements> candidates;  // per mesh dimension
  std::vector<std::size_t> weights;    // of the digits

  std::size_t states() const { return weights.back() * candidates.back().size(); }
  std::size_t digit(std::size_t state, std::size_t m) const {
    return state / weights[m] % candidates[m].size();
  }
  Placements layout(std::size_t state) const {
    Placements layout;
    for (std::size_t m = 0; m < candidates.size(); ++m) layout.push_back(candidates[m][digit(state, m)]);
    return layout;
  }
  std::size_t state_of(const Placements& layout) const {
    std::size_t state = 0;
    for (std::size_t m = 0; m < candidates.size(); ++m) {
      const auto at = std::ranges::find(candidates[m], layout[m]) - candidates[m].begin();
      state += weights[m] * static_cast<std::size_t>(at);
    }
    return state;
  }
  // Bytes of the largest piece. Of coordinate 0, which has the largest piece on every mesh dimension: the
  // same number on every rank.
  double local_bytes(const Placements& layout) const {
    const dtensor_internal::Sizes first(mesh_shape.size(), 0);
    double bytes = item_size;
    for (const auto size : dtensor_internal::local_sizes(sizes, layout, mesh_shape, first)) {
      bytes *= static_cast<double>(size);
    }
    return bytes;
  }
};

// Where a way between the two layouts can lead. Cuts that neither of them has are worth a detour on meshes of
// several dimensions: what is cut meanwhile is smaller for the other mesh dimensions, and a cut that a later one
// protects (cut_by_later) can be exchanged instead of gathered. On one dimension they are not.
void add_candidates(Search& search, const Placements& from, const Placements& to) {
  constexpr std::size_t kMostStates = 4096;
  for (const bool detours : {true, false}) {
    search.candidates.clear();
    search.weights.clear();
    std::size_t weight = 1;
    for (std::size_t m = 0; m < from.size(); ++m) {
      Placements options{from[m]};
      const auto add = [&](const Placement& option) {
        if (std::ranges::find(options, option) == options.end()) options.push_back(option);
      };
      add(to[m]);
      add(Replicate());
      for (std::size_t d = 0; detours && from.size() > 1 && d < search.sizes.size(); ++d) {
        if (search.sizes[d] > 1) add(Shard(static_cast<std::int64_t>(d)));
      }
      search.weights.push_back(weight);
      weight *= options.size();
      search.candidates.push_back(std::move(options));
    }
    if (weight <= kMostStates) return;
  }
}

// A mesh dimension cuts what the earlier ones left. Whoever changes the cut of tensor dimension d on mesh
// dimension m must therefore not have a later mesh dimension that cuts d too: that cut would be of other
// pieces afterwards. (An interleaved cut counts blocks of what the earlier mesh dimensions left, so the same
// test protects it.)
bool cut_by_later(const Placements& layout, std::size_t mesh_dim, const Placement& changed) {
  if (!changed.is_shard()) return false;
  return std::any_of(layout.begin() + static_cast<std::ptrdiff_t>(mesh_dim) + 1, layout.end(),
                     [&](const Placement& later) { return later.is_shard(changed.dim()); });
}

}  // namespace

const char* name_of(Kind kind) noexcept {
  switch (kind) {
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kAllToAll:
      return "all_to_all";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kChunk:
      return "chunk";
    case Kind::kMask:
      return "mask";
  }
  return "unknown";
}

std::string to_string(const RedistributeStep& step) {
  return base::cat("mesh dim ", step.mesh_dim, ": ", to_string(step.from), " -> ", to_string(step.to), " by ",
                   name_of(step.kind));
}

double redistribute_cost(const Placement& from, const Placement& to, double local_bytes, std::int64_t n) {
  if (from == to || n == 1) return 0;
  const auto step = direct_step(from, to);
  // Through Replicate: an all_gather, or an all_reduce, and a local step. An upper bound is enough for
  // decide.cpp.
  if (!step) return 2 * kCollectiveBytes + 3 * local_bytes * static_cast<double>(n);
  const double others = static_cast<double>(n - 1);
  const double share = others / static_cast<double>(n);
  switch (*step) {
    case Kind::kAllGather:
      return kCollectiveBytes + local_bytes * others;
    case Kind::kAllToAll:
      return kCollectiveBytes + local_bytes * share;
    case Kind::kAllReduce:
      return kCollectiveBytes + 2 * local_bytes * share;
    case Kind::kReduceScatter:
      return kCollectiveBytes + local_bytes * share;
    case Kind::kChunk:
      return kLocalShare * local_bytes / static_cast<double>(n);
    case Kind::kMask:
      return kLocalShare * local_bytes;
  }
  return 0;
}

// Dijkstra's algorithm. Five placements per mesh dimension for a matrix: 25 layouts in two dimensions.
std::vector<RedistributeStep> plan_redistribute(const std::vector<std::int64_t>& sizes,
                                                std::int64_t item_size,
                                                const std::vector<std::int64_t>& mesh_shape,
                                                const Placements& from, const Placements& to) {
  if (from == to) return {};
  Search search{sizes, static_cast<double>(item_size), mesh_shape, {}, {}};
  add_candidates(search, from, to);

  struct Node {
    double cost = std::numeric_limits<double>::infinity();
    bool settled = false;
    std::size_t previous = 0;
    RedistributeStep step{};
  };
  std::vector<Node> nodes(search.states());
  const auto start = search.state_of(from);
  const auto goal = search.state_of(to);
  nodes[start].cost = 0;
  // A linear scan for the minimum instead of a heap: there are few nodes. Ties go to the lowest state, so
  // every rank finds the same plan. The goal is always reached: every placement leads to Replicate and back,
  // and the later mesh dimensions can be undone first (cut_by_later).
  while (!nodes[goal].settled) {
    std::size_t best = nodes.size();
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (!nodes[i].settled && (best == nodes.size() || nodes[i].cost < nodes[best].cost)) best = i;
    }
    nodes[best].settled = true;
    const auto layout = search.layout(best);
    const auto bytes = search.local_bytes(layout);
    for (std::size_t m = 0; m < layout.size(); ++m) {
      if (cut_by_later(layout, m, layout[m])) continue;
      const auto rest = best - search.weights[m] * search.digit(best, m);
      for (std::size_t i = 0; i < search.candidates[m].size(); ++i) {
        const auto& option = search.candidates[m][i];
        const auto kind = option == layout[m] ? std::nullopt : direct_step(layout[m], option);
        if (!kind || cut_by_later(layout, m, option)) continue;
        auto& node = nodes[rest + search.weights[m] * i];
        // A step of no cost still counts, so that a plan has no detours.
        const auto cost = nodes[best].cost + 1 + redistribute_cost(layout[m], option, bytes, mesh_shape[m]);
        if (cost < node.cost) {
          node = {cost, false, best, {*kind, static_cast<int>(m), layout[m], option}};
        }
      }
    }
  }
  std::vector<RedistributeStep> plan;
  for (auto at = goal; at != start; at = nodes[at].previous) plan.push_back(nodes[at].step);
  std::ranges::reverse(plan);
  return plan;
}

}  // namespace lockstep
