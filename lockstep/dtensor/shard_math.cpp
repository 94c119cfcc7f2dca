#include <algorithm>

#include "lockstep/dtensor/internal/shard_math.h"

namespace lockstep::dtensor_internal {

Sizes sizes_before(Sizes sizes, const Placements& placements, const Sizes& mesh_shape,
                   const Sizes& coordinate, std::size_t mesh_dim) {
  for (std::size_t m = 0; m < mesh_dim; ++m) {
    const auto& placement = placements[m];
    if (!placement.is_shard()) continue;
    auto& size = sizes[static_cast<std::size_t>(placement.dim())];
    const auto k = placement.interleave();
    size = k * chunk(size / k, mesh_shape[m], coordinate[m]).length;
  }
  return sizes;
}

Sizes local_sizes(Sizes sizes, const Placements& placements, const Sizes& mesh_shape,
                  const Sizes& coordinate) {
  return sizes_before(std::move(sizes), placements, mesh_shape, coordinate, placements.size());
}

}  // namespace lockstep::dtensor_internal
