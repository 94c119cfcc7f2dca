// Parameters moved into flat buckets, one per rank that owns some, in the group's shared memory: one
// broadcast per rank then sends all its updates in place, without copies.
// Thread safety: one thread at a time. Ownership: a parameter keeps its bucket's memory alive.
#pragma once

#include <ATen/core/Tensor.h>

#include <source_location>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep::internal {

class ParameterBuckets {
 public:
  // owned[r] are the parameters of rank r, of one type. Those that require a gradient become views of bucket
  // r, with their values and strides; a frozen one gets its own memory when it was a view of `before` (may be
  // null). Raises kResource when the memory cannot be allocated, before any parameter is moved.
  ParameterBuckets(const std::vector<std::vector<at::Tensor>>& owned, const Group& group,
                   const ParameterBuckets* before, std::source_location where);

  // False when a parameter was frozen, unfrozen or given other memory since.
  bool hold() const;
  // By rank; undefined for ranks without parameters.
  const std::vector<at::Tensor>& flat() const { return flat_; }

 private:
  struct BucketEntry {
    at::Tensor parameter;
    const void* data;  // null: not in a bucket
  };
  bool contains(const at::Tensor& parameter) const;
  void move_in(const std::vector<at::Tensor>& parameters, const at::Tensor& bucket);

  std::vector<at::Tensor> flat_;
  std::vector<BucketEntry> entries_;
};

}  // namespace lockstep::internal
