#include "lockstep/tensor/detail/local_shard.h"

#include <atomic>

namespace lockstep::internal {
namespace {

std::atomic<const ShardedTensors*> installed{nullptr};

}  // namespace

// Release and acquire: who finds the implementation finds it constructed.
const ShardedTensors* set_sharded_tensors(const ShardedTensors* implementation) noexcept {
  return installed.exchange(implementation, std::memory_order_acq_rel);
}

const ShardedTensors* sharded_tensors() noexcept {
  return installed.load(std::memory_order_acquire);
}

at::Tensor local_shard(const at::Tensor& tensor) {
  return has_shards(tensor) ? sharded_tensors()->local(tensor) : tensor;
}

std::vector<at::Tensor> local_shards(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> local;
  local.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) local.push_back(local_shard(tensor));
  return local;
}

at::Tensor with_local_shard(const at::Tensor& like, at::Tensor local) {
  return has_shards(like) ? sharded_tensors()->with_local(like, std::move(local)) : local;
}

at::Tensor placed_as(const at::Tensor& gradient, const at::Tensor& parameter) {
  // Undefined: a function that passes no gradient on. It stays that.
  const bool placed = gradient.defined() && has_shards(parameter);
  return placed ? sharded_tensors()->placed_as(gradient, parameter) : gradient;
}

at::Tensor gradient_of_shard(const at::Tensor& parameter, at::Tensor local) {
  if (!local.defined() || !has_shards(parameter)) return local;
  return sharded_tensors()->as_gradient(parameter, std::move(local));
}

at::Tensor ShardGradients::get(const at::Tensor& parameter) const {
  at::Tensor gradient = whole_->get(parameter);
  if (!gradient.defined() || !has_shards(parameter)) return gradient;
  at::Tensor placed = placed_as(gradient, parameter);
  if (!placed.is_same(gradient)) whole_->set(parameter, placed);
  return sharded_tensors()->local(placed);
}

void ShardGradients::set(const at::Tensor& parameter, at::Tensor gradient) {
  whole_->set(parameter, gradient_of_shard(parameter, std::move(gradient)));
}

}  // namespace lockstep::internal
