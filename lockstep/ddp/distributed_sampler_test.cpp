#include "lockstep/ddp/distributed_sampler.h"

#include <gtest/gtest.h>
#include <torch/data.h>
#include <torch/serialize.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/group/world.h"

namespace lockstep {
namespace {

using Indices = std::vector<std::size_t>;

Indices drain(DistributedSampler& sampler, std::size_t batch) {
  Indices all;
  while (auto some = sampler.next(batch)) all.insert(all.end(), some->begin(), some->end());
  return all;
}

Indices in_order(std::size_t size, int replicas, int rank, bool drop_last) {
  return DistributedSampler(
             size, {.num_replicas = replicas, .rank = rank, .shuffle = false, .drop_last = drop_last})
      .indices();
}

TEST(DistributedSampler, GivesEachRankEveryNthIndex) {
  EXPECT_EQ(in_order(6, 2, 0, false), (Indices{0, 2, 4}));
  EXPECT_EQ(in_order(6, 2, 1, false), (Indices{1, 3, 5}));
}

TEST(DistributedSampler, PadsByBeginningAgain) {
  EXPECT_EQ(in_order(5, 3, 0, false), (Indices{0, 3}));
  EXPECT_EQ(in_order(5, 3, 1, false), (Indices{1, 4}));
  EXPECT_EQ(in_order(5, 3, 2, false), (Indices{2, 0}));
  // More ranks than twice the samples.
  EXPECT_EQ(in_order(2, 5, 4, false), Indices{0});
}

TEST(DistributedSampler, LeavesTheTailOutWhenAsked) {
  EXPECT_EQ(in_order(5, 3, 0, true), Indices{0});
  EXPECT_EQ(in_order(5, 3, 2, true), Indices{2});
  EXPECT_EQ(in_order(2, 3, 0, true), Indices{});
  EXPECT_EQ(in_order(0, 3, 0, false), Indices{});
}

TEST(DistributedSampler, DrawsThePermutationOfPython) {
  // torch.randperm(10, generator=torch.Generator().manual_seed(0))
  DistributedSampler sampler(10, {.num_replicas = 1, .rank = 0});
  EXPECT_EQ(sampler.indices(), (Indices{4, 1, 7, 5, 3, 9, 0, 8, 6, 2}));
}

TEST(DistributedSampler, CoversTheDatasetOnceAcrossRanksInEveryEpoch) {
  Indices first_epoch;
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    Indices all;
    for (int rank = 0; rank < 4; ++rank) {
      DistributedSampler sampler(40, {.num_replicas = 4, .rank = rank, .seed = 7});
      sampler.set_epoch(epoch);
      sampler.reset();
      EXPECT_EQ(sampler.size(), 10U);
      const Indices mine = drain(sampler, 3);
      EXPECT_EQ(mine.size(), 10U);
      all.insert(all.end(), mine.begin(), mine.end());
    }
    if (epoch == 0) {
      first_epoch = all;
    } else {
      EXPECT_NE(all, first_epoch);
    }
    std::sort(all.begin(), all.end());
    Indices expected(40);
    std::iota(expected.begin(), expected.end(), std::size_t{0});
    EXPECT_EQ(all, expected);
  }
}

TEST(DistributedSampler, SeedAndEpochAddUp) {
  DistributedSampler a(30, {.num_replicas = 2, .rank = 1, .seed = 3});
  DistributedSampler b(30, {.num_replicas = 2, .rank = 1, .seed = 5});
  a.set_epoch(4);
  b.set_epoch(2);
  EXPECT_EQ(a.indices(), b.indices());
}

TEST(DistributedSampler, LeavesTheDefaultGeneratorAlone) {
  torch::manual_seed(1);
  const at::Tensor expected = torch::rand({3});
  torch::manual_seed(1);
  DistributedSampler(100, {.num_replicas = 2, .rank = 0});
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected));
}

TEST(DistributedSampler, RefusesARankOutsideTheReplicas) {
  EXPECT_THROW(DistributedSampler(4, {.num_replicas = 2, .rank = 2}), Error);
  EXPECT_THROW(DistributedSampler(4, {.num_replicas = 2, .rank = -1}), Error);
  EXPECT_THROW(DistributedSampler(4, {.num_replicas = 0, .rank = 0}), Error);
}

TEST(DistributedSampler, TakesRankAndSizeFromTheDefaultGroup) {
  try {
    DistributedSampler sampler(4);
    FAIL() << "there is no default group";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
  }
  run_threads(3, [](int rank) {
    DistributedSampler sampler(9, {.shuffle = false});
    EXPECT_EQ(sampler.indices().front(), static_cast<std::size_t>(rank));
    EXPECT_EQ(sampler.size(), 3U);
  });
}

struct Numbers : torch::data::datasets::Dataset<Numbers> {
  torch::data::Example<> get(std::size_t index) override {
    return {torch::tensor(static_cast<std::int64_t>(index)), torch::Tensor()};
  }
  std::optional<std::size_t> size() const override { return 12; }
};

Indices epoch_of(auto& loader) {
  Indices seen;
  for (auto& batch : loader) {
    for (auto& example : batch)
      seen.push_back(static_cast<std::size_t>(example.data.template item<std::int64_t>()));
  }
  return seen;
}

TEST(DistributedSampler, FeedsALibtorchDataLoaderAndSetEpochReachesIt) {
  DistributedSampler sampler(12, {.num_replicas = 2, .rank = 1});
  auto loader = torch::data::make_data_loader(Numbers(), sampler, 4);
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    const Indices seen = epoch_of(*loader);
    EXPECT_EQ(seen.size(), 6U);
    EXPECT_EQ(seen, sampler.indices());
  }
}

TEST(DistributedSampler, ContinuesFromASavedPosition) {
  DistributedSampler sampler(20, {.num_replicas = 2, .rank = 0, .seed = 1});
  sampler.set_epoch(5);
  sampler.reset();
  sampler.next(4);
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(stream);

  DistributedSampler other(20, {.num_replicas = 2, .rank = 0, .seed = 1});
  torch::serialize::InputArchive in;
  in.load_from(stream);
  other.load(in);
  EXPECT_EQ(other.epoch(), 5U);
  EXPECT_EQ(other.next(100), sampler.next(100));
}

}  // namespace
}  // namespace lockstep
