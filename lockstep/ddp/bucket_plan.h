// Which parameters share a bucket: pure functions of sizes, types and limits, so that every rank that calls
// them with the same arguments gets the same plan.
//
// A bucket is one flat tensor that holds the gradients of several parameters and is reduced by one operation.
// It never mixes element types or devices; each sparse gradient has its own. A bucket is closed once an added
// parameter makes it reach its limit, so buckets may exceed the limit but are never empty.
// Thread safety: every function may be called from any thread.
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

// What the plan needs to know about one parameter.
struct BucketItem {
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::kCPU;
  std::size_t n_bytes = 0;
  bool sparse = false;  // sparse gradient: its own bucket
};

// buckets[b] lists indices of items; bucket 0 is reduced first.
using BucketIndices = std::vector<std::vector<std::size_t>>;

// The rule. Items are taken in `order` (indices into items; empty: ascending) and collected per (dtype,
// device). limits are in bytes: each key starts at limits[0], advances with every bucket it closes and stays
// at the last. Buckets still open at the end come last, in the order their keys first appeared. With an empty
// order the result is sorted by each bucket's smallest index; otherwise buckets are in the order they were
// closed. Raises kUsage when limits is empty or order is not a permutation of the items.
BucketIndices assign_buckets(std::span<const BucketItem> items, std::span<const std::size_t> limits,
                             std::span<const std::size_t> order = {});

// Size of the first bucket when no cap is given, so that reduction starts early; applies to models wrapped
// from now on in this process. Setting raises kUsage for 0.
std::size_t default_first_bucket_bytes();
void set_default_first_bucket_bytes(std::size_t n_bytes);

// The user's settings, as DistributedDataParallel takes them; in MiB, fractions allowed.
struct BucketCaps {
  std::optional<double> cap_mb{};
  std::vector<double> cap_mb_list{};
  std::size_t first_bucket_bytes = default_first_bucket_bytes();
};

// Limits of the first iteration: one unlimited bucket per key, since the order in which gradients arrive is
// not known yet; the explicit list when there is one. Both functions raise kUsage for a cap that is not
// positive.
std::vector<std::size_t> initial_limits(const BucketCaps& caps);
// Limits from the second iteration on: [first bucket, cap]; [cap, cap] when the user set the cap; the
// explicit list.
std::vector<std::size_t> rebuilt_limits(const BucketCaps& caps);

// The plan of the first iteration: buckets reversed, because the parameters defined last get their gradients
// first. `for_good`: the plan is never rebuilt, so the limits of later iterations apply.
BucketIndices initial_buckets(std::span<const BucketItem> items, const BucketCaps& caps,
                              bool for_good = false);
// The plan for all later iterations, from the order in which gradients arrived in the first backward pass.
BucketIndices rebuilt_buckets(std::span<const BucketItem> items, const BucketCaps& caps,
                              std::span<const std::size_t> arrival);

}  // namespace lockstep
