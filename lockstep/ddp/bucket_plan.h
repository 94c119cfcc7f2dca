// Which parameters share a bucket: pure functions of sizes, types and limits, so that every rank that calls them with
// the same arguments gets the same plan.
//
// A bucket is one flat tensor that holds the gradients of several parameters and is reduced by one operation. It
// never mixes element types or devices; sparse gradients have one each. A parameter is added first and the bucket closed when it has reached its
// limit, so buckets may be larger than the limit but never empty.
// Thread safety: no state.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <vector>

namespace lockstep {

// Small, so that the first reduction starts early in the backward pass.
inline constexpr std::size_t kDefaultFirstBucketBytes = 1024 * 1024;
inline constexpr std::size_t kDefaultBucketCapBytes = 25 * 1024 * 1024;
inline constexpr std::size_t kUnlimitedBucket = std::numeric_limits<std::size_t>::max();

// What the plan needs to know of one parameter.
struct BucketItem {
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::kCPU;
  std::size_t n_bytes = 0;
  bool sparse = false;  // its gradient is: a bucket of its own
};

// buckets[b] lists indices of items; bucket 0 is reduced first.
using BucketIndices = std::vector<std::vector<std::size_t>>;

// The rule. Items are taken in `order` (indices into items; empty: ascending) and collected per (dtype, device).
// limits are bytes: each key starts at limits[0], moves on by one with every bucket it closes and stays at the last.
// What remains open at the end forms the last buckets, in the order their keys first appeared. With an empty order
// the result is sorted by each bucket's smallest index; otherwise it stays in the order of closing.
// Raises kUsage when limits is empty or order is not a permutation of the items.
BucketIndices assign_buckets(std::span<const BucketItem> items, std::span<const std::size_t> limits,
                             std::span<const std::size_t> order = {});

// Size of the first bucket where no cap is given, so that reduction starts early; for models wrapped from now on, in this
// process. Any thread. Setting raises kUsage for 0.
std::size_t default_first_bucket_bytes();
void set_default_first_bucket_bytes(std::size_t n_bytes);

// The user's wishes, as DistributedDataParallel takes them; MiB, fractions allowed.
struct BucketCaps {
  std::optional<double> cap_mb{};
  std::vector<double> cap_mb_list{};
  std::size_t first_bucket_bytes = default_first_bucket_bytes();
};

// Limits of the first iteration: one unlimited bucket per key, since the order in which gradients arrive is not known
// yet; the explicit list when there is one. Both functions raise kUsage for a cap that is not positive.
std::vector<std::size_t> initial_limits(const BucketCaps& caps);
// Limits from the second iteration on: [first bucket, cap]; [cap, cap] when the user set the cap; the explicit list.
std::vector<std::size_t> rebuilt_limits(const BucketCaps& caps);

// The plan of the first iteration: buckets reversed, because the parameters defined last get their gradients first.
// `for_good`: no other will follow it, so the limits are the later ones'.
BucketIndices initial_buckets(std::span<const BucketItem> items, const BucketCaps& caps,
                              bool for_good = false);
// The plan for all later ones, from the order in which gradients arrived in the first backward pass.
BucketIndices rebuilt_buckets(std::span<const BucketItem> items, const BucketCaps& caps,
                              std::span<const std::size_t> arrival);

}  // namespace lockstep
