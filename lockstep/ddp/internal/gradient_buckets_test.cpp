#include "lockstep/ddp/internal/gradient_buckets.h"

#include <numeric>

#include "lockstep/ddp/internal/reducer_testing.h"

namespace lockstep::internal {
namespace {

using namespace reducer_testing;

TEST(GradientBuckets, EachParameterHasOnePlaceWithItsOwnStrides) {
  run_threads(1, [](int) {
    const at::Tensor turned = torch::ones({2, 3}).t().detach().requires_grad_();
    GradientBuckets buckets({torch::ones({4}), turned, torch::ones({2}, torch::kDouble)}, one_bucket());
    buckets.build_first(false);
    ASSERT_EQ(buckets.size(), 2U) << "one per element type";
    std::size_t n_slots = 0;
    for (std::size_t b = 0; b < buckets.size(); ++b) n_slots += buckets[b].views.size();
    EXPECT_EQ(n_slots, 3U);
    for (std::size_t i = 0; i < 3; ++i) {
      const auto [b, slot] = buckets.slot_of(i);
      EXPECT_EQ(buckets.indices(b)[slot], i);
      EXPECT_TRUE(buckets[b].views[slot].is_alias_of(buckets[b].flat));
    }
    const auto [b, slot] = buckets.slot_of(1);
    EXPECT_EQ(buckets[b].views[slot].strides(), turned.strides());
  });
}

TEST(GradientBuckets, LargeGradientsHaveNoPlaceInTheFlatTensorUnlessThePoolIsGivenUp) {
  run_threads(2, [](int) {
    GradientBuckets buckets({torch::ones({100}), torch::ones({2})}, one_bucket(100));
    buckets.build_first(false);
    EXPECT_TRUE(buckets.in_place(0));
    EXPECT_FALSE(buckets.in_place(1));
    EXPECT_EQ(buckets[0].flat.numel(), 2);
    EXPECT_EQ(buckets[0].n_bytes, 408U) << "they are reduced all the same";
    EXPECT_EQ(buckets.make_in_place(0).numel(), 100);
    buckets.give_up_pool();
    EXPECT_EQ(buckets.pool(), nullptr);
    EXPECT_EQ(buckets[0].flat.numel(), 102);
  });
}

TEST(GradientBuckets, WhatIsLargeIsForRankZeroToSay) {
  run_threads(2, [](int rank) {
    const GradientBuckets buckets({torch::ones({100})}, one_bucket(rank == 0 ? SIZE_MAX : 1));
    EXPECT_FALSE(buckets.in_place(0));
  });
}

TEST(GradientBuckets, AreRebuiltInRankZerosOrder) {
  run_threads(2, [](int rank) {
    GradientBuckets buckets({torch::ones({1}), torch::ones({2}), torch::ones({3})},
                            {.group = default_group(), .caps = {.cap_mb = 1e-6}});
    buckets.build_first(false);
    EXPECT_EQ(buckets.size(), 1U);
    EXPECT_FALSE(buckets.has_been_rebuilt());
    std::vector<std::size_t> order =
        rank == 0 ? std::vector<std::size_t>{1, 2, 0} : std::vector<std::size_t>{0, 1, 2};
    buckets.agree_on_order(order);
    buckets.rebuild_by_arrival(order);
    EXPECT_EQ(buckets.plan(), (BucketIndices{{1}, {2}, {0}}));
    EXPECT_EQ(buckets.bucket_bytes(), (std::vector<std::size_t>{8, 12, 4}));
    EXPECT_TRUE(buckets.has_been_rebuilt());
  });
}

TEST(GradientBuckets, GradientsThatLieInThemCanBeTakenOut) {
  run_threads(1, [](int) {
    const Parts parts(parameters_of_sizes({3, 2}), one_bucket());
    const auto [b, slot] = parts.buckets.slot_of(0);
    parts.parameter(0).mutable_grad() = parts.buckets[b].views[slot].fill_(5);
    parts.set_grad(1, 7);
    const void* const untouched = parts.parameter(1).grad().const_data_ptr();
    parts.buckets.unalias();
    parts.buckets[b].flat.zero_();
    EXPECT_TRUE(parts.grad_is(0, 5));
    EXPECT_EQ(parts.parameter(1).grad().const_data_ptr(), untouched);
  });
}

TEST(GradientBuckets, ASparseGradientHasABucketOfItsOwnWithoutMemory) {
  run_threads(1, [](int) {
    GradientBuckets buckets({torch::ones({3}), torch::ones({4, 2})},
                            {.group = default_group(), .sparse = {false, true}});
    buckets.build_first(false);
    const GradientBucket& bucket = buckets[buckets.slot_of(1).bucket];
    EXPECT_TRUE(bucket.is_sparse);
    EXPECT_FALSE(bucket.flat.defined());
    EXPECT_EQ(buckets.held_bytes(false), 12U);
    EXPECT_EQ(buckets.held_bytes(true), 0U) << "gradients lie in the others";
  });
}

}  // namespace
}  // namespace lockstep::internal
