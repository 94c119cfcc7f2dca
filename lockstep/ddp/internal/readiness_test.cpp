#include "lockstep/ddp/internal/readiness.h"

#include <torch/csrc/autograd/variable.h>

#include "lockstep/ddp/internal/reducer_testing.h"

namespace lockstep::internal {
namespace {

using namespace reducer_testing;
using Order = std::vector<std::size_t>;

const std::vector<BucketItem> kThreeItems(3, BucketItem{.n_bytes = 8});

Order ready_at_once(const Readiness& readiness) {
  Order indices;
  for (std::size_t i = 0; i < kThreeItems.size(); ++i) {
    if (readiness.ready_at_once(i)) indices.push_back(i);
  }
  return indices;
}

Order copied(std::span<const std::size_t> order) {
  return {order.begin(), order.end()};
}

Readiness searched() {
  return Readiness(SearchedParameters(3, default_group(), std::source_location::current()));
}
Readiness learning() {
  return Readiness(StaticGraph(3, default_group(), std::source_location::current()));
}

// A static graph whose first pass used parameter 2 twice and parameter 0 once.
Readiness learnt() {
  Readiness readiness = learning();
  readiness.begin();
  for (const std::size_t index : Order{2, 0, 2}) readiness.on_gradient(index, true);
  readiness.at_end();
  readiness.start_usage(false);
  readiness.wait_usage();
  readiness.end(kThreeItems, true);
  return readiness;
}

TEST(AllParameters, EachGradientIsReadyAndItsOrderIsRecordedUntilStopped) {
  Readiness readiness(AllParameters(3));
  EXPECT_FALSE(readiness.wants_announcement());
  readiness.begin();
  EXPECT_EQ(ready_at_once(readiness), Order{});
  for (const std::size_t index : Order{2, 0, 1})
    EXPECT_EQ(readiness.on_gradient(index, true), GradientState::kReady);
  EXPECT_EQ(copied(readiness.arrival()), (Order{2, 0, 1}));
  readiness.begin();
  EXPECT_EQ(readiness.on_gradient(0, false), GradientState::kReady) << "an undefined gradient, too";
  EXPECT_EQ(copied(readiness.arrival()), (Order{0})) << "of the last pass";
  readiness.stop_recording();
  readiness.on_gradient(1, true);
  EXPECT_EQ(copied(readiness.arrival()), (Order{0}));
}

TEST(SearchedParameters, WhatTheOutputsDoNotLeadToIsReadyAtOnce) {
  run_threads(1, [](int) {
    const NamedTensors named = parameters_of_sizes({2, 2, 2});
    std::vector<compat::NodePtr> accumulators;
    for (const at::Tensor& tensor : named.tensors)
      accumulators.push_back(torch::autograd::impl::grad_accumulator(tensor));
    Readiness readiness = searched();
    EXPECT_TRUE(readiness.searches() && readiness.wants_announcement() && readiness.waits_for_end());
    const std::vector<at::Tensor> first = {named.tensors[0].sum()};
    const std::vector<at::Tensor> second = {named.tensors[1] * 2, at::Tensor()};
    readiness.on_forward({.outputs = first, .accumulators = accumulators, .first = true});
    EXPECT_EQ(ready_at_once(readiness), (Order{1, 2}));
    readiness.on_forward({.outputs = second, .accumulators = accumulators, .first = false});
    EXPECT_EQ(ready_at_once(readiness), (Order{2})) << "both forward passes may be followed by one backward";
    readiness.on_forward({.outputs = second, .accumulators = accumulators, .first = true});
    EXPECT_EQ(ready_at_once(readiness), (Order{0, 2}));
    const std::vector<compat::NodePtr> entries = {accumulators[2]};
    readiness.on_forward({.entries = entries, .accumulators = accumulators, .first = true});
    EXPECT_EQ(ready_at_once(readiness), (Order{0, 1}));
  });
}

TEST(SearchedParameters, KnowWhoWasUsedHereAndAnywhere) {
  run_threads(2, [](int rank) {
    Readiness readiness = searched();
    readiness.note_use(static_cast<std::size_t>(rank));
    ASSERT_TRUE(readiness.exchanges_usage());
    readiness.start_usage(false);
    readiness.wait_usage();
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(readiness.use(i).here, i == static_cast<std::size_t>(rank));
      EXPECT_EQ(readiness.use(i).anywhere, i != 2);
      EXPECT_FALSE(readiness.use(i).required);
    }
    readiness.end(kThreeItems, true);
    EXPECT_EQ(readiness.usage()->unused_bytes(), 16U);
    EXPECT_FALSE(readiness.use(static_cast<std::size_t>(rank)).here) << "forgotten for the next pass";
    readiness.start_usage(true);  // a shadow uses nothing
    readiness.wait_usage();
    EXPECT_FALSE(readiness.use(0).anywhere);
  });
}

TEST(SearchedParameters, GradientsLeftFromNoSyncContribute) {
  run_threads(1, [](int) {
    Readiness readiness = searched();
    EXPECT_FALSE(readiness.contributes(1));
    readiness.note_use(1);
    EXPECT_TRUE(readiness.contributes(1));
    EXPECT_TRUE(readiness.ready_at_once(1));
  });
}

TEST(StaticGraph, TheFirstPassOnlyCounts) {
  run_threads(1, [](int) {
    Readiness readiness = learning();
    readiness.begin();
    EXPECT_TRUE(readiness.wants_announcement() && readiness.waits_for_end());
    EXPECT_EQ(ready_at_once(readiness), Order{}) << "nobody knows yet";
    EXPECT_EQ(readiness.on_gradient(2, true), GradientState::kMoreToCome);
    EXPECT_EQ(readiness.on_gradient(0, true), GradientState::kMoreToCome);
    EXPECT_EQ(readiness.on_gradient(2, true), GradientState::kMoreToCome);
    EXPECT_EQ(readiness.on_gradient(1, false), GradientState::kMoreToCome)
        << "an undefined gradient is no use";
    EXPECT_TRUE(readiness.contributes(1)) << "nothing is skipped";
    readiness.at_end();
    EXPECT_EQ(copied(readiness.arrival()), (Order{2, 0, 1})) << "by first use, unused ones last";
  });
}

TEST(StaticGraph, LaterPassesMustBeLikeTheFirst) {
  run_threads(1, [](int) {
    Readiness readiness = learnt();
    readiness.begin();
    EXPECT_FALSE(readiness.wants_announcement() || readiness.waits_for_end());
    EXPECT_EQ(ready_at_once(readiness), (Order{1}));
    EXPECT_EQ(readiness.on_gradient(2, true), GradientState::kMoreToCome);
    EXPECT_EQ(readiness.on_gradient(0, true), GradientState::kReady);
    EXPECT_EQ(readiness.on_gradient(2, true), GradientState::kReady);
    EXPECT_EQ(readiness.on_gradient(1, true), GradientState::kUnexpected);
    EXPECT_TRUE(readiness.use(0).here && readiness.use(0).anywhere && readiness.use(0).required);
    EXPECT_FALSE(readiness.use(1).here || readiness.use(1).anywhere || readiness.use(1).required);
    EXPECT_FALSE(readiness.contributes(1));
  });
}

TEST(StaticGraph, ARankThatShadowedTheFirstPassTakesOverWhatAnotherLearnt) {
  run_threads(2, [](int rank) {
    Readiness readiness = learning();
    if (rank == 0) {
      readiness = learnt();
    } else {
      readiness.start_usage(true);
      readiness.wait_usage();
      readiness.end(kThreeItems, false);
    }
    EXPECT_FALSE(readiness.exchanges_usage()) << "once only, on all ranks";
    EXPECT_EQ(readiness.wants_announcement(), rank == 1) << "no hook runs here, as far as is known";
    readiness.static_graph()->share(0, default_group(), std::source_location::current());
    EXPECT_EQ(ready_at_once(readiness), (Order{1}));
  });
}

TEST(UsageExchange, ReportsWhetherPassesDiffer) {
  run_threads(1, [](int) {
    UsageExchange usage(3, default_group(), std::source_location::current());
    const auto pass = [&](const Order& used) {
      usage.forget_here();
      for (const std::size_t index : used) usage.note(index);
      usage.close(kThreeItems);
    };
    pass({0});
    pass({0});
    EXPECT_FALSE(usage.has_changed());
    EXPECT_EQ(usage.unused_bytes(), 16U);
    pass({1});
    EXPECT_TRUE(usage.has_changed());
    pass({1});
    EXPECT_TRUE(usage.has_changed()) << "for good";
  });
}

}  // namespace
}  // namespace lockstep::internal
