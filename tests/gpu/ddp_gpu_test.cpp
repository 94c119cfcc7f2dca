// DistributedDataParallel on CUDA: twenty steps of n ranks on their parts of a batch against one process on all of it,
// on the same GPU.
#include <functional>
#include <vector>

#include "tests/gpu/gpu_testing.h"

namespace lockstep {
namespace {

using namespace gpu_testing;

constexpr int kSteps = 20;
constexpr std::int64_t kPart = 4, kIn = 24, kWide = 96, kOut = 7;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool normalises = false) {
    first = register_module("first", torch::nn::Linear(kIn, kWide));
    second = register_module("second", torch::nn::Linear(kWide, kWide));
    last = register_module("last", torch::nn::Linear(kWide, kOut));
    // Its weight is larger than a bucket of the tests and is reduced in place.
    wide = register_module("wide", torch::nn::Linear(torch::nn::LinearOptions(kWide, kWide).bias(false)));
    if (normalises) norm = register_module("norm", torch::nn::BatchNorm1d(kWide));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = torch::tanh(first(x));
    if (norm) y = norm(y);
    y = torch::tanh(second(y));
    if (uses_wide) y = y + torch::tanh(wide(y));
    return last(y);
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr}, wide{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  bool uses_wide = true;
};
TORCH_MODULE(Net);

at::Tensor drawn(std::int64_t seed, at::IntArrayRef sizes) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return torch::randn(sizes, generator, torch::kFloat).to(gpu());
}

std::shared_ptr<NetImpl> make_net(std::int64_t seed, bool normalises = false) {
  auto net = std::make_shared<NetImpl>(normalises);
  net->to(gpu());
  torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters())
    if (parameter.dim() > 1)
      parameter.copy_(drawn(++seed, parameter.sizes()) * 0.2);
    else
      parameter.zero_();
  if (normalises) net->norm->weight.data().fill_(1);
  return net;
}

at::Tensor batch(int step, int n) {
  return drawn(1000 + step, {n * kPart, kIn});
}
at::Tensor target(int step, int n) {
  return drawn(2000 + step, {n * kPart, kOut});
}
at::Tensor part(const at::Tensor& all, int rank) {
  return all.narrow(0, rank * kPart, kPart);
}

using Parameters = std::vector<at::Tensor>;

Parameters train_alone(int n, const std::function<void(NetImpl&, int step)>& change = nullptr,
                       bool normalises = false) {
  const auto net = make_net(1, normalises);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    if (change) change(*net, step);
    sgd.zero_grad();
    torch::mse_loss(net->forward(batch(step, n)), target(step, n)).backward();
    sgd.step();
  }
  return net->parameters();
}

class DdpGpu : public GpuTest {
 protected:
  // Trains under `options` and returns the parameters. `prepare` sees the model before the first step.
  template <class Prepare>
  static Parameters train(DdpOptions options, Prepare prepare,
                          const std::function<void(NetImpl&, int step)>& change = nullptr,
                          bool normalises = false) {
    const auto net = make_net(rank() == 0 ? 1 : 77, normalises);  // rank 0's values win
    auto model = DistributedDataParallel(net, std::move(options));
    prepare(model);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      if (change) change(*net, step);
      sgd.zero_grad();
      const auto output = model->forward(part(batch(step, size()), rank())).to(at::kFloat);
      torch::mse_loss(output, part(target(step, size()), rank())).backward();
      sgd.step();
    }
    return net->parameters();
  }
  static Parameters train(DdpOptions options) {
    return train(std::move(options), [](auto&) {});
  }

  static void expect_close(const Parameters& actual, const Parameters& expected, double tolerance = 1e-4) {
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      const auto difference = (actual[i] - expected[i]).abs().max().item<double>();
      EXPECT_LT(difference, tolerance) << "parameter " << i;
    }
  }
  static void expect_same_bits_everywhere(const Parameters& parameters) {
    for (const auto& parameter : parameters) {
      auto first = parameter.detach().clone();
      broadcast(first, {.src = 0});
      EXPECT_TRUE(torch::equal(first, parameter.detach()));
    }
  }
};

TEST_F(DdpGpu, TrainsLikeOneProcess) {
  const auto expected = train_alone(size());
  for (const bool views : {false, true}) {
    for (const std::size_t in_place : {std::size_t{1024}, SIZE_MAX}) {
      const auto actual =
          train({.bucket_cap_mb = 0.01, .gradient_as_bucket_view = views, .in_place_bytes = in_place});
      expect_close(actual, expected);
      expect_same_bits_everywhere(actual);
    }
  }
}

TEST_F(DdpGpu, TrainsLikeOneProcessWithEveryWayToFindReadyGradients) {
  const auto sometimes = [](NetImpl& net, int step) { net.uses_wide = step % 3 != 0; };
  expect_close(train({.bucket_cap_mb = 0.01, .static_graph = true}), train_alone(size()));
  expect_close(train(
                   {.bucket_cap_mb = 0.01, .find_unused_parameters = true}, [](auto&) {}, sometimes),
               train_alone(size(), sometimes));
}

TEST_F(DdpGpu, GradientsAccumulateInsideNoSync) {
  const auto net = make_net(1), alone = make_net(1);
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.01});
  const int n = size();
  for (int step = 0; step < 3; ++step) {
    {
      const auto guard = model->no_sync();
      torch::mse_loss(model->forward(part(batch(2 * step, n), rank())), part(target(2 * step, n), rank()))
          .backward();
    }
    torch::mse_loss(model->forward(part(batch(2 * step + 1, n), rank())),
                    part(target(2 * step + 1, n), rank()))
        .backward();
    for (const int k : {2 * step, 2 * step + 1})
      torch::mse_loss(alone->forward(batch(k, n)), target(k, n)).backward();
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-3, 1e-5)) << i;
}

TEST_F(DdpGpu, ForwardMovesItsArgumentsToTheDevice) {
  const auto net = make_net(1);
  auto model = DistributedDataParallel(net, {.device_ids = {static_cast<int>(gpu().index())}});
  const auto output = model->forward(torch::zeros({kPart, kIn}));
  EXPECT_EQ(output.device(), gpu());
}

TEST_F(DdpGpu, BuffersOfRankZeroAreEverybodys) {
  const auto net = make_net(1, true);
  auto model = DistributedDataParallel(net, {});
  net->norm->running_mean.fill_(rank());
  model->forward(part(batch(0, size()), rank()));
  // The statistics of this rank's batch are added after rank 0's values came, which are 0.
  auto mine = net->norm->running_mean.clone();
  EXPECT_LT(mine.abs().max().item<double>(), 0.9);
}

TEST_F(DdpGpu, SyncBatchNormIsBatchNormOfTheWholeBatch) {
  struct SynchronisedImpl : torch::nn::Module {
    SynchronisedImpl() {
      linear = register_module("linear", torch::nn::Linear(kIn, kWide));
      norm = register_module("norm", SyncBatchNorm(kWide));
    }
    at::Tensor forward(const at::Tensor& x) { return norm->forward(linear(x)); }
    torch::nn::Linear linear{nullptr};
    SyncBatchNorm norm{nullptr};
  };
  const int n = size();
  auto net = std::make_shared<SynchronisedImpl>();
  net->to(gpu());
  torch::nn::Linear linear(kIn, kWide);
  torch::nn::BatchNorm1d norm(kWide);
  linear->to(gpu());
  norm->to(gpu());
  {
    torch::NoGradGuard no_grad;
    linear->weight.copy_(drawn(5, linear->weight.sizes()));
    linear->bias.zero_();
    net->linear->weight.copy_(linear->weight);
    net->linear->bias.zero_();
  }
  auto model = DistributedDataParallel(net, {});
  const auto x = batch(0, n);
  const auto y = model->forward(part(x, rank()));
  const auto expected = norm(linear(x));
  EXPECT_TRUE(torch::allclose(y, part(expected, rank()), 1e-4, 1e-4));
  const auto weights = drawn(9, {n * kPart, kWide});
  (y * part(weights, rank())).sum().backward();
  (expected * weights).sum().backward();
  EXPECT_TRUE(torch::allclose(net->linear->weight.grad() * n, linear->weight.grad(), 1e-3, 1e-3));
}

TEST_F(DdpGpu, HooksAndMixedPrecisionTrainAlmostLikeOneProcess) {
  const auto expected = train_alone(size());
  const auto with = [&](const char* what, CommHook hook, double tolerance) {
    SCOPED_TRACE(what);
    const auto actual = train({.bucket_cap_mb = 0.01}, [&](auto& model) { model->register_comm_hook(hook); });
    expect_close(actual, expected, tolerance);
    expect_same_bits_everywhere(actual);
  };
  with("allreduce", allreduce_hook(), 1e-4);
  with("fp16", fp16_compress_hook(), 5e-2);
  with("bf16", bf16_compress_hook(), 2e-1);
  const auto mixed =
      train({.bucket_cap_mb = 0.01, .mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
  expect_same_bits_everywhere(mixed);
  expect_close(mixed, expected, 3e-1);
}

TEST_F(DdpGpu, RanksThatExhaustTheirInputParticipateWithZeros) {
  const auto net = make_net(1);
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.01});
  torch::optim::SGD sgd(net->parameters(), 0.05);
  join({*model}, [&] {
    for (int step = 0; step < 2 + rank(); ++step) {
      sgd.zero_grad();
      torch::mse_loss(model->forward(part(batch(step, size()), rank())), part(target(step, size()), rank()))
          .backward();
      sgd.step();
    }
  });
  expect_same_bits_everywhere(net->parameters());
}

TEST_F(DdpGpu, ZeroTrainsLikeAnOrdinaryOptimizer) {
  const auto net = make_net(1), plain = make_net(1);
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.01});
  auto zero = ZeroRedundancyOptimizer<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.01));
  torch::optim::Adam adam(plain->parameters(), torch::optim::AdamOptions(0.01));
  const int n = size();
  for (int step = 0; step < 10; ++step) {
    zero.zero_grad();
    adam.zero_grad();
    torch::mse_loss(model->forward(part(batch(step, n), rank())), part(target(step, n), rank())).backward();
    torch::mse_loss(plain->forward(batch(step, n)), target(step, n)).backward();
    zero.step();
    adam.step();
  }
  expect_close(net->parameters(), plain->parameters(), 2e-3);
  expect_same_bits_everywhere(net->parameters());
}

// Gradients that a slow kernel is still computing when their hook runs: the reduction must come after it.
TEST_F(DdpGpu, ReductionsComeAfterTheKernelsThatComputeTheGradients) {
  const auto net = make_net(1), alone = make_net(1);
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.01});
  const c10::StreamGuard guard(side_stream());
  for (int step = 0; step < 5; ++step) {
    net->zero_grad();
    alone->zero_grad();
    delay(5);
    torch::mse_loss(model->forward(part(batch(step, size()), rank())), part(target(step, size()), rank()))
        .backward();
    torch::mse_loss(alone->forward(batch(step, size())), target(step, size())).backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-3, 1e-5))
          << i;
  }
}

TEST_F(DdpGpu, ShardedLinearLayersTrainOnTheGpu) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  const auto mesh = init_device_mesh("cuda", {size()});
  const auto whole = drawn(3, {8, size() * 4});
  const auto sharded = distribute_tensor(whole, mesh, {Shard(1)});
  const auto x = drawn(4, {5, 8});
  const auto y = torch::matmul(distribute_tensor(x, mesh, {Replicate()}), sharded);
  EXPECT_TRUE(torch::allclose(full_tensor(y), torch::matmul(x, whole), 1e-4, 1e-4));
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::gpu_testing::run_all(argc, argv);
}
