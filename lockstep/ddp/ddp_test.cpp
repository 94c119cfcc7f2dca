// What training with DistributedDataParallel computes, against one process on the whole batch.
#include "lockstep/ddp/ddp.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp_testing.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

std::vector<at::Tensor> gradients(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : module.parameters()) result.push_back(parameter.grad().clone());
  return result;
}

// Trains on n rank threads; the parameters must have the same bits everywhere. Losses are averaged over the
// ranks.
template <class Impl>
Trained train_wrapped(int n, DdpOptions options, bool set_to_none) {
  PerRank<std::vector<at::Tensor>> parameters;
  PerRank<std::vector<double>> losses;
  run_threads(n, [&](int rank) {
    const Trained mine = train_rank<Impl>(rank, n, options, set_to_none);
    parameters.put(rank, mine.parameters);
    losses.put(rank, mine.losses);
  });
  expect_same_bits(parameters);
  Trained result{parameters.values().at(0), std::vector<double>(kSteps, 0.0)};
  for (const auto& [rank, mine] : losses.values()) {
    for (std::size_t step = 0; step < mine.size(); ++step) result.losses[step] += mine[step] / n;
  }
  return result;
}

void expect_same_training(const Trained& a, const Trained& b) {
  expect_close(a.parameters, b.parameters);
  for (std::size_t step = 0; step < a.losses.size(); ++step)
    EXPECT_NEAR(a.losses[step], b.losses[step], 1e-5);
}

class TrainsLikeOneProcess : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};

TEST_P(TrainsLikeOneProcess, WithAnMlp) {
  const auto [n, views, set_to_none] = GetParam();
  // A tiny cap: several buckets after the rebuild.
  expect_same_training(
      train_wrapped<MlpImpl>(n, {.bucket_cap_mb = 0.0002, .gradient_as_bucket_view = views}, set_to_none),
      train_alone<MlpImpl>(n));
}

TEST_P(TrainsLikeOneProcess, WithTiedWeights) {
  const auto [n, views, set_to_none] = GetParam();
  expect_same_training(train_wrapped<TiedImpl>(n, {.gradient_as_bucket_view = views}, set_to_none),
                       train_alone<TiedImpl>(n));
}

INSTANTIATE_TEST_SUITE_P(Ddp, TrainsLikeOneProcess,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool(),
                                            ::testing::Bool()));

TEST(Ddp, IsAModuleThatNamesItsChildModule) {
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(Mlp());
    const auto names = model->named_parameters().keys();
    EXPECT_EQ(names.front(), "module.first.weight");
    EXPECT_EQ(names.size(), 5U);
    const auto stripped = strip_prefix(model->named_parameters());
    EXPECT_EQ(stripped.keys(), model->module()->named_parameters().keys());
    EXPECT_TRUE(stripped["last.weight"].is_same(model->module()->last->weight));
    std::shared_ptr<torch::nn::Module> as_module = model.ptr();
    as_module->eval();
    EXPECT_FALSE(model->module()->first->is_training());
  });
}

struct TwoArguments : torch::nn::Module {
  TwoArguments() { weight = register_parameter("weight", torch::ones({2})); }
  std::tuple<at::Tensor, int> forward(const at::Tensor& x, int scale) { return {x * weight * scale, scale}; }
  at::Tensor weight;
};

TEST(Ddp, KeepsTheForwardOfItsModule) {
  run_threads(2, [](int rank) {
    auto model = DistributedDataParallel(std::make_shared<TwoArguments>());
    auto [y, scale] = model->forward(torch::ones({2}), 3 + rank);
    EXPECT_EQ(scale, 3 + rank);
    y.sum().backward();
    EXPECT_TRUE(torch::equal(model->module()->weight.grad(), torch::full({2}, 3.5)));

    auto sequential = DistributedDataParallel(
        torch::nn::Sequential(torch::nn::Linear(kIn, 4), torch::nn::ReLU(), torch::nn::Linear(4, kOut)));
    const at::Tensor out = sequential->forward(torch::ones({2, kIn}));
    EXPECT_EQ(out.size(1), kOut);
    auto linear = DistributedDataParallel(torch::nn::Linear(2, 2), {.bucket_cap_mb = 25});
    EXPECT_EQ(linear(torch::ones({1, 2})).size(1), 2);
    DistributedDataParallel<torch::nn::LinearImpl> later = nullptr;
    EXPECT_TRUE(later.is_empty());
    later = linear;
    EXPECT_EQ(later.ptr(), linear.ptr());
  });
}

// Accumulates over `micro` local passes and one synced pass; the result must be the average of the sums.
void check_accumulation(bool views) {
  constexpr int kRanks = 2;
  std::vector<at::Tensor> expected;
  {
    Mlp alone;
    fill_parameters(*alone, 1);
    for (int pass = 0; pass < 3; ++pass) {
      for (int rank = 0; rank < kRanks; ++rank) {
        const at::Tensor x = batch_input(pass, kRanks).narrow(0, rank * kBatch, kBatch);
        (alone(x).pow(2).sum() / kRanks).backward();
      }
    }
    expected = gradients(*alone);
  }
  run_threads(kRanks, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net, {.gradient_as_bucket_view = views});
    for (int round = 0; round < 3; ++round) {  // also after the buckets were rebuilt
      model->zero_grad();
      const auto pass_loss = [&](int pass) {
        return model->forward(batch_input(pass, kRanks).narrow(0, rank * kBatch, kBatch)).pow(2).sum();
      };
      for (int pass = 0; pass < 2; ++pass) {
        const auto guard = model->no_sync();
        pass_loss(pass).backward();
      }
      EXPECT_FALSE(torch::allclose(model->parameters()[0].grad(), expected[0]));
      pass_loss(2).backward();
      expect_close(gradients(*model), expected);
    }
    EXPECT_EQ(model->stats().n_reductions, 3U);
  });
}

TEST(Ddp, NoSyncAccumulatesAndTheNextSyncedBackwardAverages) {
  check_accumulation(false);
}
TEST(Ddp, NoSyncAccumulatesWithBucketViewsToo) {
  check_accumulation(true);
}

struct BufferedImpl : torch::nn::Module {
  BufferedImpl() {
    weight = register_parameter("weight", torch::ones({2}));
    count = register_buffer("count", torch::zeros({1}, torch::kLong));
    mean = register_buffer("mean", torch::zeros({3}));
  }
  at::Tensor forward(const at::Tensor& x) { return (x * weight).sum(); }
  at::Tensor weight, count, mean;
};

TEST(Ddp, TakesTheBuffersOfRankZeroBeforeSyncedForwards) {
  run_threads(3, [](int rank) {
    auto net = std::make_shared<BufferedImpl>();
    net->count.fill_(rank);
    net->mean.fill_(rank + 0.5);
    auto model = DistributedDataParallel(net);
    const auto spoil = [&] {
      net->count.fill_(10 + rank);
      net->mean.fill_(10 + rank);
    };
    const auto as_of = [&](int r) {
      return net->count.item<std::int64_t>() == 10 + r && torch::equal(net->mean, torch::full({3}, 10.0 + r));
    };
    EXPECT_EQ(net->count.item<std::int64_t>(), 0);
    EXPECT_TRUE(torch::equal(net->mean, torch::full({3}, 0.5)));
    const at::Tensor x = torch::ones({2});
    spoil();
    model->forward(x).backward();
    EXPECT_TRUE(as_of(0));
    {
      const torch::NoGradGuard no_grad;
      model->forward(x);
    }
    spoil();
    model->forward(x).backward();  // right after a pass without gradients
    EXPECT_TRUE(as_of(rank));
    model->forward(x).backward();
    EXPECT_TRUE(as_of(0));
    {
      const auto guard = model->no_sync();
      model->forward(x).backward();
    }
    spoil();
    model->forward(x).backward();  // right after no_sync
    EXPECT_TRUE(as_of(rank));
  });
}

TEST(Ddp, DoesNotSyncBuffersWhenDisabled) {
  run_threads(2, [](int rank) {
    auto net = std::make_shared<BufferedImpl>();
    net->count.fill_(rank);
    auto model = DistributedDataParallel(net, {.broadcast_buffers = false});
    model->forward(torch::ones({2})).backward();
    EXPECT_EQ(net->count.item<std::int64_t>(), rank);
  });
}

TEST(Ddp, SendsParametersLargerThanOneChunk) {
  run_threads(2, [](int rank) {
    struct Large : torch::nn::Module {
      Large() {
        small = register_parameter("small", torch::empty({3}));
        large = register_parameter("large", torch::empty({10 * 1024 * 1024}));
        frozen = register_parameter("frozen", torch::empty({5}), /*requires_grad=*/false);
        turned = register_parameter("turned", torch::empty({5, 7}).t());
      }
      at::Tensor forward() { return small.sum() + large[0] + turned.sum(); }
      at::Tensor small, large, frozen, turned;
    };
    auto net = std::make_shared<Large>();
    {
      const torch::NoGradGuard no_grad;
      for (auto& p : net->parameters()) {
        p.copy_(torch::arange(p.numel()).view(p.sizes()));
        if (rank != 0) p.neg_();
      }
    }
    auto model = DistributedDataParallel(net);
    for (const auto& p : net->parameters()) {
      EXPECT_TRUE(torch::equal(p, torch::arange(p.numel()).view(p.sizes()).to(torch::kFloat)));
    }
  });
}

TEST(Ddp, TrustsTheCallerWithoutInitSync) {
  run_threads(2, [](int rank) {
    Mlp net;
    fill_parameters(*net, static_cast<std::uint64_t>(rank));
    const at::Tensor before = net->first->weight.detach().clone();
    auto model = DistributedDataParallel(net, {.init_sync = false});
    EXPECT_TRUE(torch::equal(net->first->weight, before));
  });
}

TEST(Ddp, LeavesIgnoredNamesAlone) {
  run_threads(2, [](int rank) {
    Mlp net;
    fill_parameters(*net, static_cast<std::uint64_t>(rank));
    const at::Tensor before = net->second->weight.detach().clone();
    auto model = DistributedDataParallel(net, {.ignored = {"second.weight"}});
    EXPECT_TRUE(torch::equal(net->second->weight, before));
    EXPECT_EQ(model->stats().bucket_bytes.front(), (kIn * 8 + 8 + 8 + 8 * kOut) * sizeof(float));
    model->forward(drawn(static_cast<std::uint64_t>(rank), {2, kIn})).sum().backward();
    model->check_reducer_finalized();
    // Local: ranks hold different values, so an average would be equal and this is not.
    at::Tensor sum = net->second->weight.grad().clone();
    all_reduce(sum, {.op = ReduceOp::kAvg});
    EXPECT_FALSE(torch::allclose(sum, net->second->weight.grad()));
  });
}

TEST(Ddp, PreparesNothingWithoutGradients) {
  run_threads(2, [](int rank) {
    auto model = DistributedDataParallel(Mlp(), {.broadcast_buffers = false});
    const torch::NoGradGuard no_grad;
    if (rank == 0) {  // one rank alone: nothing collective happens
      const at::Tensor x = torch::ones({2, kIn});
      EXPECT_TRUE(torch::equal(model->forward(x), model->module()->forward(x)));
      EXPECT_FALSE(model->forward(x).requires_grad());
    }
    EXPECT_EQ(model->stats().n_reductions, 0U);
  });
}

TEST(Ddp, AllowsSeveralForwardsBeforeTheBackwards) {
  run_threads(2, [](int rank) {
    struct Scale : torch::nn::Module {
      Scale() { w = register_parameter("w", torch::ones({1})); }
      at::Tensor forward(double s) { return w.sum() * s; }
      at::Tensor w;
    };
    auto model = DistributedDataParallel(std::make_shared<Scale>());
    const double mine = rank == 0 ? 1 : 3;  // average 2
    for (int round = 0; round < 2; ++round) {
      model->zero_grad();
      const at::Tensor sum = model->forward(mine) + model->forward(10 * mine);
      sum.backward();
      EXPECT_EQ(model->module()->w.grad().item<float>(), 22.0F);

      model->zero_grad();
      const at::Tensor one = model->forward(mine);
      const at::Tensor two = model->forward(10 * mine);
      one.backward();
      EXPECT_EQ(model->module()->w.grad().item<float>(), 2.0F);
      two.backward();
      EXPECT_EQ(model->module()->w.grad().item<float>(), 22.0F);
    }
    // No forward: local, as in torch.
    model->zero_grad();
    (model->module()->w * mine).sum().backward();
    EXPECT_EQ(model->module()->w.grad().item<float>(), static_cast<float>(mine));
    model->check_reducer_finalized();
  });
}

TEST(Ddp, DoesNotAverageWhatAutogradGradReturns) {
  run_threads(2, [](int rank) {
    struct Cube : torch::nn::Module {
      Cube() { w = register_parameter("w", torch::full({1}, 2.0)); }
      at::Tensor forward(double s) { return w.pow(3).sum() * s; }
      at::Tensor w;
    };
    auto model = DistributedDataParallel(std::make_shared<Cube>());
    const at::Tensor w = model->module()->w;
    const double mine = rank + 1;
    const at::Tensor y = model->forward(mine);
    const at::Tensor slope = torch::autograd::grad({y}, {w}, {}, true, /*create_graph=*/true)[0];
    EXPECT_EQ(slope.item<float>(), 12 * static_cast<float>(mine));
    slope.backward();  // second derivative: 6 w s, averaged over s = 1, 2
    EXPECT_EQ(w.grad().item<float>(), 18.0F);
  });
}

TEST(Ddp, LeavesNoHookBehind) {
  run_threads(2, [](int rank) {
    Mlp net;
    { auto model = DistributedDataParallel(net); }
    net->forward(drawn(static_cast<std::uint64_t>(rank), {2, kIn})).sum().backward();
    const at::Tensor mine = net->first->weight.grad().clone();
    all_reduce(mine, {.op = ReduceOp::kAvg});
    EXPECT_FALSE(torch::allclose(mine, net->first->weight.grad()));
    auto again = DistributedDataParallel(net);  // wrapping anew works
    again->zero_grad();
    again->forward(torch::ones({2, kIn})).sum().backward();
    again->check_reducer_finalized();
  });
}

}  // namespace
}  // namespace lockstep
