#include "lockstep/ddp/elastic_distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <gtest/gtest.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <functional>
#include <set>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/group/world.h"

namespace lockstep {
namespace {

using Indices = std::vector<std::size_t>;

ElasticDistributedSampler sampler_of(int rank, std::size_t start, int n = 3) {
  return ElasticDistributedSampler(20, {.num_replicas = n, .rank = rank, .start_index = start});
}

ErrorKind kind_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.kind();
  }
  return ErrorKind::kInternal;
}

// What python's class does, written out: randperm of what is left under a generator of the epoch, then every
// third.
TEST(ElasticDistributedSampler, DealsOutWhatIsLeftBehindTheStartIndex) {
  for (const std::size_t start : {0u, 7u, 18u, 19u}) {
    std::multiset<std::size_t> all;
    for (int rank = 0; rank < 3; ++rank) {
      auto sampler = sampler_of(rank, start);
      sampler.set_epoch(5);
      const auto left = static_cast<std::int64_t>(20 - start);
      const auto order = at::randperm(left, at::detail::createCPUGenerator(5), at::TensorOptions(at::kLong));
      Indices expected;
      for (std::int64_t i = rank; i < (left + 2) / 3 * 3; i += 3)
        expected.push_back(start + static_cast<std::size_t>(order[i % left].item<std::int64_t>()));
      EXPECT_EQ(sampler.indices(), expected) << start;
      EXPECT_EQ(sampler.size(), expected.size());
      all.insert(expected.begin(), expected.end());
    }
    // Every sample behind the start index comes, none before it.
    EXPECT_EQ(*all.begin(), start);
    EXPECT_EQ(std::set<std::size_t>(all.begin(), all.end()).size(), 20 - start);
    EXPECT_LE(all.size(), 20 - start + 2) << "padding";
  }
}

TEST(ElasticDistributedSampler, GoesOnWithAnotherNumberOfRanks) {
  // Three ranks did two steps of a batch of two: twelve samples. Two ranks go on behind them.
  std::set<std::size_t> seen;
  for (int rank = 0; rank < 2; ++rank) {
    auto sampler = sampler_of(rank, 12, 2);
    while (const auto batch = sampler.next(3)) seen.insert(batch->begin(), batch->end());
  }
  EXPECT_EQ(seen.size(), 8u);
  EXPECT_EQ(*seen.begin(), 12u);
}

TEST(ElasticDistributedSampler, CopiesShareTheEpochAndTheStartIndex) {
  auto sampler = sampler_of(0, 4);
  auto loaders = sampler;
  sampler.set_epoch(3);
  sampler.set_start_index(0);
  loaders.reset();
  EXPECT_EQ(loaders.indices(), sampler.indices());
  EXPECT_EQ(loaders.size(), 7u);
}

TEST(ElasticDistributedSampler, GoesOnWhereItWasSaved) {
  auto sampler = sampler_of(1, 5);
  sampler.set_epoch(2);
  sampler.reset();
  sampler.next(2);
  torch::serialize::OutputArchive out;
  sampler.save(out);
  std::stringstream bytes;
  out.save_to(bytes);
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  auto restored = sampler_of(1, 0);
  restored.load(in);
  EXPECT_EQ(restored.start_index(), 5u);
  EXPECT_EQ(restored.epoch(), 2u);
  EXPECT_EQ(restored.next(99), sampler.next(99));
}

TEST(ElasticDistributedSampler, RefusesWhatLeavesNothingAndRanksThatAreNone) {
  EXPECT_EQ(kind_of([] { sampler_of(0, 20); }), ErrorKind::kUsage);
  EXPECT_EQ(kind_of([] { sampler_of(3, 0); }), ErrorKind::kUsage);
  EXPECT_EQ(kind_of([] { sampler_of(0, 0, 0); }), ErrorKind::kUsage);
  EXPECT_EQ(kind_of([] { ElasticDistributedSampler(4); }), ErrorKind::kUsage) << "no default group";
  auto sampler = sampler_of(0, 15);
  EXPECT_EQ(kind_of([&] { sampler.reset(15); }), ErrorKind::kUsage);
  run_threads(2, [](int rank) {
    EXPECT_EQ(ElasticDistributedSampler(8, {.start_index = 2}).indices(),
              ElasticDistributedSampler(8, {.num_replicas = 2, .rank = rank, .start_index = 2}).indices());
  });
}

}  // namespace
}  // namespace lockstep
