// The bucket rules, alone and beside libtorch's own.
#include "lockstep/ddp/bucket_plan.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <numeric>
#include <random>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kMiB = 1024 * 1024;

std::vector<BucketItem> floats(std::initializer_list<std::size_t> sizes) {
  std::vector<BucketItem> items;
  for (const std::size_t n_bytes : sizes) items.push_back({c10::kFloat, c10::kCPU, n_bytes});
  return items;
}

std::vector<std::size_t> counts(const BucketIndices& buckets) {
  std::vector<std::size_t> result;
  for (const auto& bucket : buckets) result.push_back(bucket.size());
  return result;
}

std::vector<std::size_t> bytes(const BucketIndices& buckets, const std::vector<BucketItem>& items) {
  std::vector<std::size_t> result;
  for (const auto& bucket : buckets) {
    result.push_back(std::accumulate(bucket.begin(), bucket.end(), std::size_t{0},
                                     [&](std::size_t sum, std::size_t i) { return sum + items[i].n_bytes; }));
  }
  return result;
}

std::vector<at::Tensor> tensors_like(const std::vector<BucketItem>& items) {
  std::vector<at::Tensor> tensors;
  for (const BucketItem& item : items) {
    const auto n = static_cast<std::int64_t>(item.n_bytes / c10::elementSize(item.dtype));
    tensors.push_back(at::empty({n}, at::TensorOptions(item.dtype)));
  }
  return tensors;
}

// Sizes in bytes drawn from 4 KiB to 4 MiB.
std::vector<BucketItem> random_items(std::uint32_t seed, const std::vector<c10::ScalarType>& dtypes) {
  std::mt19937 random(seed);
  std::vector<BucketItem> items;
  const std::size_t n = 1 + random() % 60;
  for (std::size_t i = 0; i < n; ++i) {
    items.push_back({dtypes[random() % dtypes.size()], c10::kCPU, (std::size_t{4096} << (random() % 11))});
  }
  return items;
}

TEST(BucketPlan, ClosesABucketOnceItReachesItsLimit) {
  const auto items = floats({4000, 4000, 4000, 4000, 4000, 4000, 4000, 4000, 4000, 4000});
  EXPECT_EQ(counts(assign_buckets(items, std::vector<std::size_t>{4000, 8000})),
            (std::vector<std::size_t>{1, 2, 2, 2, 2, 1}));
}

TEST(BucketPlan, NeverMixesElementTypes) {
  const std::vector<BucketItem> items{{c10::kFloat, c10::kCPU, 100},
                                      {c10::kHalf, c10::kCPU, 100},
                                      {c10::kFloat, c10::kCPU, 100},
                                      {c10::kHalf, c10::kCPU, 100}};
  EXPECT_EQ(assign_buckets(items, std::vector<std::size_t>{kUnlimitedBucket}),
            (BucketIndices{{0, 2}, {1, 3}}));
}

TEST(BucketPlan, AdvancesTheLimitOfEachTypeByItself) {
  const std::vector<BucketItem> items{{c10::kFloat, c10::kCPU, 100},  {c10::kFloat, c10::kCPU, 100},
                                      {c10::kFloat, c10::kCPU, 100},  {c10::kDouble, c10::kCPU, 100},
                                      {c10::kDouble, c10::kCPU, 100}, {c10::kDouble, c10::kCPU, 100}};
  EXPECT_EQ(assign_buckets(items, std::vector<std::size_t>{100, 200}),
            (BucketIndices{{0}, {1, 2}, {3}, {4, 5}}));
}

TEST(BucketPlan, StartsWithOneBucketPerTypeInReverseOrder) {
  const std::vector<BucketItem> items{{c10::kFloat, c10::kCPU, 64 * kMiB},
                                      {c10::kHalf, c10::kCPU, 64 * kMiB},
                                      {c10::kFloat, c10::kCPU, 64 * kMiB}};
  EXPECT_EQ(initial_buckets(items, {}), (BucketIndices{{1}, {0, 2}}));
}

TEST(BucketPlan, StartsWithTheLaterLimitsWhenItStays) {
  const std::vector<BucketItem> items(3, {.n_bytes = 1024 * 1024});
  EXPECT_EQ(initial_buckets(items, {}).size(), 1U);
  EXPECT_EQ(initial_buckets(items, {}, true), (BucketIndices{{1, 2}, {0}}));
  EXPECT_EQ(initial_buckets(items, {.cap_mb = 1.0}, true), (BucketIndices{{2}, {1}, {0}}));
}

TEST(BucketPlan, StartsWithTheExplicitListWhenThereIsOne) {
  const auto items = floats({2 * kMiB, 2 * kMiB, 2 * kMiB, 2 * kMiB});
  EXPECT_EQ(initial_buckets(items, {.cap_mb_list = {2, 4}}), (BucketIndices{{3}, {1, 2}, {0}}));
}

TEST(BucketPlan, RebuildsWithASmallFirstBucketAndTwentyFiveMiBAfterIt) {
  std::vector<BucketItem> items(10, {c10::kFloat, c10::kCPU, 4 * kMiB});
  std::vector<std::size_t> arrival(items.size());
  std::iota(arrival.rbegin(), arrival.rend(), std::size_t{0});
  const BucketIndices buckets = rebuilt_buckets(items, {}, arrival);
  EXPECT_EQ(bytes(buckets, items), (std::vector<std::size_t>{4 * kMiB, 28 * kMiB, 8 * kMiB}));
  EXPECT_EQ(buckets.front(), std::vector<std::size_t>{9});
  EXPECT_EQ(buckets.back(), (std::vector<std::size_t>{1, 0}));
}

TEST(BucketPlan, UsesTheUsersCapForTheFirstBucketToo) {
  EXPECT_EQ(rebuilt_limits({.cap_mb = 5}), (std::vector<std::size_t>{5 * kMiB, 5 * kMiB}));
  EXPECT_EQ(rebuilt_limits({.cap_mb = 0.5}).front(), kMiB / 2);
  EXPECT_EQ(rebuilt_limits({.cap_mb = 5, .cap_mb_list = {1, 2, 3}}),
            (std::vector<std::size_t>{kMiB, 2 * kMiB, 3 * kMiB}));
  EXPECT_EQ(rebuilt_limits({.first_bucket_bytes = 7}), (std::vector<std::size_t>{7, 25 * kMiB}));
  set_default_first_bucket_bytes(11);
  EXPECT_EQ(rebuilt_limits({}), (std::vector<std::size_t>{11, 25 * kMiB}));
  set_default_first_bucket_bytes(kMiB);
  EXPECT_EQ(rebuilt_limits({}), (std::vector<std::size_t>{kMiB, 25 * kMiB}));
  EXPECT_THROW(set_default_first_bucket_bytes(0), Error);
}

TEST(BucketPlan, RefusesCapsThatAreNotPositive) {
  EXPECT_THROW(rebuilt_limits({.cap_mb = 0}), Error);
  EXPECT_THROW(initial_limits({.cap_mb = -1}), Error);
  EXPECT_THROW(initial_limits({.cap_mb_list = {1, 0}}), Error);
}

TEST(BucketPlan, RejectsAnOrderThatIsNotAPermutation) {
  const auto items = floats({1, 1, 1});
  const std::vector<std::size_t> limit{10};
  EXPECT_THROW(assign_buckets(items, limit, std::vector<std::size_t>{0, 1}), Error);
  EXPECT_THROW(assign_buckets(items, limit, std::vector<std::size_t>{0, 1, 1}), Error);
  EXPECT_THROW(assign_buckets(items, limit, std::vector<std::size_t>{0, 1, 3}), Error);
  EXPECT_THROW(assign_buckets(items, {}), Error);
}

TEST(BucketPlan, AgreesWithLibtorchInAscendingOrder) {
  for (std::uint32_t seed = 0; seed < 50; ++seed) {
    const auto items = random_items(seed, {c10::kFloat, c10::kHalf, c10::kDouble});
    const std::vector<std::size_t> limits{kMiB / 4, kMiB, 3 * kMiB};
    const auto [theirs, unused] = c10d::compute_bucket_assignment_by_size(tensors_like(items), limits);
    EXPECT_EQ(assign_buckets(items, limits), theirs) << "seed " << seed;
  }
}

TEST(BucketPlan, AgreesWithLibtorchInOrderOfArrival) {
  for (std::uint32_t seed = 0; seed < 50; ++seed) {
    // One type: libtorch leaves the order of the last buckets of several types to a hash table.
    const auto items = random_items(seed, {c10::kFloat});
    std::vector<std::size_t> arrival(items.size());
    std::iota(arrival.begin(), arrival.end(), std::size_t{0});
    std::shuffle(arrival.begin(), arrival.end(), std::mt19937(seed));
    // libtorch takes the tensors already in order of arrival.
    const auto tensors = tensors_like(items);
    std::vector<at::Tensor> arrived;
    for (const std::size_t i : arrival) arrived.push_back(tensors[i]);
    const std::vector<std::size_t> limits{kMiB, 4 * kMiB};
    const auto [theirs, unused] = c10d::compute_bucket_assignment_by_size(
        arrived, limits, {}, std::vector<std::int64_t>(arrival.begin(), arrival.end()));
    EXPECT_EQ(assign_buckets(items, limits, arrival), theirs) << "seed " << seed;
  }
}

}  // namespace
}  // namespace lockstep
