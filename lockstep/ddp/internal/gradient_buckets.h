// The memory that gradients are reduced in: which bucket holds which parameter, one flat tensor per bucket in
// the group's shared memory, a view of it per parameter, and the pool that large gradients are allocated in.
//
//   plan      bucket 0: [5, 4]   bucket 1: [3, 2, 1]   bucket 2: [0]      order of reduction; the same on all ranks
//   flat      [ 5 | 4 ]          [ 3 | 1 ]             -                  small gradients, packed
//   in place                     2: block of the pool  0: block           large gradients, each reduced in place
//
// Invariants: every parameter has exactly one slot. The view of a small gradient points into its bucket's
// flat tensor for as long as the plan exists; the view of one reduced in place exists only during a pass. A
// sparse gradient has its own bucket, without views, whose `flat` is the gradient being reduced.
//
// Of a sharded parameter the buckets hold the gradient's local piece, which like() describes.
//
// All parameters are on one device, and so are flats and blocks.
//
// Thread safety: none; between passes, or on the thread that runs backward(). Pool blocks may be freed on any
// thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <vector>

#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/internal/gradient_pool.h"
#include "lockstep/group/process_group.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep::internal {

struct GradientBucket {
  at::Tensor flat;                // as the engine reduces it: 1-D, real; undefined when nothing is copied
  std::vector<at::Tensor> views;  // one per entry of the plan, with the parameter's strides
  bool is_sparse = false;
  std::size_t n_bytes = 0;
};

class GradientBuckets final {
 public:
  struct Options {
    Group group{};
    BucketCaps caps{};
    std::vector<bool> sparse{};                    // by parameter; empty: none
    std::optional<at::ScalarType> reduce_dtype{};  // type of floating-point gradients; unset: their own
    bool pooled = true;                            // large gradients are reduced in place
    std::optional<std::size_t> in_place_bytes{};   // unset: LOCKSTEP_DDP_IN_PLACE_BYTES
    std::source_location where = std::source_location::current();
  };
  struct GradientSlot {
    std::size_t bucket = 0;
    std::size_t index = 0;  // in the bucket
  };

  // Collective: rank 0's in_place_bytes apply to all. Raises kUsage for an invalid cap. There are no buckets
  // before build_first().
  GradientBuckets(std::vector<at::Tensor> parameters, Options options);
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // The plan of the first pass. `for_good`: it will not be rebuilt by order of arrival. Raises kResource when
  // memory cannot be allocated.
  void build_first(bool for_good);
  // Collective: replaces `order` by rank 0's. Gradients may have arrived in different orders, but all ranks
  // must use the same plan.
  void agree_on_order(std::vector<std::size_t>& order) const;
  // The plan for all later passes. Raises as build_first; the old buckets are destroyed by then.
  void rebuild_by_arrival(std::span<const std::size_t> order);
  // From now on all gradients are in the flat tensors, as communication hooks require.
  void give_up_pool();

  std::size_t n_parameters() const { return parameters_.size(); }
  // Of all gradients. Pre: there is a parameter.
  c10::Device device() const { return items_.front().device; }
  // Has the sizes, strides and type of the gradient: the parameter, or this rank's piece of a sharded one.
  at::Tensor like(std::size_t index) const { return local_shard(parameters_[index]); }
  std::size_t size() const { return buckets_.size(); }
  GradientBucket& operator[](std::size_t b) { return buckets_[b]; }
  const GradientBucket& operator[](std::size_t b) const { return buckets_[b]; }
  const BucketIndices& plan() const { return plan_; }
  std::span<const std::size_t> indices(std::size_t b) const { return plan_[b]; }
  GradientSlot slot_of(std::size_t index) const { return slots_[index]; }
  std::span<const BucketItem> items() const { return items_; }
  const BucketItem& item(std::size_t index) const { return items_[index]; }
  // The parameter's type when it was wrapped: averages are delivered in it.
  at::ScalarType own_type(std::size_t index) const { return own_types_[index]; }
  bool in_place(std::size_t index) const { return in_place_[index] != 0; }
  bool has_been_rebuilt() const { return rebuilt_; }

  // Null: no gradient is reduced in place. Open while a pass computes gradients.
  GradientPool* pool() const { return pool_.get(); }
  void open_pool() const;
  void close_pool() const noexcept;
  // Memory for a gradient that is reduced in place, uninitialised.
  at::Tensor make_in_place(std::size_t index) const { return pool_->make(like(index)); }

  // Replaces every Tensor::grad() that is a view of bucket memory by a copy.
  void unalias() const;
  std::vector<std::size_t> bucket_bytes() const;
  // Memory that is not a gradient's: flat tensors unless `views` (gradients are views of them), and free
  // blocks of the pool.
  std::size_t held_bytes(bool views) const;

 private:
  void agree_on_in_place();
  void choose_in_place();
  void build(BucketIndices plan);
  GradientBucket make_bucket(const std::vector<std::size_t>& indices) const;

  const std::vector<at::Tensor> parameters_;
  const Options options_;
  std::vector<BucketItem> items_;  // by parameter, as stored in buckets
  std::vector<at::ScalarType> own_types_;
  std::size_t in_place_from_ = 0;        // bytes; rank 0's
  std::vector<unsigned char> in_place_;  // by parameter
  std::shared_ptr<GradientPool> pool_;
  BucketIndices plan_;
  std::vector<GradientBucket> buckets_;
  std::vector<GradientSlot> slots_;  // by parameter
  bool rebuilt_ = false;
};

}  // namespace lockstep::internal
