#include "lockstep/dtensor/internal/checks.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/collective/collectives.h"

namespace lockstep::dtensor_internal {

// From here on every placement counts dimensions from the front: layouts are compared by value.
Placements checked_placements(const char* function, const MeshContext& mesh, std::int64_t ndim,
                              Placements placements) {
  if (placements.empty()) placements.resize(mesh.ndim());
  const auto refuse = [&](const auto&... parts) {
    base::raise(ErrorKind::kUsage,
                base::cat(function, ": placements ", to_string(placements), ": ", parts...));
  };
  if (placements.size() != mesh.ndim()) {
    refuse(placements.size(), " for a mesh of ", mesh.ndim(),
           " dimensions; one per mesh dimension is needed");
  }
  std::optional<ReduceOp::Kind> op;
  for (auto& placement : placements) {
    if (placement.is_shard()) {
      const auto dim = placement.dim() < 0 ? placement.dim() + ndim : placement.dim();
      if (dim < 0 || dim >= ndim) refuse("the tensor has ", ndim, " dimensions");
      placement = Shard(dim, placement.interleave());
    }
    if (!placement.is_partial()) continue;
    if (placement.op() == ReduceOp::kPremulSum) refuse("a partial sum with a factor is not a layout");
    if (op && *op != placement.op()) refuse("partial with two operations");
    op = placement.op();
  }
  return placements;
}

void refuse_partial(const char* function, const Placements& placements) {
  if (std::ranges::any_of(placements, &Placement::is_partial)) {
    base::raise(ErrorKind::kUsage,
                base::cat(function, ": to ", to_string(placements),
                          ": a tensor becomes partial by operators and from_local, not by redistribution"));
  }
}

Sizes global_sizes(const char* function, const MeshContext& mesh, const at::Tensor& local,
                   const Placements& placements, const FromLocalOptions& options) {
  if (options.shape.has_value() != options.stride.has_value()) {
    base::raise(ErrorKind::kUsage, base::cat(function, ": shape and stride must be given together"));
  }
  auto sizes = local.sizes().vec();
  if (options.shape) {
    const auto expected = options.shape->size() == sizes.size()
                              ? local_sizes(*options.shape, placements, mesh.shape(), mesh.coordinate())
                              : Sizes{};
    if (expected != sizes || options.stride->size() != sizes.size()) {
      base::raise(ErrorKind::kUsage,
                  base::cat(function, ": shape ", at::IntArrayRef(*options.shape), " with ",
                            to_string(placements), " gives this rank a piece of ", at::IntArrayRef(expected),
                            ", the local tensor is ", local.sizes()));
    }
    return *options.shape;
  }
  // Only right when all pieces are equal; uneven ones need `shape`.
  for (std::size_t m = mesh.ndim(); m-- > 0;) {
    if (placements[m].is_shard()) sizes[static_cast<std::size_t>(placements[m].dim())] *= mesh.shape()[m];
  }
  return sizes;
}

namespace {

// What check_locals compares: type, number of dimensions and sizes of up to 30 of them.
constexpr std::int64_t kWords = 32;
at::Tensor description(const at::Tensor& local) {
  Sizes words(kWords, 0);
  words[0] = static_cast<std::int64_t>(local.scalar_type());
  words[1] = local.dim();
  std::ranges::copy(local.sizes().slice(0, std::min<std::size_t>(30, local.sizes().size())),
                    words.begin() + 2);
  return at::tensor(words, at::kLong);
}

// One row per rank of the mesh, in the order of their coordinates, the last one counting fastest. Gathered
// along the mesh dimensions from the last to the first: a step joins what the one before has gathered.
at::Tensor gather_over_mesh(const MeshContext& mesh, at::Tensor rows) {
  for (std::size_t m = mesh.ndim(); m-- > 0;) {
    std::vector<at::Tensor> all;
    for (std::int64_t r = 0; r < mesh.shape()[m]; ++r) all.push_back(at::empty_like(rows));
    all_gather(all, rows, {.group = mesh.group(m)});
    rows = at::cat(all);
  }
  return rows.view({-1, kWords});
}

Sizes coordinate_of(const MeshContext& mesh, std::int64_t row) {
  Sizes coordinate(mesh.ndim());
  for (std::size_t m = mesh.ndim(); m-- > 0; row /= mesh.shape()[m]) coordinate[m] = row % mesh.shape()[m];
  return coordinate;
}

}  // namespace

// Every rank sees the locals of all, so that all raise or none does: a rank that found its own mesh
// dimensions in order would go on to a collective that the others do not call.
void check_locals(const char* function, const MeshContext& mesh, const at::Tensor& local,
                  const Placements& placements) {
  const auto own = description(local);
  const auto all = gather_over_mesh(mesh, own);
  for (std::int64_t row = 0; row < all.size(0); ++row) {
    const auto other = all[row];
    if (other.equal(own)) continue;
    // Of the first rank that differs from this one.
    base::raise(ErrorKind::kUsage,
                base::cat(function, ": the local tensors differ in type or sizes: this rank's is ",
                          local.scalar_type(), " ", local.sizes(), ", that of the rank at ",
                          at::IntArrayRef(coordinate_of(mesh, row)),
                          " of the mesh is another; give shape and stride where pieces are of different "
                          "sizes"));
  }
  for (std::size_t m = 0; m < mesh.ndim(); ++m) {
    // In place: the caller's tensor gets the first rank's values.
    if (placements[m].is_replicate()) broadcast(local.detach(), {.group_src = 0, .group = mesh.group(m)});
  }
}

}  // namespace lockstep::dtensor_internal
