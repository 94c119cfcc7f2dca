// A transformer split over tensor-parallel ranks, over those and data-parallel ones, and with sequences split
// as well: the loss and every gradient of 20 optimizer steps against one process, and the exact number of
// collectives.
#include "lockstep/parallel/transformer_testing.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include "lockstep/base/detail/text.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/random.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using testing::Decoder;
using testing::DecoderBlock;
using testing::DecoderOptions;
using testing::world;

constexpr std::uint64_t kSeed = 11;
constexpr std::int64_t kBatch = 2;

// Of one replica in one step.
struct Batch {
  Batch(const DecoderOptions& options, int step, int replica) {
    const auto n = kBatch * options.length;
    const auto numbers = at::arange(n, at::kLong) + step * 5 + replica * 31;
    tokens = (numbers * 7).remainder(options.vocabulary).view({kBatch, options.length});
    targets = (numbers * 5 + 2).remainder(options.vocabulary).view({kBatch, options.length});
  }
  at::Tensor tokens, targets;
};

struct Step {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};

torch::optim::AdamW optimizer_of(Decoder& model) {
  return torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(0.01));
}

// One process. It runs the batches of the replicas one after the other, each with the random numbers of its
// own seed, and averages.
std::vector<Step> train_alone(const DecoderOptions& options, int replicas, int n_steps) {
  Decoder model(options);
  auto optimizer = optimizer_of(model);
  auto generator = at::detail::getDefaultCPUGenerator();
  std::vector<at::Tensor> states;
  for (int r = 0; r < replicas; ++r) {
    generator.set_current_seed(kSeed + static_cast<std::uint64_t>(r));
    states.push_back(generator.get_state());
  }
  std::vector<Step> steps(static_cast<std::size_t>(n_steps));
  for (int s = 0; s < n_steps; ++s) {
    auto& step = steps[static_cast<std::size_t>(s)];
    optimizer.zero_grad();
    for (int r = 0; r < replicas; ++r) {
      auto& state = states[static_cast<std::size_t>(r)];
      const Batch batch(options, s, r);
      generator.set_state(state);
      const auto loss = model->loss(batch.tokens, batch.targets) / replicas;
      state = generator.get_state();
      loss.backward();
      step.loss += loss.item<double>();
    }
    for (const auto& parameter : model->parameters()) step.gradients.push_back(parameter.grad().clone());
    optimizer.step();
  }
  return steps;
}

double mean_over(const at::Tensor& loss, const DeviceMesh& dp) {
  auto value = full_tensor(loss.detach()).clone();
  all_reduce(value, {.op = ReduceOp::kAvg, .group = dp.get_group()});
  return value.item<double>();
}

// Trains on this rank and compares every step. `tolerance` is absolute.
void expect_training_of_one(const std::vector<Step>& alone, const DecoderOptions& options, bool sequence,
                            const DeviceMesh& dp, const DeviceMesh& tp, double tolerance) {
  Decoder model(options);
  testing::split(*model, tp, sequence);
  auto optimizer = optimizer_of(model);
  auto replicas = DistributedDataParallel(model, {.device_mesh = dp});
  const auto replica = dp.get_local_rank();
  manual_seed(kSeed + static_cast<std::uint64_t>(replica), tp);
  for (int s = 0; s < static_cast<int>(alone.size()); ++s) {
    const auto& step = alone[static_cast<std::size_t>(s)];
    const Batch batch(options, s, replica);
    optimizer.zero_grad();
    const auto loss = testing::DecoderImpl::loss_of(replicas->forward(batch.tokens), batch.targets);
    loss.backward();
    ASSERT_NEAR(mean_over(loss, dp), step.loss, tolerance) << "step " << s;
    std::size_t i = 0;
    for (const auto& item : model->named_parameters()) {
      ASSERT_TRUE(is_dtensor(item.value())) << item.key();
      const auto error = (full_tensor(item.value().grad()) - step.gradients[i]).abs().max().item<double>();
      ASSERT_LE(error, tolerance) << item.key() << " at step " << s;
      ASSERT_GT(step.gradients[i++].abs().max().item<double>(), 10 * tolerance) << item.key();
    }
    optimizer.step();
  }
}

void expect_training_of_one(const DecoderOptions& options, bool sequence, int replicas, double tolerance,
                            int n_steps = 20) {
  at::set_num_threads(1);
  const auto alone = train_alone(options, replicas, n_steps);
  EXPECT_LT(alone.back().loss, alone.front().loss);
  world(2 * replicas, [&](int) {
    const auto mesh = init_device_mesh("cpu", {replicas, 2}, {.mesh_dim_names = {"dp", "tp"}});
    expect_training_of_one(alone, options, sequence, mesh["dp"], mesh["tp"], tolerance);
  });
}

// In double, sums in another order differ by far less than what any error would.
constexpr double kExact = 1e-9;

TEST(Transformer, SplitOverTwoRanksItTrainsAsInOneProcess) {
  expect_training_of_one({}, false, 1, kExact);
}
TEST(Transformer, SplitOverTwoRanksOfTwoReplicasItTrainsAsInOneProcess) {
  expect_training_of_one({}, false, 2, kExact);
}
TEST(Transformer, WithSequencesSplitItTrainsAsInOneProcess) {
  expect_training_of_one({}, true, 1, kExact);
}
TEST(Transformer, WithSequencesSplitAndTwoReplicasItTrainsAsInOneProcess) {
  expect_training_of_one({}, true, 2, kExact);
}
TEST(Transformer, InSizesThatDoNotDivideItTrainsAsInOneProcess) {
  const DecoderOptions uneven{.vocabulary = 11, .length = 5};
  expect_training_of_one(uneven, false, 1, kExact);
  expect_training_of_one(uneven, true, 1, kExact);
}
TEST(Transformer, InSinglePrecisionItTrainsAsInOneProcess) {
  expect_training_of_one({.dtype = at::kFloat}, false, 1, 1e-5);
  expect_training_of_one({.dtype = at::kFloat}, true, 1, 1e-5);
}

// "all_reduce 2": what `fn` starts.
template <class Fn>
std::string collectives(Fn&& fn) {
  const CommDebugScope scope;
  fn();
  return scope.describe();
}

void expect_collectives_of_block(bool sequence, const std::string& forward, const std::string& backward) {
  world(2, [&](int) {
    const auto tp = init_device_mesh("cpu", {2});
    const DecoderOptions options{.dtype = at::kFloat};
    DecoderBlock block(options);
    parallelize_module(*block, tp, sequence ? testing::sequence_plan("") : testing::tensor_plan(""));
    distribute_module(*block, tp);
    manual_seed(kSeed, tp);
    const Placements layout{sequence ? Placement(Shard(1)) : Placement(Replicate())};
    const auto input = at::arange(kBatch * options.length * options.width, at::kFloat).sin();
    const auto x =
        distribute_tensor(input.view({kBatch, options.length, options.width}), tp, layout).requires_grad_();
    at::Tensor y;
    EXPECT_EQ(collectives([&] { y = block(x); }), forward);
    EXPECT_EQ(placements(y), layout);
    EXPECT_EQ(collectives([&] {
                y.backward(distribute_tensor(at::ones(y.sizes()), tp, layout, {.src_data_rank = {}}));
              }),
              backward);
    EXPECT_EQ(placements(x.grad()), layout);
  });
}

TEST(Transformer, ABlockReducesTwiceEachWay) {
  expect_collectives_of_block(false, "all_reduce 2", "all_reduce 2");
}
TEST(Transformer, ABlockWithSequencesSplitGathersAndScattersTwiceEachWay) {
  // And what is replicated has a gradient that is a sum over the sequence: two norms, two biases after rows.
  expect_collectives_of_block(true, "all_gather 2, reduce_scatter 2",
                              "all_reduce 6, all_gather 2, reduce_scatter 2");
}

// Around the blocks: the embedding, and of the loss the maximum, the sum, the loss and its weight forward and
// one sum per row backward; the gradient of the head's input. With sequences split also the last norm's two
// gradients and that of the positions, which is gathered.
void expect_collectives_of_step(bool sequence, int layers, const std::string& forward,
                                const std::string& backward) {
  world(2, [&](int) {
    const auto tp = init_device_mesh("cpu", {2});
    const DecoderOptions options{.vocabulary = 11, .layers = layers};
    Decoder model(options);
    testing::split(*model, tp, sequence);
    manual_seed(kSeed, tp);
    const Batch batch(options, 0, 0);
    EXPECT_EQ(placements(model(batch.tokens)), Placements{Shard(2)});
    at::Tensor loss;
    EXPECT_EQ(collectives([&] { loss = model->loss(batch.tokens, batch.targets); }), forward);
    EXPECT_EQ(placements(loss), Placements{Replicate()});
    EXPECT_EQ(collectives([&] { loss.backward(); }), backward);
    EXPECT_EQ(placements(model->words->weight.grad()), Placements{Shard(0)});
  });
}

TEST(Transformer, AStepHasTheCollectivesOfItsBlocksAndNeverGathersTheVocabulary) {
  for (const int layers : {1, 3}) {
    expect_collectives_of_step(false, layers, base::cat("all_reduce ", 5 + 2 * layers),
                               base::cat("all_reduce ", 2 + 2 * layers));
    const auto each = base::cat(1 + 2 * layers);
    expect_collectives_of_step(true, layers,
                               base::cat("all_reduce 4, all_gather ", each, ", reduce_scatter ", each),
                               base::cat("all_reduce ", 3 + 6 * layers, ", all_gather ", each,
                                         ", all_gather_into_tensor 1, reduce_scatter ", each));
  }
}

}  // namespace
}  // namespace lockstep
