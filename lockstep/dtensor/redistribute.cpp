#include "lockstep/dtensor/internal/redistribute.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>

#include "lockstep/collective/collectives.h"
#include "lockstep/collective/detail/all_reduce_into.h"
#include "lockstep/dtensor/redistribute_plan.h"

namespace lockstep::dtensor_internal {
namespace {

using Kind = RedistributeStep::Kind;

// One step of a plan: where it runs, on what.
struct Stage {
  const RedistributeStep& step;
  const MeshContext& mesh;
  const Group& group;
  std::int64_t n;      // ranks along the mesh dimension
  std::int64_t index;  // this rank's place among them
  Sizes before;        // the sizes that this mesh dimension's placement cuts
  bool async;          // leave the collective running

  // The sizes of piece `rank` under `placement`.
  Sizes piece(const Placement& placement, std::int64_t rank) const {
    auto sizes = before;
    if (placement.is_shard()) {
      auto& size = sizes[static_cast<std::size_t>(placement.dim())];
      const auto k = placement.interleave();
      size = k * chunk(size / k, n, rank).length;
    }
    return sizes;
  }
};

// Piece `rank` of `whole` when `placement` cuts it: a view. An interleaved cut has one dimension more, the
// block first, which is why pieces are compared with `as_piece` of a local tensor.
at::Tensor piece_view(const Stage& stage, const at::Tensor& whole, const Placement& placement,
                      std::int64_t rank) {
  const auto dim = placement.dim();
  const auto k = placement.interleave();
  if (k == 1) {
    const auto range = chunk(whole.size(dim), stage.n, rank);
    return whole.narrow(dim, range.offset, range.length);
  }
  const auto range = chunk(whole.size(dim) / k, stage.n, rank);
  return whole.unflatten(dim, {k, whole.size(dim) / k}).narrow(dim + 1, range.offset, range.length);
}
at::Tensor as_piece(const at::Tensor& local, const Placement& placement) {
  const auto k = placement.interleave();
  if (k == 1) return local;
  return local.unflatten(placement.dim(), {k, local.size(placement.dim()) / k});
}

// Views in the order of ranks; the collectives accept tensors that are not dense.
std::vector<at::Tensor> pieces(const Stage& stage, const at::Tensor& whole, const Placement& placement) {
  std::vector<at::Tensor> all;
  for (std::int64_t r = 0; r < stage.n; ++r) all.push_back(piece_view(stage, whole, placement, r));
  return all;
}

// On the CPU from the mesh's pool, in memory that the other ranks of the host reach. A mesh dimension of one
// rank shares with nobody.
at::Tensor result_of(const Stage& stage, const Sizes& sizes, const at::Tensor& like) {
  if (!like.is_cpu() || stage.n == 1) return at::empty(sizes, like.options());
  return stage.mesh.results().empty(sizes, like.scalar_type(), stage.group);
}

at::Tensor all_gather_step(const Stage& stage, const at::Tensor& local, Work* work) {
  auto whole = result_of(stage, stage.before, local);
  // Equal pieces of the first dimension are one after the other: one buffer instead of a list.
  if (stage.step.from == Shard(0) && divides_evenly(stage.before[0], stage.n)) {
    *work = all_gather_single(whole, local, {.group = stage.group, .async_op = stage.async});
    return whole;
  }
  auto outputs = pieces(stage, whole, stage.step.from);
  *work = all_gather(std::move(outputs), as_piece(local, stage.step.from),
                     {.group = stage.group, .async_op = stage.async});
  return whole;
}

// From pieces of dimension d, the rows below, to pieces of dimension e, the columns. The number is the rank
// that a part goes to:
//
//             e
//          r0   r1   r2
//        +--------------
//     r0 |  0    1    2      A rank has one row and sends each part of it to the owner of the column;
//   d r1 |  0    1    2      it receives its column, one part from the owner of each row.
//     r2 |  0    1    2
at::Tensor all_to_all_step(const Stage& stage, const at::Tensor& local, Work* work) {
  auto result = result_of(stage, stage.piece(stage.step.to, stage.index), local);
  // What goes to rank r is the part of my piece that the new cut gives it; what comes from r is the part of
  // r's piece.
  auto inputs = pieces(stage, local, stage.step.to);
  auto outputs = pieces(stage, result, stage.step.from);
  *work = all_to_all(std::move(outputs), std::move(inputs), {.group = stage.group, .async_op = stage.async});
  return result;
}

// Never in place: `local` may be the piece of a tensor that lives on.
at::Tensor all_reduce_step(const Stage& stage, const at::Tensor& local, Work* work) {
  auto result = result_of(stage, stage.before, local);
  *work = internal::all_reduce_into(
      result, local, {.op = stage.step.from.op(), .group = stage.group, .async_op = stage.async});
  return result;
}

at::Tensor reduce_scatter_step(const Stage& stage, const at::Tensor& local, Work* work) {
  auto result = result_of(stage, stage.piece(stage.step.to, stage.index), local);
  if (stage.step.to == Shard(0) && divides_evenly(stage.before[0], stage.n)) {
    *work = reduce_scatter_single(
        result, local, {.op = stage.step.from.op(), .group = stage.group, .async_op = stage.async});
    return result;
  }
  *work = reduce_scatter(as_piece(result, stage.step.to), pieces(stage, local, stage.step.to),
                         {.op = stage.step.from.op(), .group = stage.group, .async_op = stage.async});
  return result;
}

// Copied, not a view: a view would keep the whole replica alive.
at::Tensor chunk_step(const Stage& stage, const at::Tensor& local) {
  const auto view = piece_view(stage, local, stage.step.to, stage.index);
  auto result = result_of(stage, stage.piece(stage.step.to, stage.index), local);
  as_piece(result, stage.step.to).copy_(view);
  return result;
}

// From a replica to a partial without communication. The first rank of the dimension keeps the value where
// the operation would otherwise count it n times.
at::Tensor mask_step(const Stage& stage, const at::Tensor& local) {
  switch (stage.step.to.op()) {
    case ReduceOp::kSum:
    case ReduceOp::kBxor:
      return stage.index == 0 ? local : at::zeros_like(local);
    case ReduceOp::kProduct:
      return stage.index == 0 ? local : at::full_like(local, 1);
    default:
      return local;  // avg, min, max, band, bor of equal values are that value
  }
}

at::Tensor run_step(const Stage& stage, const at::Tensor& local, Work* work) {
  switch (stage.step.kind) {
    case Kind::kAllGather:
      return all_gather_step(stage, local, work);
    case Kind::kAllToAll:
      return all_to_all_step(stage, local, work);
    case Kind::kAllReduce:
      return all_reduce_step(stage, local, work);
    case Kind::kReduceScatter:
      return reduce_scatter_step(stage, local, work);
    case Kind::kChunk:
      return chunk_step(stage, local);
    case Kind::kMask:
      return mask_step(stage, local);
  }
  return local;
}

}  // namespace

at::Tensor redistribute_local(const at::Tensor& local, at::IntArrayRef sizes, const Layout& from,
                              const Layout& to, Work* last) {
  if (&from == &to) return local;
  const auto& mesh = *from.mesh;
  const auto& plan = mesh.plan(from, to, sizes, local.element_size());
  auto placements = from.placements;
  auto current = local;
  // Only the last step may be left running: each earlier one is waited for inside its collective, since the
  // next reads its result.
  Work work;
  for (const auto& step : plan) {
    const auto m = static_cast<std::size_t>(step.mesh_dim);
    // What later mesh dimensions cut is cut before and after the step alike.
    auto others = placements;
    others[m] = Replicate();
    const Stage stage{step,
                      mesh,
                      mesh.group(m),
                      mesh.shape()[m],
                      mesh.coordinate()[m],
                      local_sizes(sizes.vec(), others, mesh.shape(), mesh.coordinate()),
                      last && &step == &plan.back()};
    current = run_step(stage, current, &work);
    placements[m] = step.to;
  }
  if (last) *last = std::move(work);
  return current;
}

at::Tensor empty_piece(at::IntArrayRef sizes, const at::TensorOptions& options, const MeshContext& mesh) {
  const bool ordinary = !options.device().is_cpu() || options.pinned_memory();
  for (std::size_t m = mesh.ndim(); !ordinary && m-- > 0;) {
    if (mesh.shape()[m] > 1)
      return mesh.results().empty(sizes, c10::typeMetaToScalarType(options.dtype()), mesh.group(m));
  }
  return at::empty(sizes, options);
}

at::Tensor copy_piece(const at::Tensor& view, const MeshContext& mesh) {
  return empty_piece(view.sizes(), view.options(), mesh).copy_(view);
}

at::Tensor slice_for(const at::Tensor& whole, const Layout& layout) {
  const auto& mesh = *layout.mesh;
  auto part = whole;
  for (std::size_t m = 0; m < mesh.ndim(); ++m) {
    const auto& placement = layout.placements[m];
    if (placement.is_shard()) part = piece_for(part, mesh, m, placement);
  }
  return part;
}

at::Tensor piece_for(const at::Tensor& whole, const MeshContext& mesh, std::size_t m,
                     const Placement& placement) {
  // piece_view() needs neither a step nor `before`: it reads the sizes of the part that it is given.
  const RedistributeStep none{};
  const Stage stage{none, mesh, mesh.group(m), mesh.shape()[m], mesh.coordinate()[m], {}, false};
  auto view = piece_view(stage, whole, placement, stage.index);
  return placement.interleave() == 1 ? view : view.flatten(placement.dim(), placement.dim() + 1);
}

}  // namespace lockstep::dtensor_internal
