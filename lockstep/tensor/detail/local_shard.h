// Sharded tensors as the layers below lockstep/dtensor see them. A sharded tensor has no memory of its own;
// each rank holds a piece, an ordinary tensor. Layers that send or average memory (DistributedDataParallel,
// ZeRO, model averaging) work on that piece and need to know nothing of meshes and placements. lockstep/dtensor
// installs the one implementation of the process when it makes its first sharded tensor; until then every
// tensor is plain.
//
// Thread safety: any thread, all of it. Nothing here communicates but placed_as.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "lockstep/tensor/gradient_access.h"

namespace lockstep::internal {

class ShardedTensors {
 public:
  virtual ~ShardedTensors() = default;
  virtual bool is_sharded(const at::Tensor& tensor) const noexcept = 0;
  // This rank's piece, shared with the tensor. Blocks while a collective still writes it.
  virtual at::Tensor local(const at::Tensor& sharded) const = 0;
  // A tensor that is sharded as `sharded` is, with `local` as this rank's piece: for set_data, so what is bound
  // to the tensor (a parallel style) stays bound.
  virtual at::Tensor with_local(const at::Tensor& sharded, at::Tensor local) const = 0;
  // The same for a gradient, which has no style.
  virtual at::Tensor as_gradient(const at::Tensor& parameter, at::Tensor local) const = 0;
  // `gradient` placed as `parameter` is; `gradient` itself where it is so already, otherwise collective over
  // the parameter's mesh. A plain gradient counts as a replica. Differentiable.
  virtual at::Tensor placed_as(const at::Tensor& gradient, const at::Tensor& parameter) const = 0;
  // `local` is the piece of `sharded`, and nothing but that handle, `sharded` and `other`, which may be
  // undefined, refers to it.
  virtual bool owned_by(const at::Tensor& local, const at::Tensor& sharded,
                        const at::Tensor& other) const = 0;
  // World ranks of the mesh, this one included.
  virtual std::vector<int> ranks(const at::Tensor& sharded) const = 0;
};

// It must outlive its use: a static object. Returns the previous one.
const ShardedTensors* set_sharded_tensors(const ShardedTensors* implementation) noexcept;
// Null before the first sharded tensor.
const ShardedTensors* sharded_tensors() noexcept;

inline bool has_shards(const at::Tensor& tensor) {
  const auto* const sharded = sharded_tensors();
  return sharded != nullptr && sharded->is_sharded(tensor);
}
// The piece of a sharded tensor, a plain tensor itself.
at::Tensor local_shard(const at::Tensor& tensor);
std::vector<at::Tensor> local_shards(const std::vector<at::Tensor>& tensors);
// As ShardedTensors::with_local; `local` itself where `like` is plain.
at::Tensor with_local_shard(const at::Tensor& like, at::Tensor local);
// As ShardedTensors::placed_as; `gradient` itself where the parameter is plain.
at::Tensor placed_as(const at::Tensor& gradient, const at::Tensor& parameter);
// As ShardedTensors::as_gradient; `local` itself where the parameter is plain or `local` undefined.
at::Tensor gradient_of_shard(const at::Tensor& parameter, at::Tensor local);

// The gradients of sharded parameters as their local pieces. A gradient that autograd placed otherwise (the
// partial sums of a replicated weight, say) is first placed as its parameter and stored so: collective over
// the parameter's mesh, whose ranks run the same backward pass. Plain parameters pass through.
class ShardGradients final : public GradientAccess {
 public:
  explicit ShardGradients(std::shared_ptr<GradientAccess> whole) : whole_(std::move(whole)) {}

  at::Tensor get(const at::Tensor& parameter) const override;
  void set(const at::Tensor& parameter, at::Tensor gradient) override;
  std::vector<compat::NodePtr> entry_nodes() const override { return whole_->entry_nodes(); }

 private:
  const std::shared_ptr<GradientAccess> whole_;
};

}  // namespace lockstep::internal
