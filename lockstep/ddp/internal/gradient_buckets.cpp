#include "lockstep/ddp/internal/gradient_buckets.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/ddp/internal/flat_broadcast.h"
#include "lockstep/ddp/internal/flat_views.h"

namespace lockstep::internal {

GradientBuckets::GradientBuckets(std::vector<at::Tensor> parameters, Options options)
    : parameters_(std::move(parameters)), options_(std::move(options)) {
  for (const at::Tensor& parameter : local_shards(parameters_)) {
    // Sizes are those of the reduction, which mixed precision may make in another type than the parameter's.
    const bool sparse = !options_.sparse.empty() && options_.sparse[items_.size()];
    const at::ScalarType own = parameter.scalar_type();
    const at::ScalarType dtype =
        options_.reduce_dtype && at::isFloatingType(own) ? *options_.reduce_dtype : own;
    const auto n_elements = static_cast<std::size_t>(parameter.numel());
    items_.push_back({dtype, parameter.device(), n_elements * c10::elementSize(dtype), sparse});
    own_types_.push_back(own);
  }
  rebuilt_limits(options_.caps);  // a cap that cannot be is an error now, not in the second iteration
  agree_on_in_place();
  choose_in_place();
}

// Ranks that differ would reduce in different operations. Rank 0's value. 128 KiB unless set otherwise:
// below it one flat reduction costs less than an operation per gradient. On a GPU, where a copy of a megabyte
// takes less than a microsecond and an operation some twenty, 8 MiB.
void GradientBuckets::agree_on_in_place() {
  const std::int64_t fallback = device().is_cpu() ? 128 * 1024 : 8 * 1024 * 1024;
  const auto from_environment =
      static_cast<std::size_t>(base::environment_int(base::EnvVar::kLockstepInPlaceBytes).value_or(fallback));
  in_place_from_ = options_.in_place_bytes.value_or(from_environment);
  if (options_.group->size() == 1) return;
  static_assert(sizeof(std::size_t) == sizeof(std::int64_t));
  const at::Tensor value = at::empty({1}, at::kLong);
  std::memcpy(value.mutable_data_ptr(), &in_place_from_, value.nbytes());
  broadcast_from(0, value, options_.group, options_.where);
  std::memcpy(&in_place_from_, value.const_data_ptr(), value.nbytes());
}

// Large gradients are allocated in the pool by autograd itself and reduced where they are; they have no view
// in the flat part of their bucket. Sparse, complex and overlapping ones cannot be.
void GradientBuckets::choose_in_place() {
  in_place_.assign(parameters_.size(), 0);
  pool_ = nullptr;
  if (!options_.pooled || options_.group->size() == 1) return;
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool plain =
        !items_[i].sparse && !at::isComplexType(items_[i].dtype) && like(i).is_non_overlapping_and_dense();
    if (!plain || items_[i].n_bytes < in_place_from_ || items_[i].n_bytes == 0) continue;
    in_place_[i] = 1;
    sizes.push_back(items_[i].n_bytes);
  }
  if (!sizes.empty()) pool_ = GradientPool::create(options_.group, sizes, device());
}

void GradientBuckets::build_first(bool for_good) {
  BucketIndices plan = initial_buckets(items_, options_.caps, for_good);
  if (plan != plan_) build(std::move(plan));
}

// Rank 0's order of arrival becomes everybody's: ranks with different buckets would reduce different bytes. A
// collective.
void GradientBuckets::agree_on_order(std::vector<std::size_t>& order) const {
  static_assert(sizeof(std::size_t) == sizeof(std::int64_t));
  at::Tensor sent = at::empty({static_cast<std::int64_t>(order.size())}, at::kLong);
  std::memcpy(sent.mutable_data_ptr(), order.data(), sent.nbytes());
  broadcast_from(0, sent, options_.group, options_.where);
  std::memcpy(order.data(), sent.const_data_ptr(), sent.nbytes());
}

void GradientBuckets::rebuild_by_arrival(std::span<const std::size_t> order) {
  BucketIndices plan = rebuilt_buckets(items_, options_.caps, order);
  if (plan != plan_) build(std::move(plan));
  rebuilt_ = true;
  if (base::log_enabled(LogLevel::kInfo)) {
    base::log(LogLevel::kInfo, base::cat("DistributedDataParallel: ", parameters_.size(), " parameters in ",
                                         plan_.size(), " buckets by order of arrival"));
  }
}

// A communication hook wants each bucket in one piece: every gradient goes back into the flat part.
void GradientBuckets::give_up_pool() {
  if (pool_ == nullptr) return;
  // Gradients that are still in the pool's memory keep that alive by themselves.
  pool_ = nullptr;
  in_place_.assign(parameters_.size(), 0);
  build(BucketIndices(plan_));
}

// slots_ is the inverse of the plan: parameter -> bucket and slot in it.
void GradientBuckets::build(BucketIndices plan) {
  buckets_.clear();  // first, so that old and new memory are not held at once
  slots_.assign(parameters_.size(), {});
  for (std::size_t b = 0; b < plan.size(); ++b) {
    buckets_.push_back(make_bucket(plan[b]));
    for (std::size_t slot = 0; slot < plan[b].size(); ++slot) slots_[plan[b][slot]] = {b, slot};
  }
  plan_ = std::move(plan);
}

// views[slot] is undefined for a gradient that is reduced in place. A sparse bucket holds one parameter and
// no memory until its gradient has come.
GradientBucket GradientBuckets::make_bucket(const std::vector<std::size_t>& indices) const {
  GradientBucket bucket;
  if (items_[indices.front()].sparse) {
    bucket.is_sparse = true;
    return bucket;
  }
  std::vector<at::Tensor> small;
  for (const std::size_t index : indices) {
    bucket.n_bytes += items_[index].n_bytes;
    if (!in_place(index)) small.push_back(like(index));
  }
  bucket.views.resize(indices.size());
  if (small.empty()) return bucket;
  auto [flat, views] = flat_views(small, options_.group, items_[indices.front()].dtype);
  bucket.flat = std::move(flat);
  for (std::size_t slot = 0, next = 0; slot < indices.size(); ++slot) {
    if (!in_place(indices[slot])) bucket.views[slot] = std::move(views[next++]);
  }
  return bucket;
}

void GradientBuckets::open_pool() const {
  if (pool_) pool_->open();
}

void GradientBuckets::close_pool() const noexcept {
  if (pool_) pool_->close();
}

// Before the flat memory is released: a gradient that is a view of it gets memory of its own.
void GradientBuckets::unalias() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    const at::Tensor& flat = buckets_[slots_[i].bucket].flat;
    if (gradient.defined() && flat.defined() && local_shard(gradient).is_alias_of(flat))
      parameters_[i].mutable_grad() = gradient.clone();
  }
}

std::vector<std::size_t> GradientBuckets::bucket_bytes() const {
  std::vector<std::size_t> n_bytes;
  for (const GradientBucket& bucket : buckets_) n_bytes.push_back(bucket.n_bytes);
  return n_bytes;
}

// Beyond the gradients themselves: flat parts that gradients are views of count as gradients.
std::size_t GradientBuckets::held_bytes(bool views) const {
  std::size_t held = pool_ ? pool_->free_bytes() : 0;
  for (const GradientBucket& bucket : buckets_) {
    if (!views && !bucket.is_sparse && bucket.flat.defined()) held += bucket.flat.nbytes();
  }
  return held;
}

}  // namespace lockstep::internal
