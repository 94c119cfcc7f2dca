// DistributedDataParallel on uneven inputs.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/ddp_testing.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/in_backward.h"
#include "lockstep/optim/zero_redundancy_optimizer.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

// y = w * x, so that the gradient of sum(y) is x.
struct ScaleImpl : torch::nn::Module {
  ScaleImpl() {
    weight = register_parameter("weight", torch::ones({1}));
    seen = register_buffer("seen", torch::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen += 1;
    return weight * x;
  }
  at::Tensor weight, seen;
};
TORCH_MODULE(Scale);

struct Divisor {
  bool initial;
  double alone;  // what rank 1's gradient of 2 becomes once rank 0 has joined
};
class JoinDivisor : public ::testing::TestWithParam<Divisor> {};
INSTANTIATE_TEST_SUITE_P(Both, JoinDivisor, ::testing::Values(Divisor{true, 1.0}, Divisor{false, 2.0}));

TEST_P(JoinDivisor, GradientsAreDividedByAllRanksOrByThoseWithInput) {
  run_threads(2, [&](int rank) {
    Scale net;
    auto model = DistributedDataParallel(net);
    std::vector<double> gradients;
    join({*model},
         [&] {
           for (int i = 0; i < 1 + rank; ++i) {
             model->zero_grad();
             model->forward(torch::full({1}, rank + 1.0)).sum().backward();
             gradients.push_back(net->weight.grad().item<double>());
           }
         },
         {.divide_by_initial_world_size = GetParam().initial});
    EXPECT_EQ(gradients.front(), 1.5);
    if (rank == 1) {
      EXPECT_EQ(gradients.back(), GetParam().alone);
    }
    // The averages are handed back to the rank without input, too.
    EXPECT_EQ(net->weight.grad().item<double>(), GetParam().alone);
    // And the next step, outside, is an ordinary one.
    model->zero_grad();
    model->forward(torch::full({1}, rank + 1.0)).sum().backward();
    EXPECT_EQ(net->weight.grad().item<double>(), 1.5);
  });
}

struct JoinWay {
  bool views = false, find_unused = false, static_graph = false;
  std::optional<double> cap_mb{};
};
std::ostream& operator<<(std::ostream& out, const JoinWay& way) {
  return out << (way.views ? "Views" : "Copies") << (way.find_unused ? "FindUnused" : "")
             << (way.static_graph ? "Static" : "") << (way.cap_mb ? "SmallBuckets" : "");
}

// As join does it, in one process: who has no input adds nothing to the sum.
std::vector<at::Tensor> trained_alone(const std::vector<int>& n_batches, bool initial) {
  MlpImpl model;
  fill_parameters(model, 1);
  torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < *std::max_element(n_batches.begin(), n_batches.end()); ++step) {
    at::Tensor loss = torch::zeros({});
    double n_active = 0;
    for (std::size_t rank = 0; rank < n_batches.size(); ++rank) {
      if (step >= n_batches[rank]) continue;
      ++n_active;
      loss = loss + model.forward(input_of(step, static_cast<int>(rank))).square().mean();
    }
    sgd.zero_grad();
    (loss / (initial ? static_cast<double>(n_batches.size()) : n_active)).backward();
    sgd.step();
  }
  return model.parameters();
}

class JoinTraining : public ::testing::TestWithParam<JoinWay> {};
INSTANTIATE_TEST_SUITE_P(Ways, JoinTraining,
                         ::testing::Values(JoinWay{}, JoinWay{.views = true}, JoinWay{.find_unused = true},
                                           JoinWay{.views = true, .find_unused = true},
                                           JoinWay{.static_graph = true},
                                           JoinWay{.views = true, .static_graph = true},
                                           JoinWay{.cap_mb = 0.0001},
                                           JoinWay{.views = true, .cap_mb = 0.0001},
                                           JoinWay{.find_unused = true, .cap_mb = 0.0001}));

TEST_P(JoinTraining, EqualsOneProcessThatLeavesOutWhoHasNoInput) {
  // Rank 0 without any, the last rank without any, one batch only, all alike.
  const std::vector<std::vector<int>> inputs = {{0, 5},    {5, 0},    {1, 3, 6},
                                                {4, 0, 2}, {3, 3, 3}, {6, 1, 1, 4}};
  for (const auto& n_batches : inputs) {
    for (const bool initial : {true, false}) {
      const int n = static_cast<int>(n_batches.size());
      const auto want = trained_alone(n_batches, initial);
      PerRank<std::vector<at::Tensor>> got, gradients;
      run_threads(n, [&](int rank) {
        Mlp net;
        fill_parameters(*net, 1);
        const JoinWay way = GetParam();
        auto model = DistributedDataParallel(net, {.bucket_cap_mb = way.cap_mb,
                                                   .find_unused_parameters = way.find_unused,
                                                   .gradient_as_bucket_view = way.views,
                                                   .static_graph = way.static_graph});
        torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        join({*model},
             [&] {
               for (int step = 0; step < n_batches[static_cast<std::size_t>(rank)]; ++step) {
                 sgd.zero_grad();
                 model->forward(input_of(step, rank)).square().mean().backward();
                 sgd.step();
               }
             },
             {.divide_by_initial_world_size = initial});
        std::vector<at::Tensor> parameters;
        for (const auto& parameter : net->parameters()) parameters.push_back(parameter.detach().clone());
        got.put(rank, parameters);
        // Everyone is in step afterwards.
        for (int step = 50; step < 52; ++step) {
          model->zero_grad();
          model->forward(input_of(step, rank)).square().mean().backward();
        }
        gradients.put(rank, {net->first->weight.grad().clone(), net->last->weight.grad().clone()});
      });
      expect_same_bits(gradients);
      expect_same_bits(got);
      expect_close(got.values().at(0), want);
    }
  }
}

TEST(DdpJoin, AccumulatesUnderNoSyncAndEvaluatesWithoutGradients) {
  run_threads(2, [&](int rank) {
    Scale net;
    auto model = DistributedDataParallel(net);
    join({*model}, [&] {
      for (int i = 0; i < 1 + rank; ++i) {
        model->zero_grad();
        {
          const auto guard = model->no_sync();
          model->forward(torch::full({1}, 10.0 * (rank + 1))).sum().backward();
        }
        {
          torch::NoGradGuard no_grad;
          model->forward(torch::ones({1}));
        }
        model->forward(torch::full({1}, rank + 1.0)).sum().backward();
        if (i == 0) {
          EXPECT_EQ(net->weight.grad().item<double>(), (11.0 + 22.0) / 2);
        } else {
          EXPECT_EQ(net->weight.grad().item<double>(), 22.0 / 2);
        }
      }
    });
  });
}

TEST(DdpJoin, BuffersComeFromTheHighestRankWithInputAndTheModelFromTheLast) {
  run_threads(3, [&](int rank) {
    Scale net;
    auto model = DistributedDataParallel(net);
    const std::vector<int> n_batches = {4, 1, 2};
    join({*model}, [&] {
      for (int i = 0; i < n_batches[static_cast<std::size_t>(rank)]; ++i) {
        model->zero_grad();
        model->forward(torch::ones({1})).sum().backward();
        torch::NoGradGuard no_grad;
        net->weight -= 0.5 * net->weight.grad();
        net->seen += 100 * (rank + 1);
      }
    });
    // Before the steps 2 and 3: rank 2's buffer (step 1: +1 +300; step 2 there: +1 +300, here +1 +100);
    // step 3 and 4 belong to rank 0.
    EXPECT_EQ(net->seen.item<double>(), 301 + 101 + 101 + 101);
    // 1, then three ranks, two, one, one: 1 - .5 - .5*2/3 - .5/3 - .5/3
    EXPECT_NEAR(net->weight.item<double>(), 1 - 0.5 - 0.5 * 2 / 3 - 0.5 / 3 - 0.5 / 3, 1e-6);
  });
}

// Embeddings whose gradients are sparse, beside a dense layer.
struct SparseImpl : torch::nn::Module {
  SparseImpl() {
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(7, kIn).sparse(true)));
    last = register_module("last", torch::nn::Linear(kIn, kOut));
  }
  at::Tensor forward(const at::Tensor& words) { return last(table(words)); }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Sparse);

TEST(DdpJoin, SparseGradientsAreShadowedWithNoEntries) {
  run_threads(2, [&](int rank) {
    Sparse net;
    fill_parameters(*net, 3);
    auto model = DistributedDataParallel(net);
    const at::Tensor words = torch::tensor({1, 3, 3}) + rank;
    const auto local =
        torch::autograd::grad({net->forward(words).sum()}, {net->table->weight}, {}, {}, false, true);
    join({*model},
         [&] {
           for (int i = 0; i < 1 + rank; ++i) {
             model->zero_grad();
             model->forward(words).sum().backward();
           }
           if (rank == 1) {
             EXPECT_TRUE(torch::allclose(net->table->weight.grad().to_dense(), local[0].to_dense()));
           }
         },
         {.divide_by_initial_world_size = false});
  });
}

TEST(DdpJoin, HooksSeeZerosFromRanksWithoutInput) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.0001});
    int n_last = 0;
    std::vector<bool> zeros;
    model->register_comm_hook({.run = [&](GradBucket& bucket) {
      n_last += bucket.is_last() ? 1 : 0;
      zeros.push_back(bucket.buffer().eq(0).all().item<bool>());
      return all_reduce(bucket.buffer(), {.op = ReduceOp::kAvg, .async_op = true}).get_future();
    }});
    join({*model}, [&] {
      for (int i = 0; i < 1 + 2 * rank; ++i) {
        model->zero_grad();
        model->forward(input_of(i, rank)).sum().backward();
      }
    });
    EXPECT_EQ(n_last, 3);
    EXPECT_EQ(zeros.back(), rank == 0);
    EXPECT_FALSE(zeros.front());
  });
}

// A rank without input is one whose loss weighs nothing.
std::vector<at::Tensor> power_sgd_trained(bool joined) {
  PerRank<std::vector<at::Tensor>> got;
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    const auto state = std::make_shared<PowerSGDState>(
        PowerSGDOptions{.start_powerSGD_iter = 2, .min_compression_rate = 0.5});
    model->register_comm_hook(powerSGD_hook(state));
    torch::optim::SGD sgd(net->parameters(), 0.05);
    const auto train = [&](int n_batches) {
      for (int i = 0; i < n_batches; ++i) {
        sgd.zero_grad();
        const double weight = i < 3 + 4 * rank ? 1 : 0;
        (weight * model->forward(input_of(i, rank)).square().mean()).backward();
        sgd.step();
      }
    };
    joined ? join({*model}, [&] { train(3 + 4 * rank); }) : train(7);
    got.put(rank, net->parameters());
  });
  expect_same_bits(got);
  return got.values().at(1);
}

TEST(DdpJoin, PowerSgdGoesOnWhenARankHasNoInput) {
  expect_close(power_sgd_trained(true), power_sgd_trained(false));
}

TEST(DdpJoin, OptimizersInBackwardStepOnRanksWithoutInput) {
  PerRank<std::vector<at::Tensor>> got;
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    const auto steps = apply_optimizer_in_backward<torch::optim::SGD>(
        net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int epoch = 0; epoch < 2; ++epoch) {
      join({*model}, [&] {
        for (int i = 0; i < 4 * rank; ++i) model->forward(input_of(i, rank)).square().mean().backward();
      });
      for (const auto& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
    }
    // The momentum is the same everywhere: so is a step that all take.
    model->forward(input_of(9, rank)).square().mean().backward();
    got.put(rank, net->parameters());
  });
  expect_same_bits(got);
}

TEST(DdpJoin, ZeroIsNotSteppedForPassesThatOnlyAccumulateOrEvaluate) {
  PerRank<std::vector<at::Tensor>> got;
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    ZeroRedundancyOptimizer<torch::optim::Adam> zero(net->parameters(), torch::optim::AdamOptions(0.01));
    join({*model, zero}, [&] {
      for (int i = 0; i < 1 + 2 * rank; ++i) {
        zero.zero_grad();
        {
          const auto guard = model->no_sync();
          model->forward(input_of(i, rank)).square().mean().backward();
        }
        model->forward(input_of(10 + i, rank)).square().mean().backward();
        zero.step();
        torch::NoGradGuard no_grad;
        model->forward(input_of(20 + i, rank));
      }
    });
    got.put(rank, net->parameters());
  });
  expect_same_bits(got);
}

// One layer that nobody uses.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    idle = register_module("idle", torch::nn::Linear(kIn, kOut));
    used = register_module("used", torch::nn::Linear(kIn, kOut));
  }
  at::Tensor forward(const at::Tensor& x) { return used(x); }
  torch::nn::Linear idle{nullptr}, used{nullptr};
};
TORCH_MODULE(Branches);

TEST(DdpJoin, ParametersUsedByNoRankHaveNoGradientOnRanksWithoutInput) {
  for (const bool views : {false, true}) {
    run_threads(2, [&](int rank) {
      Branches net;
      fill_parameters(*net, 1);
      auto model =
          DistributedDataParallel(net, {.find_unused_parameters = true, .gradient_as_bucket_view = views});
      net->idle->weight.mutable_grad() = torch::ones_like(net->idle->weight);
      join({*model}, [&] {
        for (int i = 0; i < 2 * rank; ++i) model->forward(input_of(i, rank)).sum().backward();
      });
      if (rank == 0) {
        EXPECT_FALSE(net->idle->weight.grad().defined());
        EXPECT_TRUE(net->used->weight.grad().defined());
      } else {
        EXPECT_TRUE(net->idle->weight.grad().eq(1).all().item<bool>());
      }
    });
  }
}

TEST(DdpJoin, ZeroShardsGoOnBeingUpdatedByRanksWithoutInput) {
  const std::vector<int> n_batches = {2, 6, 4};
  MlpImpl alone;
  fill_parameters(alone, 1);
  torch::optim::Adam adam(alone.parameters(), torch::optim::AdamOptions(0.01));
  for (int step = 0; step < 6; ++step) {
    at::Tensor loss = torch::zeros({});
    for (int rank = 0; rank < 3; ++rank) {
      if (step < n_batches[static_cast<std::size_t>(rank)])
        loss = loss + alone.forward(input_of(step, rank)).square().mean() / 3;
    }
    adam.zero_grad();
    loss.backward();
    adam.step();
  }
  for (const bool as_views : {false, true}) {
    PerRank<std::vector<at::Tensor>> got;
    run_threads(3, [&](int rank) {
      Mlp net;
      fill_parameters(*net, 1);
      auto model = DistributedDataParallel(net);
      ZeroRedundancyOptimizer<torch::optim::Adam> zero(net->parameters(), torch::optim::AdamOptions(0.01),
                                                       {.parameters_as_bucket_view = as_views});
      join({*model, zero}, [&] {
        for (int step = 0; step < n_batches[static_cast<std::size_t>(rank)]; ++step) {
          zero.zero_grad();
          model->forward(input_of(step, rank)).square().mean().backward();
          zero.step();
        }
      });
      got.put(rank, net->parameters());
    });
    expect_same_bits(got);
    expect_close(got.values().at(0), alone.parameters());
  }
}

TEST(DdpJoin, InThrowingModeAllRanksRaiseAndTheModelGoesOn) {
  run_threads(2, [&](int rank) {
    Scale net;
    auto model = DistributedDataParallel(net);
    int n_done = 0;
    const auto body = [&] {
      for (; n_done < 1 + 3 * rank; ++n_done) model->forward(torch::ones({1})).sum().backward();
    };
    EXPECT_THROW(join({*model}, body, {.throw_on_early_termination = true}), InputsExhausted);
    EXPECT_EQ(n_done, 1);
    model->zero_grad();
    model->forward(torch::full({1}, rank + 1.0)).sum().backward();
    EXPECT_EQ(net->weight.grad().item<double>(), 1.5);
  });
}

TEST(DdpJoin, RefusesWhatCannotBeShadowed) {
  run_threads(2, [&](int) {
    Scale net;
    auto skips =
        DistributedDataParallel(net, {.find_unused_parameters = true, .skip_all_reduce_unused_params = true});
    EXPECT_NE(refusal([&] { join({*skips}, [] {}); }).find("skip_all_reduce_unused_params cannot be joined"),
              std::string::npos);
    Scale other;
    auto model = DistributedDataParallel(other);
    const std::string words = refusal([&] {
      join({*model}, [&] {
        model->forward(torch::ones({1}));
        model->forward(torch::ones({1}));
      });
    });
    EXPECT_NE(words.find("every synced forward() needs its own backward()"), std::string::npos) << words;
  });
}

TEST(DdpJoin, InAWorldOfOneTheBodyRuns) {
  run_threads(1, [&](int) {
    Scale net;
    auto model = DistributedDataParallel(net);
    join({*model}, [&] { model->forward(torch::ones({1})).sum().backward(); });
    EXPECT_EQ(net->weight.grad().item<double>(), 1);
  });
}

}  // namespace
}  // namespace lockstep
