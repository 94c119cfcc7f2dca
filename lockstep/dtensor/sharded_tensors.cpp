// Sharded tensors for the layers that know of no mesh (lockstep/tensor/detail/local_shard.h).
#include "lockstep/dtensor/internal/meta.h"
#include "lockstep/dtensor/internal/redistribute.h"
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
    const Layout* const wanted = meta_of(parameter).layout();
    if (!dtensor_internal::is_sharded(gradient)) return as_gradient(parameter, slice_for(gradient, *wanted));
    const Meta& meta = meta_of(gradient);
    if (meta.layout() == wanted) return gradient;
    return as_gradient(parameter, redistribute_local(meta.local(), gradient.sizes(), *meta.layout(), *wanted));
  }

  // Two counts, since two kinds of owner exist: tensors that share the Meta, and handles of the local tensor
  // outside of it. get_backend_meta_intrusive_ptr() returns one more owner of the Meta.
  bool owned_by(const at::Tensor& local, const at::Tensor& sharded,
                const at::Tensor& other) const noexcept override {
    if (!dtensor_internal::is_sharded(sharded)) return false;
    const auto meta = sharded.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
    const Meta& held = meta_of(sharded);
    if (!held.local().is_same(local)) return false;
    std::size_t known = 1;
    if (other.defined() && !other.is_same(sharded)) {
      if (!dtensor_internal::is_sharded(other)) return false;
      const Meta& another = meta_of(other);
      if (&another == &held) {
        ++known;
      } else if (another.local().is_alias_of(local)) {
        return false;
      }
    }
    return meta.use_count() - 1 <= known && local.use_count() <= 2;
  }

  std::vector<int> ranks(const at::Tensor& sharded) const override {
    const at::Tensor mesh = meta_of(sharded).mesh()->mesh().mesh().contiguous();
    const auto* const first = mesh.const_data_ptr<std::int64_t>();
    return {first, first + mesh.numel()};
  }
};

}  // namespace

void install_sharded_tensors() {
  static const DTensors dtensors;
  internal::set_sharded_tensors(&dtensors);
}

}  // namespace lockstep::dtensor_internal
