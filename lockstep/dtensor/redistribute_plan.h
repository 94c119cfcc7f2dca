// How to get from one layout to another: a pure function from placements to a list of collectives. The
// cheapest list is found by a shortest-path search over layouts, so the order of steps is chosen too: a mesh
// dimension is cut before another one is reduced, a partial is reduced while the tensor is still cut, and a
// tensor may be cut for a while as neither layout cuts it.
//
//   plan_redistribute({1024, 1024}, 4, {2, 4}, {Partial(), Replicate()}, {Replicate(), Shard(0)})
//     == { mesh dim 1: Replicate() -> Shard(0), local chunk;  mesh dim 0: Partial(sum) -> Replicate(), all_reduce }
//
// Thread safety: pure functions. Every rank computes the same plan from the same arguments.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/dtensor/placement.h"

namespace lockstep {

struct RedistributeStep {
  enum class Kind : std::uint8_t {
    kAllGather,      // Shard -> Replicate
    kAllToAll,       // Shard(d) -> Shard(e)
    kAllReduce,      // Partial -> Replicate
    kReduceScatter,  // Partial -> Shard
    kChunk,          // Replicate -> Shard, local
    kMask,  // Replicate -> Partial, local: one rank keeps the value, the others hold the neutral element
  };
  Kind kind{};
  int mesh_dim = 0;
  Placement from{};
  Placement to{};

  friend bool operator==(const RedistributeStep&, const RedistributeStep&) = default;
};
const char* name_of(RedistributeStep::Kind kind) noexcept;
// "mesh dim 1: Replicate() -> Shard(0) by chunk"
std::string to_string(const RedistributeStep& step);

// `sizes` of the whole tensor, `item_size` bytes per element. Placements are valid for these sizes
// (dimensions counted from the front, one placement per mesh dimension). Layouts that no sequence of steps
// connects do not exist: everything can be reached through Replicate.
std::vector<RedistributeStep> plan_redistribute(const std::vector<std::int64_t>& sizes,
                                                std::int64_t item_size,
                                                const std::vector<std::int64_t>& mesh_shape,
                                                const Placements& from, const Placements& to);

// What a rank sends in one step, in bytes, plus a constant per collective; local steps cost what they copy
// divided by 16. `local_bytes` is the size of the rank's tensor before the step, n the ranks along the mesh
// dimension.
double redistribute_cost(const Placement& from, const Placement& to, double local_bytes, std::int64_t n);

}  // namespace lockstep
