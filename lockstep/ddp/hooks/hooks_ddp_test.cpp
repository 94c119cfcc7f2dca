// Training with hooks: every registered type, many buckets, delays, buckets that are left out.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>
#include <thread>

#include "lockstep/ddp/ddp_testing.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace ddp_testing;
using lockstep::testing::world;

constexpr double kManyBuckets = 0.0002;  // MiB: a bucket or two per layer

using Register = std::function<void(DdpCore&)>;

Trained train_with(int rank, int n, const DdpOptions& options, const Register& add_hook) {
  Mlp net;
  fill_parameters(*net, 1);
  auto model = DistributedDataParallel(net, options);
  add_hook(*model);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    const at::Tensor x = batch_input(step, n).narrow(0, rank * kBatch, kBatch);
    const at::Tensor y = batch_target(step, n).narrow(0, rank * kBatch, kBatch);
    const at::Tensor loss = loss_of(model->forward(x), y);
    loss.backward();
    sgd.step();
    result.losses.push_back(loss.item<double>());
  }
  result.parameters = model->parameters();
  return result;
}

struct Registered {
  const char* name;
  DdpCommHookType type;
  double tolerance;
};
std::ostream& operator<<(std::ostream& out, const Registered& r) {
  return out << r.name;
}

class RegisteredHooks : public ::testing::TestWithParam<Registered> {};
INSTANTIATE_TEST_SUITE_P(
    Types, RegisteredHooks,
    ::testing::Values(Registered{"AllReduce", DdpCommHookType::kAllReduce, 1e-5},
                      Registered{"Fp16Compress", DdpCommHookType::kFp16Compress, 2e-3},
                      Registered{"Bf16Compress", DdpCommHookType::kBf16Compress, 2e-2},
                      Registered{"QuantizePerTensor", DdpCommHookType::kQuantizePerTensor, 2e-2},
                      Registered{"QuantizePerChannel", DdpCommHookType::kQuantizePerChannel, 2e-2},
                      Registered{"PowerSgd", DdpCommHookType::kPowerSgd, 1e-5},
                      Registered{"PowerSgdRank2", DdpCommHookType::kPowerSgdRank2, 1e-5},
                      Registered{"BatchedPowerSgd", DdpCommHookType::kBatchedPowerSgd, 1e-5},
                      Registered{"BatchedPowerSgdRank2", DdpCommHookType::kBatchedPowerSgdRank2, 1e-5}),
    [](const auto& each) { return std::string(each.param.name); });

// PowerSGD averages during its first thousand steps.
TEST_P(RegisteredHooks, TrainLikeOneProcess) {
  for (const int n : {2, 3}) {
    const Trained alone = train_alone<MlpImpl>(n);
    for (const bool views : {false, true}) {
      PerRank<std::vector<at::Tensor>> parameters;
      world(n, [&](int rank) {
        const Trained trained =
            train_with(rank, n, {.bucket_cap_mb = kManyBuckets, .gradient_as_bucket_view = views},
                       [&](DdpCore& model) { register_ddp_comm_hook(GetParam().type, model); });
        parameters.put(rank, trained.parameters);
      });
      expect_same_bits(parameters);
      const auto& trained = parameters.values().at(0);
      for (std::size_t i = 0; i < trained.size(); ++i) {
        EXPECT_LE((trained[i] - alone.parameters[i]).abs().max().item<double>(), GetParam().tolerance) << i;
      }
    }
  }
}

TEST(RegisterHook, NoopLetsTheRanksPartWays) {
  PerRank<std::vector<at::Tensor>> parameters;
  world(2, [&](int rank) {
    const Trained trained = train_with(
        rank, 2, {}, [](DdpCore& model) { register_ddp_comm_hook(DdpCommHookType::kNoop, model); });
    parameters.put(rank, trained.parameters);
  });
  EXPECT_FALSE(torch::equal(parameters.values().at(0)[0], parameters.values().at(1)[0]));
}

TEST(RegisterHook, UsesTheModelsGroup) {
  world(3, [](int rank) {
    const Group pair = new_group({0, 1});
    if (rank == 2) return;
    const std::uint64_t before = default_group()->sequence_number();
    const auto trained = train_with(rank, 2, {.group = pair}, [](DdpCore& model) {
      register_ddp_comm_hook(DdpCommHookType::kFp16Compress, model);
    });
    EXPECT_EQ(default_group()->sequence_number(), before);
    for (const auto& parameter : trained.parameters) EXPECT_TRUE(parameter.isfinite().all().item<bool>());
  });
}

TEST(RegisterHook, RefusesATypeThatDoesNotExist) {
  world(1, [](int) { EXPECT_THROW(make_comm_hook(static_cast<DdpCommHookType>(99)), Error); });
}

// Every rank sleeps at other places, so that exchanges end at other times on each.
void train_power_sgd(int rank, int n, const DdpOptions& options, const CommHook& hook, PowerSGDState& state) {
  Mlp net;
  fill_parameters(*net, 1);
  auto model = DistributedDataParallel(net, options);
  model->register_comm_hook(hook);
  std::mt19937 random(static_cast<unsigned>(90 + rank));
  for (const auto& parameter : net->parameters()) {
    parameter.register_hook([&random](const at::Tensor&) {
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    });
  }
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.3));
  constexpr int kManySteps = 40;
  at::Tensor losses = torch::zeros({kManySteps});
  for (int step = 0; step < kManySteps; ++step) {
    sgd.zero_grad();
    const at::Tensor x = batch_input(0, n).narrow(0, rank * kBatch, kBatch);
    const at::Tensor y = batch_target(0, n).narrow(0, rank * kBatch, kBatch);
    const at::Tensor loss = loss_of(model->forward(x), y);
    loss.backward();
    sgd.step();
    losses[step] = loss.detach();
  }
  all_reduce(losses);
  EXPECT_LT(losses[-1].item<float>(), 0.8 * losses[0].item<float>()) << "it learns";
  EXPECT_EQ(state.iter(), kManySteps);
  EXPECT_GT(state.compression_stats().compress_rate, 1.5);
  const at::Tensor mine = torch::nn::utils::parameters_to_vector(net->parameters()).detach();
  at::Tensor all = torch::empty({n, mine.numel()});
  all_gather_into_tensor(all, mine);
  for (int r = 1; r < n; ++r) EXPECT_TRUE(torch::equal(all[r], all[0])) << "rank " << r;
}

TEST(PowerSgdTraining, KeepsRanksEqualWithManyBucketsUnderDelays) {
  for (const int n : {2, 3}) {
    for (const bool views : {false, true}) {
      world(n, [&](int rank) {
        const auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{.start_powerSGD_iter = 2});
        train_power_sgd(rank, n, {.bucket_cap_mb = kManyBuckets, .gradient_as_bucket_view = views},
                        powerSGD_hook(state), *state);
      });
    }
  }
}

TEST(PowerSgdTraining, WorksBatchedWrappedAndWithTheSearchForUnusedParameters) {
  world(2, [&](int rank) {
    const auto make = [] {
      return std::make_shared<PowerSGDState>(
          PowerSGDOptions{.start_powerSGD_iter = 2, .batch_tensors_with_same_shape = true});
    };
    const DdpOptions searching{.bucket_cap_mb = kManyBuckets, .find_unused_parameters = true};
    auto state = make();
    train_power_sgd(rank, 2, searching, powerSGD_hook(state), *state);
    state = make();
    train_power_sgd(rank, 2, {.bucket_cap_mb = kManyBuckets}, batched_powerSGD_hook(state), *state);
    state = make();
    train_power_sgd(rank, 2, {.bucket_cap_mb = kManyBuckets, .static_graph = true},
                    bf16_compress_wrapper(powerSGD_hook(state)), *state);
  });
}

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    for (int i = 0; i < 3; ++i)
      layers.push_back(register_module(base::cat("layer", i),
                                       torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false))));
  }
  at::Tensor forward(at::Tensor x, unsigned mask) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if ((mask >> i & 1) != 0) x = torch::tanh(layers[i](x));
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

// The last bucket of a step is the last one that is not left out: a hook that counts steps or ends them there
// relies on it.
TEST(SkippedBuckets, DoNotHideWhichBucketIsTheLast) {
  world(2, [](int rank) {
    auto net = std::make_shared<LayersImpl>();
    fill_parameters(*net, 3);
    auto model = DistributedDataParallel(net, {.bucket_cap_mb = kManyBuckets,
                                               .find_unused_parameters = true,
                                               .skip_all_reduce_unused_params = true});
    const auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{.start_powerSGD_iter = 2});
    model->register_comm_hook(powerSGD_hook(state));
    const unsigned masks[] = {0b111, 0b111, 0b111, 0b110, 0b011, 0b001, 0b100, 0b101};
    for (int step = 0; step < 8; ++step) {
      model->zero_grad(true);
      model->forward(drawn(static_cast<std::uint64_t>(10 * step + rank), {2, 8}), masks[step])
          .sum()
          .backward();
      EXPECT_EQ(state->iter(), step + 1);
    }
  });
}

}  // namespace
}  // namespace lockstep
