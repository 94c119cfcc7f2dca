#include "lockstep/dtensor/internal/local_help.h"

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/collective/collectives.h"

namespace lockstep::dtensor_internal {

std::int64_t offset_of(const Layout& layout, const Sizes& sizes, std::int64_t dim) {
  const auto& mesh = *layout.mesh;
  std::int64_t offset = 0;
  auto size = sizes[static_cast<std::size_t>(dim)];
  // Each mesh dimension cuts what the earlier ones left: offsets add up.
  for (std::size_t m = 0; m < mesh.ndim(); ++m) {
    const auto& placement = layout.placements[m];
    if (!placement.is_shard(dim)) continue;
    if (placement.interleave() != 1)
      base::raise(ErrorKind::kInternal, "an interleaved piece has no one beginning");
    const auto range = chunk(size, mesh.shape()[m], mesh.coordinate()[m]);
    offset += range.offset;
    size = range.length;
  }
  return offset;
}

bool shards(const Layout& layout, std::int64_t dim) {
  return std::ranges::any_of(layout.placements, [&](const Placement& p) { return p.is_shard(dim); });
}

void reduce_over(const Layout& layout, std::int64_t dim, at::Tensor& value, ReduceOp::Kind op) {
  const auto& mesh = *layout.mesh;
  value = value.contiguous();
  for (std::size_t m = 0; m < mesh.ndim(); ++m) {
    if (layout.placements[m].is_shard(dim)) all_reduce(value, {.op = op, .group = mesh.group(m)});
  }
}

void give(LocalCall& local, at::Tensor result) {
  torch::jit::drop(local.stack, local.call.op().arguments.size());
  local.stack.emplace_back(std::move(result));
}

}  // namespace lockstep::dtensor_internal
