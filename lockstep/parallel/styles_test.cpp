// What styles promise beyond the plans of parallel_test.cpp: whose values parameters get, pairs of layers,
// and every kind of module that works on split sequences.
#include "lockstep/parallel/styles.h"

#include <gtest/gtest.h>
#include <torch/nn.h>

#include "lockstep/base/detail/text.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/dtensor/dtensor_testing.h"
#include "lockstep/dtensor/random.h"
#include "lockstep/parallel/parallelize.h"

namespace lockstep {
namespace {

using testing::expect_whole;
using testing::waves;
using testing::world;

void fill(torch::nn::Module& module, double shift) {
  const c10::NoGradGuard no_grad;
  for (auto& p : module.parameters()) p.copy_(waves(p.sizes(), shift + double(p.numel())) * 0.4);
}

torch::nn::Sequential four_layers(double shift) {
  torch::nn::Sequential net(torch::nn::Linear(6, 12), torch::nn::GELU(), torch::nn::Linear(12, 6),
                            torch::nn::Tanh(), torch::nn::Linear(6, 18), torch::nn::GELU(),
                            torch::nn::Linear(18, 4));
  fill(*net, shift);
  return net;
}

// Passes its input on, and no gradient.
struct Stop : torch::autograd::Function<Stop> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {at::Tensor()};
  }
};

TEST(ParallelizeModule, AParameterThatNoGradientReachesHasNone) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    torch::nn::Linear layer(4, 6);
    parallelize_module(*layer, mesh, ColwiseParallel{.use_local_output = false});
    Stop::apply(layer->weight).sum().backward();
    EXPECT_FALSE(layer->weight.grad().defined());
  });
}

TEST(PairwiseParallel, GivesWhatOneProcessGivesWithOneReductionPerPair) {
  // Four ranks have 5, 5, 5 and 3 of 18 features, five ranks 3, 3, 3, 3 and none of 12.
  for (const int n : {2, 3, 4, 5}) {
    world(n, [n](int) {
      const auto mesh = init_device_mesh("cpu", {n});
      auto one = four_layers(0), many = four_layers(0);
      parallelize_module(*many, mesh, PairwiseParallel());
      const char* const names[] = {"0.weight", "0.bias", "2.weight", "2.bias",
                                   "4.weight", "4.bias", "6.weight", "6.bias"};
      const Placement columns = Shard(0), rows = Shard(1), whole;
      const Placement expected[] = {columns, columns, rows, whole, columns, columns, rows, whole};
      for (std::size_t i = 0; i < 8; ++i)
        EXPECT_EQ(placements(many->named_parameters()[names[i]]), Placements{expected[i]}) << names[i];
      const auto a = waves({5, 6}).requires_grad_(), b = waves({5, 6}).requires_grad_();
      const auto x = one->forward(a);
      at::Tensor y;
      {
        const CommDebugScope scope;
        y = many->forward(b);
        EXPECT_EQ(scope.describe(), "all_reduce 2");
      }
      EXPECT_FALSE(is_dtensor(y));  // a replica, in and out
      expect_whole(y, x, "result");
      x.pow(2).sum().backward();
      y.pow(2).sum().backward();
      expect_whole(b.grad(), a.grad(), "gradient of the input");
      for (const auto& item : one->named_parameters())
        expect_whole(many->named_parameters()[item.key()].grad(), item.value().grad(), item.key());
    });
  }
}

TEST(ParallelizeModule, ParametersGetTheValuesOfTheRankThatItIsTold) {
  world(3, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {3});
    for (const int src : {0, 1, 2}) {
      auto mine = four_layers(rank);
      parallelize_module(*mine, mesh, ParallelStyle(PairwiseParallel()), {.src_data_rank = src});
      const auto theirs = four_layers(src);
      for (const auto& item : theirs->named_parameters())
        expect_whole(mine->named_parameters()[item.key()], item.value(), base::cat(item.key(), " of ", src));
    }
  });
}

TEST(ParallelizeModule, WithoutASourceRankEveryRankCutsItsOwnAndSendsNothing) {
  world(3, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {3});
    auto mine = four_layers(rank);
    const CommDebugScope scope;
    parallelize_module(*mine, mesh, ParallelStyle(PairwiseParallel()), {.src_data_rank = {}});
    EXPECT_EQ(scope.describe(), "none");
    const auto before = four_layers(rank);
    const auto weight = before->named_parameters()["0.weight"].detach();
    expect_whole(to_local(mine->named_parameters()["0.weight"]).detach(), weight.narrow(0, 4 * rank, 4),
                 "rows");
    expect_whole(to_local(mine->named_parameters()["2.bias"]).detach(), before->named_parameters()["2.bias"],
                 "replica");
  });
}

// What a norm gives one process with the whole sequence: the result, the gradients of input and parameters.
// `make` makes it; five tokens over the ranks: pieces differ.
template <class Make>
void expect_norm_on_sequences(const Make& make, std::int64_t dim, std::size_t n_parameters) {
  world(2, [&](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    auto one = make(), many = make();
    ASSERT_EQ(one->parameters().size(), n_parameters);
    {
      const CommDebugScope scope;
      parallelize_module(*many, mesh, SequenceParallel{.sequence_dim = dim});
      EXPECT_EQ(scope.describe(), "none");
    }
    const auto whole = dim == 1 ? waves({2, 5, 8}) : waves({5, 2, 8});
    const auto a = whole.clone().requires_grad_();
    const auto b = distribute_tensor(whole, mesh, {Shard(dim)}).requires_grad_();
    const auto x = one->forward(a);
    x.pow(3).sum().backward();
    const auto y = many->forward(b);
    EXPECT_EQ(placements(y), Placements{Shard(dim)});
    {
      const CommDebugScope scope;
      y.pow(3).sum().backward();
      EXPECT_EQ(scope.describe(), base::cat("all_reduce ", n_parameters));
    }
    expect_whole(y, x, "result");
    expect_whole(b.grad(), a.grad(), "gradient of the input");
    for (const auto& item : one->named_parameters()) {
      const auto& parameter = many->named_parameters()[item.key()];
      EXPECT_EQ(placements(parameter), Placements{Replicate()}) << item.key();
      expect_whole(parameter.grad(), item.value().grad(), item.key());
    }
  });
}

torch::nn::LayerNorm layer_norm() {
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
  fill(*norm, 1);
  return norm;
}

// libtorch has no such module in C++.
struct RootMeanSquareImpl : torch::nn::Module {
  RootMeanSquareImpl() : weight(register_parameter("weight", waves({8}, 1) + 2)) {}
  at::Tensor forward(const at::Tensor& x) { return at::rms_norm(x, {8}, weight, 1e-6); }
  at::Tensor weight;
};
TORCH_MODULE(RootMeanSquare);

TEST(SequenceParallel, ALayerNormIsThatOfOneProcess) {
  for (const std::int64_t dim : {0, 1}) expect_norm_on_sequences(layer_norm, dim, 2);
}

TEST(SequenceParallel, AnRmsNormIsThatOfOneProcess) {
  for (const std::int64_t dim : {0, 1}) expect_norm_on_sequences([] { return RootMeanSquare(); }, dim, 1);
}

// Parameters are assumed to be equal: nothing is broadcast, so that those of ranks that differ stay so.
TEST(SequenceParallel, LeavesEveryRankItsOwnParameters) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
    fill(*norm, rank);
    const auto before = norm->weight.detach().clone();
    parallelize_module(*norm, mesh, SequenceParallel());
    expect_whole(to_local(norm->weight).detach(), before, "weight");
  });
}

// A plain input is this rank's part of the sequence.
TEST(SequenceParallel, APlainInputIsAPieceAndTheResultAsAsked) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = waves({2, 4, 8});
    auto one = layer_norm();
    for (const bool local : {false, true}) {
      auto many = layer_norm();
      parallelize_module(*many, mesh, SequenceParallel{.use_local_output = local});
      const auto y = many->forward(whole.narrow(1, 2 * rank, 2));
      EXPECT_EQ(is_dtensor(y), !local);
      expect_whole(y, local ? one->forward(whole).narrow(1, 2 * rank, 2) : one->forward(whole), "result");
    }
  });
}

TEST(SequenceParallel, DropoutIsThatOfOneProcess) {
  at::set_num_threads(1);
  const auto whole = waves({2, 5, 8});
  const auto a = whole.clone().requires_grad_();
  torch::manual_seed(7);
  const auto x = at::dropout(a, 0.3, true);
  x.pow(2).sum().backward();
  world(2, [&](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    torch::nn::Dropout dropout(0.3);
    parallelize_module(*dropout, mesh, SequenceParallel());
    manual_seed(7, mesh);
    const auto b = distribute_tensor(whole, mesh, {Shard(1)}).requires_grad_();
    const CommDebugScope scope;
    const auto y = dropout(b);
    y.pow(2).sum().backward();
    EXPECT_EQ(scope.describe(), "none");
    EXPECT_EQ(placements(y), Placements{Shard(1)});
    expect_whole(y, x, "result");
    expect_whole(b.grad(), a.grad(), "gradient");
    dropout->eval();
    expect_whole(dropout(b), whole, "in evaluation");
  });
}

}  // namespace
}  // namespace lockstep
