// Runs a plan of redistribute_plan.h on a rank's local tensor. Thread safety: as the mesh's groups: all ranks
// run the same plans in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/dtensor/internal/mesh_context.h"
#include "lockstep/group/work.h"

namespace lockstep::dtensor_internal {

// The local tensor under `to` of what has `local` under `from`. Never changes `local`; returns it when
// nothing needs to move. `last`, when given, receives the last collective, still running: the result must not
// be read before it is over.
at::Tensor redistribute_local(const at::Tensor& local, at::IntArrayRef sizes, const Layout& from,
                              const Layout& to, Work* last = nullptr);

// Uninitialised memory for a rank's piece. Large ones are where the other ranks of the host reach them, when
// a group of the mesh has such memory: redistributions then read them without a copy by the kernel.
at::Tensor empty_piece(at::IntArrayRef sizes, const at::TensorOptions& options, const MeshContext& mesh);
// A contiguous copy of `view` in such memory.
at::Tensor copy_piece(const at::Tensor& view, const MeshContext& mesh);

// This rank's piece of a whole tensor, a view of it.
at::Tensor slice_for(const at::Tensor& whole, const Layout& layout);
// The same along mesh dimension `m` alone, whose shard is `placement`. A copy where the shard is interleaved.
at::Tensor piece_for(const at::Tensor& whole, const MeshContext& mesh, std::size_t m,
                     const Placement& placement);

}  // namespace lockstep::dtensor_internal
