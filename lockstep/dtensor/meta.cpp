#include "lockstep/dtensor/internal/meta.h"

#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace lockstep::dtensor_internal {
namespace {

c10::Storage no_bytes(const c10::Device& device) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                            c10::DataPtr(nullptr, device), nullptr, false));
}

// No bytes, on the tensor's device: the autograd engine asks tensors for their storage's device when streams
// differ. One for all tensors of a device: where a storage has one user, the engine adds gradients in place, and
// it cannot see that local tensors share memory (the gradient of a view is a view of the gradient).
const c10::Storage& no_memory(const c10::Device& device) {
  constexpr std::size_t kDevices = 64;
  static const auto cpu = no_bytes(c10::Device(c10::kCPU));
  if (device.is_cpu()) return cpu;
  static const auto others = [&] {
    std::vector<c10::Storage> all;
    for (std::size_t i = 0; i < kDevices; ++i)
      all.push_back(no_bytes(c10::Device(device.type(), static_cast<c10::DeviceIndex>(i))));
    return all;
  }();
  return others.at(static_cast<std::size_t>(std::max<int>(device.index(), 0)));
}

// At most 15 characters, which need no memory: every sharded tensor has a copy.
constexpr auto kNoMemory = "use to_local()";

// Dense strides for the global sizes, dimensions in the order in which the local tensor has them. A dimension
// of stride 0 (expand) keeps it.
c10::SmallVector<std::int64_t, 6> global_strides(at::IntArrayRef sizes, const at::Tensor& local) {
  const auto n = sizes.size();
  c10::SmallVector<std::int64_t, 6> strides(n);
  const auto local_strides = local.strides();
  bool ordered = local_strides.size() == n;
  for (std::size_t d = 0; ordered && d < n; ++d) {
    ordered = local_strides[d] > 0 && (d == 0 || local_strides[d - 1] >= local_strides[d]);
  }
  std::int64_t next = 1;
  if (ordered || local_strides.size() != n) {
    for (std::size_t d = n; d-- > 0;) {
      strides[d] = next;
      next *= std::max<std::int64_t>(sizes[d], 1);
    }
    return strides;
  }
  c10::SmallVector<std::size_t, 6> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return local_strides[a] > local_strides[b]; });
  for (std::size_t i = n; i-- > 0;) {
    const auto d = order[i];
    strides[d] = local_strides[d] == 0 ? 0 : next;
    if (local_strides[d] != 0) next *= std::max<std::int64_t>(sizes[d], 1);
  }
  return strides;
}

// A tensor's keys are those of the mode it is made in. In inference mode that is wrong for one whose local
// tensor is an ordinary one, the view of a parameter: as libtorch's own views it stays ordinary.
c10::intrusive_ptr<c10::TensorImpl> make_impl(const at::Tensor& local, c10::DispatchKeySet keys) {
  c10::Storage storage(no_memory(local.device()));
  if (!c10::InferenceMode::is_enabled() || local.is_inference())
    return c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, local.dtype());
  const auto backend = keys.highestBackendKey();
  keys = keys | c10::getAutocastRelatedKeySetFromBackend(backend) |
         c10::getAutogradRelatedKeySetFromBackend(backend);
  return c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, local.dtype());
}

}  // namespace

void Meta::set_pending(Work work) {
  work_ = std::move(work);
  // relaxed: the tensor is not shared with another thread yet.
  pending_.store(true, std::memory_order_relaxed);
}

void Meta::wait() const {
  work_.wait();  // any thread may wait, several at a time
  pending_.store(false, std::memory_order_release);
}

at::Tensor wrap(at::Tensor local, at::IntArrayRef sizes, std::shared_ptr<const MeshContext> mesh,
                const Layout* layout, bool lost_base, Work pending,
                std::shared_ptr<const OperandStyle> style) {
  // In-place operators on views replay the views in backward instead of calling as_strided, which a tensor
  // without memory cannot serve. A setting of the thread, and this thread is about to record the tensor.
  // Where nothing is recorded it is off: a view that can be replayed keeps alive what it is a view of, which
  // costs memory and makes gradients seem to have two owners.
  auto& autograd = c10::AutogradState::get_tls_state();
  const bool recorded = c10::GradMode::is_enabled();
  if (autograd.get_view_replay_enabled() != recorded) autograd.set_view_replay_enabled(recorded);

  const auto strides = global_strides(sizes, local);
  const auto dense = local.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto keys = c10::DispatchKeySet({kKey, dense});
  if (style) keys = keys.add(kStyleKey);
  auto impl = make_impl(local, keys);
  // Or torch::save would write a file without the values. On other devices the engine may ask for the storage.
  if (local.is_cpu()) impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  impl->set_sizes_and_strides(sizes, strides);
  auto meta =
      c10::make_intrusive<Meta>(std::move(local), std::move(mesh), layout, lost_base, std::move(style));
  if (!pending.done()) meta->set_pending(std::move(pending));
  impl->set_backend_meta(std::move(meta));
  return at::Tensor(std::move(impl));
}

}  // namespace lockstep::dtensor_internal
