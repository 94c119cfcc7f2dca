#include "lockstep/dtensor/internal/result_pool.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"

namespace lockstep::dtensor_internal {
namespace {

// Smaller ones come from malloc's own pool.
constexpr std::int64_t kSharedFrom = 256 * 1024;
// Kept at most, of all sizes together.
constexpr std::int64_t kKeep = 512 * 1024 * 1024;

}  // namespace

at::Tensor ResultPool::empty(at::IntArrayRef sizes, at::ScalarType dtype, const Group& group) const {
  const auto bytes = c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype));
  if (bytes < kSharedFrom || !state_->here) return at::empty(sizes, dtype);
  const Key key{group.get(), bytes};
  {
    const std::lock_guard lock(state_->mutex);
    if (const auto found = state_->idle.find(key); found != state_->idle.end() && !found->second.empty()) {
      auto memory = std::move(found->second.back());
      found->second.pop_back();
      state_->idle_bytes -= bytes;
      return lend(state_, key, std::move(memory), sizes, dtype);
    }
  }
  try {
    return lend(state_, key, empty_shared({bytes}, at::kByte, {.group = group}), sizes, dtype);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kResource && error.kind() != ErrorKind::kUnsupported) throw;
  }
  return at::empty(sizes, dtype);
}

at::Tensor ResultPool::lend(const std::shared_ptr<State>& state, const Key& key, at::Tensor memory,
                            at::IntArrayRef sizes, at::ScalarType dtype) {
  auto* const data = memory.data_ptr();
  // Runs on whatever thread frees the tensor's storage. Without a pool, or with a full one, the memory goes
  // back to the group when this function object is destroyed.
  const auto back = [weak = std::weak_ptr(state), key, memory = std::move(memory)](void*) mutable {
    const auto pool = weak.lock();
    if (!pool || !pool->here) return;
    const std::lock_guard lock(pool->mutex);
    if (pool->idle_bytes + key.second > kKeep) return;
    pool->idle_bytes += key.second;
    pool->idle[key].push_back(std::move(memory));
  };
  return at::from_blob(data, sizes, back, at::TensorOptions().dtype(dtype));
}

}  // namespace lockstep::dtensor_internal
