// Parameters that get no gradient, and graphs that stay the same.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <random>

#include "lockstep/base/log.h"
#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/ddp_testing.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

// Layers that each call chooses from; `mask` says which.
struct ChooserImpl : torch::nn::Module {
  ChooserImpl() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module(base::cat("layer", i), torch::nn::Linear(kIn, kIn)));
    }
  }
  at::Tensor forward(const at::Tensor& x, unsigned mask) {
    at::Tensor y = x;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      if ((mask >> i & 1) != 0) y = torch::tanh(layers[i](y));
    }
    return y;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Chooser);

// What every rank's gradients should be after one step from zero: the mean over the ranks, a parameter that a
// rank does not use counting as zero there. Undefined where no rank uses it.
std::vector<at::Tensor> expected_gradients(Chooser net, int step, const std::vector<unsigned>& masks) {
  std::vector<at::Tensor> mean;
  for (const auto& parameter : net->parameters()) mean.push_back(torch::zeros_like(parameter));
  std::vector<bool> used(mean.size());
  for (std::size_t rank = 0; rank < masks.size(); ++rank) {
    const auto loss = net->forward(input_of(step, static_cast<int>(rank)), masks[rank]).sum();
    if (!loss.requires_grad()) continue;
    const auto grads = torch::autograd::grad({loss}, net->parameters(), {}, {}, false, true);
    for (std::size_t i = 0; i < mean.size(); ++i) {
      if (!grads[i].defined()) continue;
      used[i] = true;
      mean[i] += grads[i].detach() / static_cast<double>(masks.size());
    }
  }
  for (std::size_t i = 0; i < mean.size(); ++i) {
    if (!used[i]) mean[i] = at::Tensor();
  }
  return mean;
}

void expect_gradients(const torch::nn::Module& net, const std::vector<at::Tensor>& want, int step) {
  const auto parameters = net.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_EQ(parameters[i].grad().defined(), want[i].defined()) << "step " << step << " parameter " << i;
    if (!want[i].defined()) continue;
    EXPECT_TRUE(torch::allclose(parameters[i].grad(), want[i], 1e-4, 1e-6))
        << "step " << step << " parameter " << i;
  }
}

class Unused : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(BucketViews, Unused, ::testing::Bool());

TEST_P(Unused, ParametersUsedSomewhereAreAveragedAndOthersKeepWhatTheyHad) {
  const std::vector<std::vector<unsigned>> steps = {
      {0b0011, 0b0110, 0b0001}, {0b1111, 0b1111, 0b1111}, {0b0001, 0b0001, 0b0001}, {0b1000, 0b0001, 0b0100}};
  run_threads(3, [&](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(
        net,
        {.bucket_cap_mb = 0.0002, .find_unused_parameters = true, .gradient_as_bucket_view = GetParam()});
    for (std::size_t step = 0; step < steps.size(); ++step) {
      model->zero_grad(true);
      const auto want = expected_gradients(net, static_cast<int>(step), steps[step]);
      model->zero_grad(true);
      model->forward(input_of(static_cast<int>(step), rank), steps[step][static_cast<std::size_t>(rank)])
          .sum()
          .backward();
      expect_gradients(*net, want, static_cast<int>(step));
    }
    EXPECT_FALSE(model->stats().can_set_static_graph);
  });
}

TEST_P(Unused, AnOldGradientStaysWhenNoRankUsesTheParameter) {
  run_threads(2, [&](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model =
        DistributedDataParallel(net, {.find_unused_parameters = true, .gradient_as_bucket_view = GetParam()});
    model->forward(input_of(0, rank), 0b0011).sum().backward();
    const at::Tensor before = net->layers[1]->weight.grad().clone();
    model->forward(input_of(1, rank), 0b0001).sum().backward();
    EXPECT_TRUE(torch::equal(net->layers[1]->weight.grad(), before));
  });
}

TEST(FindUnused, ARankThatUsesNoParameterTakesPart) {
  run_threads(2, [](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(net, {.find_unused_parameters = true});
    const at::Tensor x = input_of(0, rank).requires_grad_();
    model->forward(x * 2, rank == 0 ? 0b0001u : 0u).sum().backward();
    const auto want = expected_gradients(net, 0, {0b0001, 0});
    ASSERT_TRUE(net->layers[0]->bias.grad().defined());
    EXPECT_TRUE(net->layers[0]->bias.grad().abs().sum().item<float>() > 0) << rank;
  });
}

TEST(FindUnused, WhatIsUsedInNoSyncCountsInTheNextSyncedPass) {
  run_threads(2, [](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(net, {.find_unused_parameters = true});
    {
      const auto local = model->no_sync();
      model->forward(input_of(0, rank), rank == 0 ? 0b0010u : 0b0001u).sum().backward();
    }
    model->forward(input_of(1, rank), 0b0001).sum().backward();
    // Layer 1 was used by rank 0 only, and only inside no_sync.
    const at::Tensor gradient = net->layers[1]->weight.grad();
    ASSERT_TRUE(gradient.defined()) << rank;
    const auto alone =
        torch::autograd::grad({net->forward(input_of(0, 0), 0b0010).sum()}, {net->layers[1]->weight});
    EXPECT_TRUE(torch::allclose(gradient, alone[0] / 2, 1e-4, 1e-6));
  });
}

TEST(FindUnused, AForwardWithoutABackwardHoldsNothingUp) {
  run_threads(2, [](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(net, {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      model->zero_grad(true);
      if (rank == 0) model->forward(input_of(9, rank), 0b0110);  // its loss was no good
      if (rank == 1) model->forward(input_of(9, rank), 0b0001);
      model->forward(input_of(step, rank), 0b0001).sum().backward();
      const auto want = expected_gradients(net, step, {0b0001, 0b0001});
      EXPECT_TRUE(torch::allclose(net->layers[0]->weight.grad(), want[0], 1e-4, 1e-6));
      EXPECT_FALSE(net->layers[1]->weight.grad().defined());
    }
  });
}

// A gradient penalty: autograd::grad through the outputs, before the backward pass.
TEST(FindUnused, AutogradGradThroughTheOutputsBeginsNoReduction) {
  for (const bool is_static : {false, true}) {
    run_threads(2, [&](int rank) {
      Chooser net;
      fill_parameters(*net, 5);
      auto model =
          DistributedDataParallel(net, {.find_unused_parameters = !is_static, .static_graph = is_static});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad(true);
        const at::Tensor x = input_of(step, rank).requires_grad_();
        const at::Tensor out = model->forward(x, 0b0001);
        const auto slope = torch::autograd::grad({out.sum()}, {x}, {}, true);
        EXPECT_TRUE(slope[0].defined());
        out.sum().backward();
        const auto want = expected_gradients(net, step, {0b0001, 0b0001});
        ASSERT_TRUE(torch::allclose(net->layers[0]->weight.grad(), want[0], 1e-4, 1e-6)) << is_static << step;
      }
    });
  }
}

TEST(FindUnused, BucketsWithGradientsFromNoSyncAreNotSkipped) {
  run_threads(2, [](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(
        net,
        {.bucket_cap_mb = 0.0001, .find_unused_parameters = true, .skip_all_reduce_unused_params = true});
    {
      const auto local = model->no_sync();
      model->forward(input_of(rank, rank), 0b0010).sum().backward();
    }
    model->forward(input_of(5, rank), 0b0001).sum().backward();
    at::Tensor both = torch::empty({2, kIn});
    all_gather_into_tensor(both, net->layers[1]->bias.grad());
    EXPECT_TRUE(torch::equal(both[0], both[1]));
  });
}

std::atomic<int> n_told_in_vain{0};

// The search costs a walk in each step: said once by each rank, and only where every parameter was used.
TEST(FindUnused, SaysOnceThatItFoundNothing) {
  set_log_sink([](LogLevel level, std::string_view text) {
    if (level == LogLevel::kWarn && text.find("used every parameter") != std::string_view::npos)
      ++n_told_in_vain;
  });
  for (const unsigned mask : {0b1111U, 0b0111U}) {
    n_told_in_vain = 0;
    run_threads(2, [&](int rank) {
      auto model = DistributedDataParallel(Chooser(), {.find_unused_parameters = true});
      for (int step = 0; step < 3; ++step) model->forward(input_of(step, rank), mask).sum().backward();
    });
    EXPECT_EQ(n_told_in_vain, mask == 0b1111U ? 2 : 0);
  }
  set_log_sink(nullptr);
}

TEST(FindUnused, AnOutputThatHoldsNoTensorIsAnErrorThatSaysWhatToDo) {
  struct Opaque {
    at::Tensor hidden;
  };
  struct Net : torch::nn::Module {
    Net() { weight = register_parameter("weight", torch::ones({2})); }
    Opaque forward() { return {weight * 2}; }
    at::Tensor weight;
  };
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(std::make_shared<Net>(), {.find_unused_parameters = true});
    const auto words = refusal([&] { model->forward(); });
    EXPECT_NE(words.find("lockstep_fields"), std::string::npos) << words;
  });
}

TEST(StaticGraph, ARankThatUsesNoParameterTakesPartInEveryPass) {
  run_threads(2, [](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(net, {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad(true);
      const at::Tensor x = input_of(step, rank).requires_grad_();
      model->forward(x, rank == 0 ? 0b0001u : 0u).sum().backward();  // rank 1: its input as it is
      ASSERT_TRUE(net->layers[0]->bias.grad().defined()) << "rank " << rank << " step " << step;
    }
  });
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    trunk = register_module("trunk", torch::nn::Linear(kIn, kIn));
    left = register_module("left", torch::nn::Linear(kIn, kOut));
    right = register_module("right", torch::nn::Linear(kIn, kOut));
  }
  std::map<std::string, std::optional<at::Tensor>> forward(const at::Tensor& x) {
    const at::Tensor h = torch::tanh(trunk(x));
    return {{"left", left(h)}, {"right", right(h)}, {"none", std::nullopt}};
  }
  torch::nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr};
};

TEST(FindUnused, AnOutputThatTheLossIgnoresLeavesItsGradientsAlone) {
  run_threads(2, [](int rank) {
    auto net = std::make_shared<TwoHeadsImpl>();
    fill_parameters(*net, 9);
    auto model = DistributedDataParallel(net, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      const auto out = model->forward(input_of(step, rank));
      out.at("left")->sum().backward();
      EXPECT_FALSE(net->right->weight.grad().defined());
      EXPECT_TRUE(net->left->weight.grad().defined());
    }
  });
}

TEST(FindUnused, OutputsAreCopiedUnlessDisabled) {
  struct Keeps : torch::nn::Module {
    Keeps() { weight = register_parameter("weight", torch::ones({3})); }
    at::Tensor forward() { return last = weight * 2; }
    at::Tensor weight, last;
  };
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(std::make_shared<Keeps>(), {.find_unused_parameters = true});
    for (const bool clone : {true, false}) {
      model->set_sink_clone(clone);
      const auto out = model->forward();
      EXPECT_EQ(out.const_data_ptr() == model->module()->last.const_data_ptr(), !clone);
      out.sum().backward();
      EXPECT_TRUE(torch::equal(model->module()->weight.grad(), torch::full({3}, clone ? 2.0 : 4.0)));
    }
  });
}

TEST(FindUnused, OutputsMayBeChangedInPlace) {
  run_threads(2, [](int rank) {
    Mlp net;
    fill_parameters(*net, 9);
    auto model = DistributedDataParallel(net, {.find_unused_parameters = true});
    at::Tensor out = model->forward(input_of(0, rank));
    out.mul_(2).sum().backward();
    EXPECT_TRUE(net->last->weight.grad().defined());
  });
}

// Graphs that change at random, differently on each rank, under random delays: all ranks hold the same bits
// throughout.
TEST_P(Unused, RanksStayEqualWhileTheGraphChangesAtRandom) {
  constexpr int kRanks = 3, kSteps = 500;
  run_threads(kRanks, [&](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(
        net,
        {.bucket_cap_mb = 0.0002, .find_unused_parameters = true, .gradient_as_bucket_view = GetParam()});
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    std::mt19937 random(static_cast<unsigned>(40 + rank));
    for (int step = 0; step < kSteps; ++step) {
      sgd.zero_grad();
      const unsigned mask = 1 + random() % 15;
      const auto dawdle = [&] {
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      };
      dawdle();
      const at::Tensor output = model->forward(input_of(step, rank), mask);
      output.register_hook([&](const at::Tensor&) { dawdle(); });
      output.square().sum().backward();
      sgd.step();
      const auto mine = torch::cat([&] {
        std::vector<at::Tensor> flat;
        for (const auto& parameter : net->parameters()) flat.push_back(parameter.detach().flatten());
        return flat;
      }());
      at::Tensor all = torch::empty({kRanks, mine.numel()});
      all_gather_into_tensor(all, mine);
      for (int r = 1; r < kRanks; ++r)
        ASSERT_TRUE(torch::equal(all[r], all[0])) << "step " << step << " rank " << r;
    }
  });
}

TEST(FindUnused, ABucketUsedByNoRankIsSkippedWhenRequested) {
  run_threads(2, [](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(
        net,
        {.bucket_cap_mb = 0.0001, .find_unused_parameters = true, .skip_all_reduce_unused_params = true});
    model->forward(input_of(0, rank), 0b0001).sum().backward();
    const auto stats = model->stats();
    EXPECT_GT(stats.n_buckets_reduced, 0U);
    EXPECT_LT(stats.n_buckets_reduced, stats.bucket_bytes.size());
    EXPECT_TRUE(net->layers[0]->weight.grad().defined());
    EXPECT_FALSE(net->layers[1]->weight.grad().defined());
  });
}

// ---- static graph ----

TEST(StaticGraph, LearnsWhatIsUnusedAndHowOftenHooksFire) {
  run_threads(2, [](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.0002, .static_graph = true});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad(true);
      const auto want = expected_gradients(net, step, {0b0101, 0b0101});
      model->zero_grad(true);
      model->forward(input_of(step, rank), 0b0101).sum().backward();
      expect_gradients(*net, want, step);
    }
    EXPECT_TRUE(model->stats().has_rebuilt_buckets);
    EXPECT_TRUE(model->stats().can_set_static_graph);
    EXPECT_EQ(model->stats().unused_bytes, 2U * (kIn * kIn + kIn) * 4);
  });
}

TEST(StaticGraph, ANewlyUsedParameterIsAnErrorThatNamesIt) {
  run_threads(2, [](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(net, {.static_graph = true});
    model->forward(input_of(0, rank), 0b0001).sum().backward();
    const auto words = refusal([&] { model->forward(input_of(1, rank), 0b0011).sum().backward(); });
    EXPECT_NE(words.find("the graph changed"), std::string::npos) << words;
    EXPECT_NE(words.find("layer1"), std::string::npos) << words;
  });
}

TEST(StaticGraph, ANewlyUnusedParameterIsNamedAtTheNextForward) {
  run_threads(2, [](int rank) {
    Chooser net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(net, {.static_graph = true});
    model->forward(input_of(0, rank), 0b0011).sum().backward();
    model->forward(input_of(1, rank), 0b0001).sum().backward();
    const auto words = refusal([&] { model->forward(input_of(2, rank), 0b0001); });
    EXPECT_NE(words.find("layer1.weight"), std::string::npos) << words;
    EXPECT_NE(words.find("static_graph"), std::string::npos) << words;
  });
}

TEST(StaticGraph, MustBeSetBeforeTheFirstForward) {
  run_threads(2, [](int rank) {
    auto model = DistributedDataParallel(Mlp());
    model->forward(input_of(0, rank)).sum().backward();
    const auto words = refusal([&] { model->set_static_graph(); });
    EXPECT_NE(words.find("before the first forward"), std::string::npos) << words;
  });
}

}  // namespace
}  // namespace lockstep
