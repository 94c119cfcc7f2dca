#include "lockstep/parallel/input_reshard.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/tensor/detail/saved_tensor_scope.h"

namespace lockstep {
namespace {

// What one saved tensor became. Shared by the nodes that saved the same tensor.
struct Packed {
  at::Tensor kept;  // a DTensor: this rank's piece
  bool plain;       // it was a plain tensor, and becomes one again
};

at::Tensor local_of(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? to_local(tensor) : tensor;
}

// What of the tensors saved in a scope is sharded, and how. Owned by the scope's hooks; used by its thread
// only.
class Resharding {
 public:
  Resharding(const torch::nn::Module& module, DeviceMesh mesh, std::int64_t dim, InputReshardOptions options)
      : mesh_(std::move(mesh)), dim_(dim), options_(options) {
    const at::AutoGradMode no_grad(false);
    for (const auto& parameter : module.parameters()) keep_whole(parameter);
    for (const auto& buffer : module.buffers()) keep_whole(buffer);
  }

  // Null for what is saved as it is.
  std::shared_ptr<const Packed> pack(const at::Tensor& tensor) {
    if (!shards(tensor)) return nullptr;
    const auto local = local_of(tensor);
    auto& known = packed_[local.const_data_ptr()];
    if (auto found = known.packed.lock(); found && known.is(tensor, local)) return found;
    const bool plain = !is_dtensor(tensor);
    const auto whole = plain ? from_local(tensor, mesh_) : tensor;
    auto packed = std::make_shared<const Packed>(Packed{redistribute(whole, {Shard(dim_)}), plain});
    known = Known(tensor, local, packed);
    return packed;
  }

 private:
  // A tensor that was packed before. Its memory may be gone and used for another one by now.
  struct Known {
    Known() = default;
    Known(const at::Tensor& tensor, const at::Tensor& local, const std::shared_ptr<const Packed>& result)
        : storage(local.storage().getWeakStorageImpl()),
          sizes(local.sizes().vec()),
          strides(local.strides().vec()),
          version(tensor._version()),
          packed(result) {}
    bool is(const at::Tensor& tensor, const at::Tensor& local) const {
      return !storage.expired() && local.sizes() == at::IntArrayRef(sizes) &&
             local.strides() == at::IntArrayRef(strides) && tensor._version() == version;
    }
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    std::vector<std::int64_t> sizes, strides;
    std::int64_t version = 0;
    std::weak_ptr<const Packed> packed;
  };

  void keep_whole(const at::Tensor& tensor) {
    if (tensor.defined()) whole_.insert(local_of(tensor).storage().unsafeGetStorageImpl());
  }

  bool shards(const at::Tensor& tensor) const {
    const auto dim = dim_ < 0 ? dim_ + tensor.dim() : dim_;
    if (dim < 0 || dim >= tensor.dim() || tensor.numel() < mesh_.size()) return false;
    if (is_dtensor(tensor)) {
      if (!(device_mesh(tensor) == mesh_) || placements(tensor) != Placements{Replicate()}) return false;
    } else if (!options_.plain_tensors || !tensor.has_storage()) {
      return false;
    }
    // A piece of an expanded tensor would need more memory than the tensor.
    const auto local = local_of(tensor);
    const auto strides = local.strides();
    if (std::ranges::find(strides, 0) != strides.end()) return false;
    return !whole_.contains(local.storage().unsafeGetStorageImpl());
  }

  const DeviceMesh mesh_;
  const std::int64_t dim_;
  const InputReshardOptions options_;
  std::unordered_set<const c10::StorageImpl*>
      whole_;                                      // the memory of parameters and buffers, and their views
  std::unordered_map<const void*, Known> packed_;  // by the address of the elements
};

// Stands in the graph for one saved tensor.
class Saved final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Saved(Resharding& resharding) : resharding_(resharding) {}

  // While the scope lives; libtorch gives a tensor without history.
  void call_pack_hook(const at::Tensor& tensor) override {
    const at::AutoGradMode no_grad(false);
    packed_ = resharding_.pack(tensor);
    if (!packed_) whole_ = tensor;
  }

  at::Tensor call_unpack_hook() override {
    if (!packed_) return whole_;
    const at::AutoGradMode no_grad(false);
    const auto whole = redistribute(packed_->kept, {Replicate()});
    return packed_->plain ? to_local(whole) : whole;
  }

 private:
  Resharding& resharding_;  // not used after the scope
  std::shared_ptr<const Packed> packed_;
  at::Tensor whole_;
};

}  // namespace

InputReshardScope::InputReshardScope(const torch::nn::Module& module, const DeviceMesh& mesh,
                                     std::optional<std::int64_t> dim, InputReshardOptions options) {
  if (mesh.ndim() != 1) {
    base::raise(ErrorKind::kUsage,
                base::cat("InputReshardScope: the mesh has ", mesh.ndim(),
                          " dimensions; give the one for tensor parallelism, mesh[\"tp\"]"));
  }
  if (!dim) return;
  const auto resharding = std::make_shared<Resharding>(module, mesh, *dim, options);
  scope_ = std::make_unique<internal::SavedTensorScope>(
      [resharding] { return std::make_unique<Saved>(*resharding); });
}

InputReshardScope::~InputReshardScope() = default;

}  // namespace lockstep
