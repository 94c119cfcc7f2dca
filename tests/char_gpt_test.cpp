// The model of examples/char_gpt trained by several ranks, against one rank that gets the whole batch: data,
// sampler, model, optimiser and DistributedDataParallel together.
#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cmath>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "examples/char_gpt/model.h"

namespace char_gpt {
namespace {

constexpr std::int64_t kVocabulary = 17;
constexpr std::int64_t kContext = 12;
constexpr std::int64_t kWindows = 192;  // whole batches for 1, 2 and 3 ranks
constexpr std::size_t kBatch = 4;       // of one rank
constexpr std::size_t kSteps = 30;      // into the second epoch

Gpt make_net(bool tie_weights, std::uint64_t seed) {
  torch::manual_seed(seed);
  return Gpt(GptOptions{.vocabulary = kVocabulary,
                        .context = kContext,
                        .width = 16,
                        .heads = 2,
                        .layers = 2,
                        .tie_weights = tie_weights});
}

Windows make_windows() {
  const auto i = torch::arange(kWindows + kContext);
  return Windows(torch::remainder(i * i + 3 * i, kVocabulary), kContext);
}

// Trains and returns the loss of each step, as this rank sees it.
template <class Forward>
at::Tensor train(Gpt net, const Forward& forward, lockstep::DistributedSampler sampler,
                 std::size_t batch_size) {
  auto loader = torch::data::make_data_loader(make_windows().map(torch::data::transforms::Stack<>()), sampler,
                                              batch_size);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(3e-3));
  std::vector<double> losses;
  for (std::size_t epoch = 0; losses.size() < kSteps; ++epoch) {
    sampler.set_epoch(epoch);
    for (const auto& batch : *loader) {
      if (losses.size() == kSteps) break;
      optimizer.zero_grad();
      const auto loss = loss_of(forward(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      losses.push_back(loss.template item<double>());
    }
  }
  return torch::tensor(losses, torch::kDouble);
}

at::Tensor train_alone(Gpt net, int n_ranks) {
  const lockstep::DistributedSampler sampler(kWindows, {.num_replicas = 1, .rank = 0, .seed = 5});
  return train(
      net, [&](const at::Tensor& ids) { return net->forward(ids); }, sampler,
      kBatch * static_cast<std::size_t>(n_ranks));
}

struct Outcome {
  at::Tensor losses;      // mean over the ranks
  at::Tensor parameters;  // the bits of rank r in row r
};

// On a rank of an initialised group.
Outcome train_as_rank(Gpt net) {
  auto model = lockstep::DistributedDataParallel(net, {.gradient_as_bucket_view = true});
  Outcome outcome;
  outcome.losses = train(
      net, [&](const at::Tensor& ids) { return model->forward(ids); },
      lockstep::DistributedSampler(kWindows, {.seed = 5}), kBatch);
  lockstep::all_reduce(outcome.losses, {.op = lockstep::ReduceOp::kAvg});
  std::vector<at::Tensor> flat;
  for (const auto& parameter : net->parameters()) flat.push_back(parameter.detach().flatten());
  const auto mine = torch::cat(flat).view(torch::kInt);
  outcome.parameters = torch::empty({lockstep::get_world_size(), mine.numel()}, torch::kInt);
  lockstep::all_gather_into_tensor(outcome.parameters, mine);
  return outcome;
}

// What is wrong with the outcome of several ranks; empty when nothing is.
std::string problems(const Outcome& outcome, const at::Tensor& losses_alone) {
  std::ostringstream out;
  for (std::int64_t rank = 1; rank < outcome.parameters.size(0); ++rank) {
    const auto n = (outcome.parameters[rank] != outcome.parameters[0]).sum().item<std::int64_t>();
    if (n != 0) out << n << " parameters of rank " << rank << " differ from rank 0's; ";
  }
  const auto distance = (outcome.losses - losses_alone).abs().max().item<double>();
  if (!(distance < 1e-5)) out << "the loss is " << distance << " away from one rank's; ";
  const auto first = losses_alone[0].item<double>(), last = losses_alone[-1].item<double>();
  if (!(last < 0.9 * first)) out << "the loss did not fall: " << first << " -> " << last;
  return out.str();
}

// First in the file: it can fork while the process has run no thread yet.
TEST(CharGptProcesses, EndWithTheSameBitsAndTheLossOfOneRankOnTheWholeBatch) {
  lockstep::spawn(2, [](int rank) {
    at::set_num_threads(1);
    lockstep::init_process_group();
    // Ranks start from different parameters; rank 0's count.
    const auto outcome = train_as_rank(make_net(true, static_cast<std::uint64_t>(1 + rank)));
    const auto wrong = problems(outcome, train_alone(make_net(true, 1), 2));
    if (!wrong.empty()) throw std::runtime_error(wrong);
    lockstep::destroy_process_group();
  });
}

class CharGptRanks : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(CharGptRanks, EndWithTheSameBitsAndTheLossOfOneRankOnTheWholeBatch) {
  const auto [n_ranks, tie_weights] = GetParam();
  at::set_num_threads(1);
  std::vector<Gpt> nets;  // made here: rank threads share the generator
  for (int rank = 0; rank < n_ranks; ++rank) {
    nets.push_back(make_net(tie_weights, static_cast<std::uint64_t>(1 + rank)));
  }
  const auto losses_alone = train_alone(make_net(tie_weights, 1), n_ranks);
  std::vector<Outcome> outcomes(nets.size());
  lockstep::run_threads(n_ranks, [&](int rank) {
    const auto i = static_cast<std::size_t>(rank);
    outcomes[i] = train_as_rank(nets[i]);
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(problems(outcome, losses_alone), "");
}

std::string name_of(const testing::TestParamInfo<std::tuple<int, bool>>& test) {
  const auto [n_ranks, tie_weights] = test.param;
  return std::to_string(n_ranks) + (tie_weights ? "Tied" : "Untied");
}

INSTANTIATE_TEST_SUITE_P(Ranks, CharGptRanks, testing::Combine(testing::Values(2, 3), testing::Bool()),
                         name_of);

TEST(CharGpt, SharesOneParameterBetweenBothEndsWhenTied) {
  const auto untied = make_net(false, 1), tied = make_net(true, 1);
  EXPECT_EQ(untied->parameters().size(), tied->parameters().size() + 1);
}

TEST(CharGpt, SeesNoCharacterThatIsYetToCome) {
  auto net = make_net(true, 1);
  auto ids = torch::arange(kContext).unsqueeze(0);
  const auto before = net->forward(ids).slice(1, 0, 6);
  ids = ids.clone();
  ids[0][6] = kVocabulary - 1;
  EXPECT_TRUE(torch::equal(net->forward(ids).slice(1, 0, 6), before));
  EXPECT_FALSE(
      torch::allclose(net->forward(ids)[0][6], net->forward(torch::arange(kContext).unsqueeze(0))[0][6]));
}

}  // namespace
}  // namespace char_gpt
