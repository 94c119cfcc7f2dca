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

namespace {

void check_whole(const char* function, const FromLocalOptions& options) {
  if (options.shape.has_value() != options.stride.has_value()) {
    base::raise(ErrorKind::kUsage, base::cat(function, ": shape and stride must be given together"));
  }
  if (options.shape && options.shape->size() != options.stride->size()) {
    base::raise(ErrorKind::kUsage,
                base::cat(function, ": shape ", at::IntArrayRef(*options.shape), " and stride ",
                          at::IntArrayRef(*options.stride), " are of different lengths"));
  }
}

// The piece that the rank at `coordinate` has of a tensor of sizes `shape`.
void check_piece(const char* function, const MeshContext& mesh, const Placements& placements,
                 const Sizes& coordinate, const Sizes& shape, const Sizes& piece, const std::string& whose) {
  const auto expected =
      shape.size() == piece.size() ? local_sizes(shape, placements, mesh.shape(), coordinate) : Sizes{};
  if (expected == piece) return;
  base::raise(ErrorKind::kUsage,
              base::cat(function, ": shape ", at::IntArrayRef(shape), " with ", to_string(placements),
                        " gives ", whose, " a piece of ", at::IntArrayRef(expected), ", the local tensor is ",
                        at::IntArrayRef(piece)));
}

// What a rank gives to from_local, as words that every rank can compare. `shape` and `stride` are empty where
// they are not given, which is no difference for a tensor without dimensions.
struct Claim {
  static constexpr std::size_t kDims = 30;  // at most, of each
  static constexpr std::size_t kWords = 1 + 3 * (1 + kDims);

  std::int64_t type;
  Sizes sizes, shape, stride;

  bool operator==(const Claim&) const = default;

  at::Tensor words() const {
    Sizes words{type};
    for (const auto* list : {&sizes, &shape, &stride}) {
      words.push_back(static_cast<std::int64_t>(list->size()));
      words.insert(words.end(), list->begin(), list->begin() + std::min(kDims, list->size()));
      words.resize(words.size() + kDims - std::min(kDims, list->size()), 0);
    }
    return at::tensor(words, at::kLong);
  }
  static Claim from(const std::int64_t* words) {
    Claim claim{*words++, {}, {}, {}};
    for (auto* list : {&claim.sizes, &claim.shape, &claim.stride}) {
      const auto n = std::min(kDims, static_cast<std::size_t>(*words++));
      list->assign(words, words + n);
      words += kDims;
    }
    return claim;
  }
};

std::string describe(const Claim& claim) {
  auto text = base::cat(static_cast<at::ScalarType>(claim.type), " ", at::IntArrayRef(claim.sizes));
  if (claim.shape.empty()) return text;
  return base::cat(text, " of shape ", at::IntArrayRef(claim.shape), " and stride ",
                   at::IntArrayRef(claim.stride));
}

// One per rank of the mesh, in the order of their coordinates, the last one counting fastest. Gathered along
// the mesh dimensions from the last to the first: a step joins what the one before has gathered.
std::vector<Claim> gather_over_mesh(const MeshContext& mesh, const Claim& own) {
  auto rows = own.words();
  for (std::size_t m = mesh.ndim(); m-- > 0;) {
    std::vector<at::Tensor> all;
    for (std::int64_t r = 0; r < mesh.shape()[m]; ++r) all.push_back(at::empty_like(rows));
    all_gather(all, rows, {.group = mesh.group(m)});
    rows = at::cat(all);
  }
  std::vector<Claim> claims;
  const auto* const words = rows.const_data_ptr<std::int64_t>();
  for (std::size_t at = 0; at < static_cast<std::size_t>(rows.numel()); at += Claim::kWords)
    claims.push_back(Claim::from(words + at));
  return claims;
}

Sizes coordinate_of(const MeshContext& mesh, std::size_t row) {
  Sizes coordinate(mesh.ndim());
  auto left = static_cast<std::int64_t>(row);
  for (std::size_t m = mesh.ndim(); m-- > 0; left /= mesh.shape()[m]) coordinate[m] = left % mesh.shape()[m];
  return coordinate;
}

std::string rank_at(const MeshContext& mesh, std::size_t row) {
  const auto rank = mesh.mesh().mesh().flatten()[static_cast<std::int64_t>(row)].item<std::int64_t>();
  return base::cat("rank ", rank, ", at ", at::IntArrayRef(coordinate_of(mesh, row)), " of the mesh,");
}

}  // namespace

Sizes global_sizes(const char* function, const MeshContext& mesh, const at::Tensor& local,
                   const Placements& placements, const FromLocalOptions& options) {
  check_whole(function, options);
  auto sizes = local.sizes().vec();
  if (options.shape) {
    check_piece(function, mesh, placements, mesh.coordinate(), *options.shape, sizes, "this rank");
    return *options.shape;
  }
  // Only right when all pieces are equal; uneven ones need `shape`.
  for (std::size_t m = mesh.ndim(); m-- > 0;) {
    if (placements[m].is_shard()) sizes[static_cast<std::size_t>(placements[m].dim())] *= mesh.shape()[m];
  }
  return sizes;
}

// Every rank judges what all of them gave, so that all raise the same or none does: a rank that found its own
// piece in order would go on to a collective that the others do not call.
void check_locals(const char* function, const MeshContext& mesh, const at::Tensor& local,
                  const Placements& placements, const FromLocalOptions& options) {
  const Claim own{static_cast<std::int64_t>(local.scalar_type()), local.sizes().vec(),
                  options.shape.value_or(Sizes{}), options.stride.value_or(Sizes{})};
  const auto claims = gather_over_mesh(mesh, own);
  const auto& first = claims.front();
  for (std::size_t row = 1; row < claims.size(); ++row) {
    auto claim = claims[row];
    // With a shape pieces may differ in size, not in the number of dimensions.
    if (!first.shape.empty() && claim.sizes.size() == first.sizes.size()) claim.sizes = first.sizes;
    if (claim == first) continue;
    base::raise(ErrorKind::kUsage,
                base::cat(function, ": the local tensors differ in type or sizes: ", rank_at(mesh, row),
                          " has ", describe(claims[row]), ", ", rank_at(mesh, 0), " ", describe(first),
                          "; give shape and stride, on all ranks, where pieces are of different sizes"));
  }
  check_whole(function, options);
  const auto checked =
      checked_placements(function, mesh, static_cast<std::int64_t>(first.sizes.size()), placements);
  for (std::size_t row = 0; !first.shape.empty() && row < claims.size(); ++row) {
    check_piece(function, mesh, checked, coordinate_of(mesh, row), first.shape, claims[row].sizes,
                rank_at(mesh, row));
  }
  for (std::size_t m = 0; m < mesh.ndim(); ++m) {
    // In place: the caller's tensor gets the first rank's values.
    if (checked[m].is_replicate()) broadcast(local.detach(), {.group_src = 0, .group = mesh.group(m)});
  }
}

}  // namespace lockstep::dtensor_internal
