#include "lockstep/optim/internal/parameter_buckets.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "lockstep/collective/collectives.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep::internal {
namespace {

// Parameters begin on cache lines.
std::int64_t room_of(const at::Tensor& parameter) {
  const auto line = std::max<std::int64_t>(1, 64 / static_cast<std::int64_t>(parameter.element_size()));
  return (parameter.numel() + line - 1) / line * line;
}

at::Tensor make_bucket(const std::vector<at::Tensor>& parameters, const Group& group,
                       std::source_location where) {
  std::int64_t n = 0;
  for (const auto& parameter : parameters) {
    if (parameter.requires_grad()) n += room_of(local_shard(parameter));
  }
  if (n == 0) return {};
  // The gaps, too, are sent.
  return empty_shared({n}, parameters.front().scalar_type(),
                      {.group = group, .device = parameters.front().device(), .where = where})
      .zero_();
}

}  // namespace

// One flat tensor per owning rank; the parameters become views of it, so that one broadcast per rank sends
// all of its share. Frozen parameters are left out: they do not change. One that was in the buckets before
// gets memory of its own.
ParameterBuckets::ParameterBuckets(const std::vector<std::vector<at::Tensor>>& owned, const Group& group,
                                   const ParameterBuckets* before, std::source_location where) {
  // Views made here are plain tensors to autograd.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& parameters : owned) flat_.push_back(make_bucket(parameters, group, where));
  for (std::size_t r = 0; r < owned.size(); ++r) {
    move_in(owned[r], flat_[r]);
    for (const auto& parameter : owned[r]) {
      if (parameter.requires_grad()) continue;
      const at::Tensor local = local_shard(parameter);
      if (before != nullptr && before->contains(local))
        parameter.set_data(with_local_shard(parameter, local.clone()));
      entries_.push_back({parameter, nullptr});
    }
  }
}

void ParameterBuckets::move_in(const std::vector<at::Tensor>& parameters, const at::Tensor& bucket) {
  std::int64_t at = 0;
  for (const auto& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    const at::Tensor local = local_shard(parameter);
    const auto view = local.is_non_overlapping_and_dense()
                          ? bucket.as_strided(local.sizes(), local.strides(), at)
                          : bucket.narrow(0, at, local.numel()).view(local.sizes());
    view.copy_(local);
    parameter.set_data(with_local_shard(parameter, view));
    entries_.push_back({parameter, view.const_data_ptr()});
    at += room_of(local);
  }
}

// False when a parameter was frozen or thawed, or given other memory (set_data, to()): then the broadcast
// would send stale memory.
bool ParameterBuckets::hold() const {
  return std::all_of(entries_.begin(), entries_.end(), [](const BucketEntry& entry) {
    return entry.parameter.requires_grad() ? local_shard(entry.parameter).const_data_ptr() == entry.data
                                           : entry.data == nullptr;
  });
}

bool ParameterBuckets::contains(const at::Tensor& parameter) const {
  return std::any_of(flat_.begin(), flat_.end(), [&](const at::Tensor& bucket) {
    return bucket.defined() && parameter.has_storage() && parameter.storage().is_alias_of(bucket.storage());
  });
}

}  // namespace lockstep::internal
