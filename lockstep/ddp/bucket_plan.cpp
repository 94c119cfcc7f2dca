#include "lockstep/ddp/bucket_plan.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// One key's bucket while it is filled. Few keys exist in a model, so they are searched linearly.
struct OpenBucket {
  c10::ScalarType dtype;
  c10::Device device;
  std::size_t next_limit = 0;
  std::size_t n_bytes = 0;
  std::vector<std::size_t> indices{};
};

OpenBucket& open_bucket_for(std::vector<OpenBucket>& open, const BucketItem& item) {
  for (OpenBucket& bucket : open) {
    if (bucket.dtype == item.dtype && bucket.device == item.device) return bucket;
  }
  return open.emplace_back(OpenBucket{item.dtype, item.device});
}

std::vector<std::size_t> ascending(std::size_t n) {
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  return order;
}

// Orders of arrival are broadcast by rank 0: an index beyond the items must not get further.
void check_permutation(std::span<const std::size_t> order, std::size_t n_items) {
  std::vector<bool> seen(n_items, false);
  bool good = order.size() == n_items;
  for (std::size_t i = 0; good && i < order.size(); ++i) {
    good = order[i] < n_items && !seen[order[i]];
    if (good) seen[order[i]] = true;
  }
  if (!good) {
    base::raise(ErrorKind::kUsage,
                base::cat("assign_buckets: the order must name each of the ", n_items, " items once"));
  }
}

std::size_t to_bytes(double mb, const char* option) {
  const double bytes = mb * 1024 * 1024;
  // Written so that NaN fails, too.
  if (!(bytes >= 1) || std::isinf(bytes)) {
    base::raise(ErrorKind::kUsage, base::cat("DistributedDataParallel: ", option,
                                             " must be a positive number of MiB, not ", mb));
  }
  return static_cast<std::size_t>(bytes);
}

std::vector<std::size_t> explicit_limits(const BucketCaps& caps) {
  std::vector<std::size_t> limits;
  for (const double mb : caps.cap_mb_list) limits.push_back(to_bytes(mb, "bucket_cap_mb_list"));
  return limits;
}

// Read once per BucketCaps, when a model is wrapped: ranks must set it to the same value before.
std::atomic<std::size_t> first_bucket_bytes_now{kDefaultFirstBucketBytes};

}  // namespace

BucketIndices assign_buckets(std::span<const BucketItem> items, std::span<const std::size_t> limits,
                             std::span<const std::size_t> order) {
  if (limits.empty()) base::raise(ErrorKind::kUsage, "assign_buckets: no bucket limit was given");
  const std::vector<std::size_t> by_index =
      order.empty() ? ascending(items.size()) : std::vector<std::size_t>{};
  const bool sorted = order.empty();
  if (sorted) {
    order = by_index;
  } else {
    check_permutation(order, items.size());
  }

  BucketIndices closed;
  std::vector<OpenBucket> open;
  for (const std::size_t index : order) {
    // Not counted against the open bucket of its key, which stays open.
    if (items[index].sparse) {
      closed.push_back({index});
      continue;
    }
    OpenBucket& bucket = open_bucket_for(open, items[index]);
    bucket.indices.push_back(index);
    bucket.n_bytes += items[index].n_bytes;
    // Closed after the item that reaches the limit: an item larger than the limit gets a bucket, and none is
    // ever split.
    if (bucket.n_bytes < limits[bucket.next_limit]) continue;
    closed.push_back(std::move(bucket.indices));
    bucket.indices.clear();
    bucket.n_bytes = 0;
    if (bucket.next_limit + 1 < limits.size()) ++bucket.next_limit;
  }
  for (OpenBucket& bucket : open) {
    if (!bucket.indices.empty()) closed.push_back(std::move(bucket.indices));
  }
  if (sorted) {
    // Ascending input: a bucket's first index is its smallest.
    std::sort(closed.begin(), closed.end(),
              [](const auto& a, const auto& b) { return a.front() < b.front(); });
  }
  return closed;
}

std::size_t default_first_bucket_bytes() {
  return first_bucket_bytes_now.load();
}

void set_default_first_bucket_bytes(std::size_t n_bytes) {
  if (n_bytes == 0)
    base::raise(ErrorKind::kUsage, "set_default_first_bucket_bytes: a bucket needs at least one byte");
  first_bucket_bytes_now = n_bytes;
}

std::vector<std::size_t> initial_limits(const BucketCaps& caps) {
  if (!caps.cap_mb_list.empty()) return explicit_limits(caps);
  if (caps.cap_mb) to_bytes(*caps.cap_mb, "bucket_cap_mb");  // complain now, not in the second iteration
  return {kUnlimitedBucket};
}

std::vector<std::size_t> rebuilt_limits(const BucketCaps& caps) {
  if (!caps.cap_mb_list.empty()) return explicit_limits(caps);
  if (!caps.cap_mb) return {caps.first_bucket_bytes, kDefaultBucketCapBytes};
  const std::size_t cap = to_bytes(*caps.cap_mb, "bucket_cap_mb");
  return {cap, cap};
}

BucketIndices initial_buckets(std::span<const BucketItem> items, const BucketCaps& caps, bool for_good) {
  BucketIndices buckets = assign_buckets(items, for_good ? rebuilt_limits(caps) : initial_limits(caps));
  // Buckets, not the indices inside of them: within a bucket the order does not matter for when it is full.
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

BucketIndices rebuilt_buckets(std::span<const BucketItem> items, const BucketCaps& caps,
                              std::span<const std::size_t> arrival) {
  return assign_buckets(items, rebuilt_limits(caps), arrival);
}

}  // namespace lockstep
