// Sharded tensors for the layers that have no mesh (lockstep/tensor/detail/local_shard.h).
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/internal/meta.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep::dtensor_internal {
namespace {

class DTensors final : public internal::ShardedTensors {
 public:
  bool is_sharded(const at::Tensor& tensor) const noexcept override {
    return dtensor_internal::is_sharded(tensor);
  }
  at::Tensor local(const at::Tensor& sharded) const override { return meta_of(sharded).local(); }

  at::Tensor with_local(const at::Tensor& sharded, at::Tensor local) const override {
    const Meta& meta = meta_of(sharded);
    return wrap(std::move(local), sharded.sizes(), meta.mesh(), meta.layout(), false, {}, meta.style());
  }
  at::Tensor as_gradient(const at::Tensor& parameter, at::Tensor local) const override {
    const Meta& meta = meta_of(parameter);
    return wrap(std::move(local), parameter.sizes(), meta.mesh(), meta.layout());
  }

  at::Tensor placed_as(const at::Tensor& gradient, const at::Tensor& parameter) const override {
    const Meta& meta = meta_of(parameter);
    const at::Tensor sharded =
        dtensor_internal::is_sharded(gradient) ? gradient : from_local(gradient, meta.mesh()->mesh());
    if (meta_of(sharded).layout() == meta.layout()) return sharded;
    return redistribute(sharded, meta.layout()->placements);
  }

  // Owners at two levels: tensors that share a Meta, and local tensors on the same memory. Known are the two
  // tensors and what they are views of, which autograd keeps with them: the engine passes on a view where the
  // last step of the backward pass was one (the transpose of a weight's gradient). Every count must be
  // explained by these.
  bool owned_by(const at::Tensor& local, const at::Tensor& sharded, const at::Tensor& other) const override {
    if (!dtensor_internal::is_sharded(sharded) || !meta_of(sharded).local().is_same(local)) return false;
    c10::SmallVector<c10::TensorImpl*, 4> known;
    for (const at::TensorBase* tensor :
         {static_cast<const at::TensorBase*>(&sharded), static_cast<const at::TensorBase*>(&other)}) {
      if (!tensor->defined() || !add(known, *tensor) || !tensor->is_view()) continue;
      const at::TensorBase& base = tensor->_base();
      if (base.use_count() > 1 || !add(known, base)) return false;
    }
    c10::SmallVector<const Meta*, 4> metas;
    for (auto* impl : known) {
      if (!impl->key_set().has(kKey)) return false;
      const auto* meta = static_cast<const Meta*>(impl->get_backend_meta());
      if (std::ranges::find(metas, meta) == metas.end()) metas.push_back(meta);
    }
    std::size_t n_on_memory = 0;
    for (const auto* meta : metas) {
      const auto sharing = std::ranges::count_if(
          known, [&](c10::TensorImpl* impl) { return impl->get_backend_meta() == meta; });
      // One more owner each: the pointer that is asked here, and the caller's handle.
      if (known_owner(known, meta).use_count() - 1 > static_cast<std::size_t>(sharing)) return false;
      if (meta->local().use_count() > (meta->local().is_same(local) ? 2U : 1U)) return false;
      n_on_memory += meta->local().is_alias_of(local) ? 1 : 0;
    }
    return local.storage().use_count() <= n_on_memory;
  }

  std::vector<int> ranks(const at::Tensor& sharded) const override {
    const at::Tensor mesh = meta_of(sharded).mesh()->mesh().mesh().contiguous();
    const auto* const first = mesh.const_data_ptr<std::int64_t>();
    return {first, first + mesh.numel()};
  }

 private:
  // False: it is there already.
  static bool add(c10::SmallVectorImpl<c10::TensorImpl*>& known, const at::TensorBase& tensor) {
    c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    if (std::ranges::find(known, impl) != known.end()) return false;
    known.push_back(impl);
    return true;
  }
  static c10::intrusive_ptr<c10::BackendMeta> known_owner(const c10::SmallVectorImpl<c10::TensorImpl*>& known,
                                                          const Meta* meta) {
    return (*std::ranges::find_if(known, [&](auto* impl) { return impl->get_backend_meta() == meta; }))
        ->get_backend_meta_intrusive_ptr();
  }
};

}  // namespace

void install_sharded_tensors() {
  static const DTensors dtensors;
  internal::set_sharded_tensors(&dtensors);
}

}  // namespace lockstep::dtensor_internal
