// Mixed precision held against the written-out formula: cast the parameters, take local gradients in the
// short type, average them in the reduction's type, cast the average to the parameters' own.
#include <sstream>
#include <stdexcept>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp_script.h"
#include "lockstep/ddp/ddp_testing.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/optim/functional_optimizer.h"

namespace lockstep {
namespace {

using namespace ddp_testing;
using Tensors = std::vector<at::Tensor>;

MixedPrecision in(at::ScalarType param, std::optional<at::ScalarType> reduce = std::nullopt) {
  return {.param_dtype = param, .reduce_dtype = reduce};
}

at::Tensor square_loss(const at::Tensor& output) {
  return output.to(at::kFloat).square().sum();
}

Tensors copies(const Tensors& tensors, at::ScalarType dtype) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.detach().to(dtype, false, true));
  return result;
}

// Gradients of one rank's loss in the short type, by a bare module whose parameters were converted.
template <class Impl>
Tensors local_gradients(const Tensors& parameters, const at::Tensor& input, at::ScalarType dtype) {
  auto bare = std::make_shared<Impl>();
  bare->to(dtype);
  Tensors mine = bare->parameters();
  for (std::size_t i = 0; i < mine.size(); ++i)
    mine[i].set_data(parameters[i].detach().to(dtype, false, true));
  square_loss(bare->forward(input.to(dtype))).backward();
  Tensors gradients;
  for (const at::Tensor& parameter : mine) gradients.push_back(parameter.grad());
  return gradients;
}

at::Tensor averaged(const Tensors& of_ranks, at::ScalarType reduce) {
  at::Tensor sum = of_ranks[0].to(reduce).to(at::kFloat);
  for (std::size_t r = 1; r < of_ranks.size(); ++r) sum = sum + of_ranks[r].to(reduce).to(at::kFloat);
  return (sum / static_cast<double>(of_ranks.size())).to(reduce).to(at::kFloat);
}

template <class Impl>
Tensors formula(const Tensors& parameters, int step, int n, at::ScalarType param, at::ScalarType reduce) {
  std::vector<Tensors> of_ranks;
  for (int r = 0; r < n; ++r) of_ranks.push_back(local_gradients<Impl>(parameters, input_of(step, r), param));
  Tensors result;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Tensors ith;
    for (const Tensors& gradients : of_ranks) ith.push_back(gradients[i]);
    result.push_back(averaged(ith, reduce));
  }
  return result;
}

void expect_equal(const Tensors& gradients, const Tensors& expected, const char* what) {
  ASSERT_EQ(gradients.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(gradients[i].scalar_type(), at::kFloat);
    EXPECT_TRUE(torch::equal(gradients[i], expected[i]))
        << what << ", tensor " << i << ": " << (gradients[i] - expected[i]).abs().max();
  }
}

Tensors gradients_of(const Tensors& parameters) {
  Tensors result;
  for (const at::Tensor& parameter : parameters) result.push_back(parameter.grad());
  return result;
}

struct Types {
  at::ScalarType param;
  std::optional<at::ScalarType> reduce;
  bool views;
};
class MixedFormula : public ::testing::TestWithParam<Types> {};

TEST_P(MixedFormula, HoldsInEveryStep) {
  constexpr int kRanks = 2;
  const Types types = GetParam();
  run_threads(kRanks, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    DistributedDataParallel model(net, {.bucket_cap_mb = 0.0001,
                                        .gradient_as_bucket_view = types.views,
                                        .mixed_precision = in(types.param, types.reduce)});
    torch::optim::SGD sgd(model->parameters(), 0.05);
    for (int step = 0; step < 4; ++step) {
      const Tensors before = copies(model->parameters(), at::kFloat);
      const Tensors expected =
          formula<MlpImpl>(before, step, kRanks, types.param, types.reduce.value_or(types.param));
      const at::Tensor output = model->forward(input_of(step, rank));
      EXPECT_EQ(output.scalar_type(), types.param);
      sgd.zero_grad(step % 2 == 0);
      square_loss(output).backward();
      expect_equal(gradients_of(net->parameters()), expected, "gradients");
      expect_equal(copies(net->parameters(), at::kFloat), before, "parameters before the step");
      sgd.step();
    }
    EXPECT_EQ(model->stats().n_reductions, 4u);
    EXPECT_TRUE(model->stats().has_rebuilt_buckets);
  });
}
INSTANTIATE_TEST_SUITE_P(Types, MixedFormula,
                         ::testing::Values(Types{at::kBFloat16, std::nullopt, false},
                                           Types{at::kHalf, std::nullopt, false},
                                           Types{at::kBFloat16, at::kFloat, false},
                                           Types{at::kBFloat16, at::kFloat, true},
                                           Types{at::kFloat, at::kBFloat16, false}));

// Tells what it sees, and fails when asked to.
struct WatchedImpl : torch::nn::Module {
  WatchedImpl() {
    weight = register_parameter("weight", 0.5 * torch::ones({kIn}));
    frozen = register_parameter("frozen", torch::ones({kIn}), false);
    steps = register_buffer("steps", torch::zeros({1}, at::kLong));
    scale = register_buffer("scale", torch::ones({1}));
  }
  at::Tensor forward(const std::vector<at::Tensor>& x, const at::Tensor& index) {
    seen = {weight.scalar_type(), frozen.scalar_type(), x[0].scalar_type(),
            index.scalar_type(),  scale.scalar_type(),  steps.scalar_type()};
    if (fails) throw std::runtime_error("asked to");
    return x[0] * weight * frozen;
  }
  at::Tensor weight, frozen, steps, scale;
  std::vector<at::ScalarType> seen;
  bool fails = false;
};

TEST(MixedPrecision, CastsFloatingPointTensorsAndNoOthers) {
  for (const int n : {1, 2}) {
    run_threads(n, [](int) {
      auto net = std::make_shared<WatchedImpl>();
      MixedPrecision mixed = in(at::kBFloat16);
      mixed.buffer_dtype = at::kHalf;
      DistributedDataParallel model(net, {.mixed_precision = mixed});
      const std::vector<at::Tensor> x{torch::ones({kIn})};
      square_loss(model->forward(x, torch::zeros({1}, at::kLong))).backward();
      EXPECT_EQ(net->seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16, at::kBFloat16,
                                                        at::kLong, at::kHalf, at::kLong}));
      EXPECT_EQ(x[0].scalar_type(), at::kFloat);
      EXPECT_EQ(net->weight.grad().scalar_type(), at::kFloat);
      EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
      EXPECT_EQ(net->frozen.scalar_type(), at::kFloat);
    });
  }
}

TEST(MixedPrecision, InputsAreNotCastWhenDisabled) {
  run_threads(2, [](int) {
    auto net = std::make_shared<WatchedImpl>();
    MixedPrecision mixed = in(at::kBFloat16);
    mixed.cast_forward_inputs = false;
    DistributedDataParallel model(net, {.mixed_precision = mixed});
    model->forward(std::vector<at::Tensor>{torch::ones({kIn})}, torch::zeros({1}));
    EXPECT_EQ(net->seen[2], at::kFloat);
    EXPECT_EQ(net->seen[3], at::kFloat);
  });
}

TEST(MixedPrecision, ParametersAreFullOnceNoGraphNeedsTheShortOnes) {
  run_threads(2, [](int rank) {
    auto net = std::make_shared<WatchedImpl>();
    DistributedDataParallel model(net, {.mixed_precision = in(at::kBFloat16)});
    const auto pass = [&] {
      return model->forward(std::vector<at::Tensor>{torch::ones({kIn})}, torch::zeros({1}));
    };
    {
      torch::NoGradGuard no_grad;
      EXPECT_EQ(pass().scalar_type(), at::kBFloat16);
      EXPECT_EQ(net->weight.scalar_type(), at::kFloat) << "after a pass without gradients";
    }
    net->fails = true;
    EXPECT_THROW(pass(), std::runtime_error);
    EXPECT_EQ(net->weight.scalar_type(), at::kFloat) << "after a pass that failed";
    net->fails = false;
    {
      at::Tensor output = pass();
      EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16);
      output = pass();  // the first is gone, the second is not
      EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16);
      torch::NoGradGuard no_grad;
      pass();
      EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16) << "while a graph waits";
    }
    EXPECT_EQ(net->weight.scalar_type(), at::kFloat) << "after the last graph is gone";
    pass().sum().backward();
    EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
    // A backward pass that dies leaves nothing behind either. The same on both ranks, before any gradient.
    {
      at::Tensor output = pass();
      output.register_hook([](const at::Tensor&) { throw std::runtime_error("asked to"); });
      EXPECT_THROW(output.sum().backward(), std::exception);
    }
    EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
    std::stringstream file;
    torch::save(model, file);
    auto plain = std::make_shared<WatchedImpl>();
    DistributedDataParallel loaded(plain, {.init_sync = rank >= 0});
    torch::load(loaded, file);
    EXPECT_EQ(plain->weight.scalar_type(), at::kFloat);
  });
}

TEST(MixedPrecision, GradientsAccumulateInTheFullType) {
  constexpr int kRanks = 2;
  run_threads(kRanks, [](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    DistributedDataParallel model(net, {.mixed_precision = in(at::kBFloat16)});
    const Tensors before = copies(net->parameters(), at::kFloat);
    std::vector<Tensors> sums;  // by rank
    for (int r = 0; r < kRanks; ++r) {
      Tensors sum;
      for (int step = 0; step < 3; ++step) {
        const Tensors one =
            copies(local_gradients<MlpImpl>(before, input_of(step, r), at::kBFloat16), at::kFloat);
        for (std::size_t i = 0; i < one.size(); ++i)
          step == 0 ? sum.push_back(one[i]) : (void)sum[i].add_(one[i]);
      }
      sums.push_back(sum);
    }
    {
      const auto guard = model->no_sync();
      for (int step = 0; step < 2; ++step) {
        square_loss(model->forward(input_of(step, rank))).backward();
        EXPECT_EQ(net->first->weight.scalar_type(), at::kFloat);
        EXPECT_EQ(net->first->weight.grad().scalar_type(), at::kFloat);
      }
    }
    square_loss(model->forward(input_of(2, rank))).backward();
    Tensors expected;
    for (std::size_t i = 0; i < before.size(); ++i)
      expected.push_back(averaged({sums[0][i], sums[1][i]}, at::kBFloat16));
    expect_equal(gradients_of(net->parameters()), expected, "accumulated");
  });
}

TEST(MixedPrecision, SeveralForwardsMayPrecedeTheBackwards) {
  constexpr int kRanks = 2;
  run_threads(kRanks, [](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    DistributedDataParallel model(net, {.mixed_precision = in(at::kBFloat16, at::kFloat)});
    const Tensors before = copies(net->parameters(), at::kFloat);
    const at::Tensor first = square_loss(model->forward(input_of(0, rank)));
    const at::Tensor second = square_loss(model->forward(input_of(1, rank)));
    first.backward();
    expect_equal(gradients_of(net->parameters()),
                 formula<MlpImpl>(before, 0, kRanks, at::kBFloat16, at::kFloat), "first");
    model->zero_grad();
    second.backward();
    expect_equal(gradients_of(net->parameters()),
                 formula<MlpImpl>(before, 1, kRanks, at::kBFloat16, at::kFloat), "second");
    EXPECT_EQ(net->first->weight.scalar_type(), at::kFloat);
  });
}

TEST(MixedPrecision, AllowsDoubleBackward) {
  run_threads(2, [](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    DistributedDataParallel model(net, {.mixed_precision = in(at::kBFloat16, at::kFloat)});
    const at::Tensor x = input_of(0, rank).set_requires_grad(true);
    const at::Tensor output = model->forward(x);
    const at::Tensor slope = torch::autograd::grad({output.sum()}, {x}, {}, true, true)[0];
    (square_loss(output) + slope.square().sum()).backward();
    for (const at::Tensor& parameter : net->parameters()) {
      ASSERT_EQ(parameter.scalar_type(), at::kFloat);
      ASSERT_EQ(parameter.grad().scalar_type(), at::kFloat);
      at::Tensor highest = parameter.grad().clone();
      all_reduce(highest, {.op = ReduceOp::kMax});
      EXPECT_TRUE(torch::equal(highest, parameter.grad()));
    }
  });
}

struct ChoosyImpl : torch::nn::Module {
  ChoosyImpl() {
    left = register_parameter("left", torch::ones({kIn}));
    right = register_parameter("right", torch::ones({kIn}));
  }
  at::Tensor forward(const at::Tensor& x, bool to_left) { return x * (to_left ? left : right); }
  at::Tensor left, right;
};

TEST(MixedPrecision, WorksWithUnusedParametersAndAStaticGraph) {
  for (const bool fixed : {false, true}) {
    run_threads(2, [&](int rank) {
      auto net = std::make_shared<ChoosyImpl>();
      DistributedDataParallel model(
          net,
          {.find_unused_parameters = !fixed, .static_graph = fixed, .mixed_precision = in(at::kBFloat16)});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        const bool to_left = (fixed ? rank : rank + step) % 2 == 0;
        model->forward(torch::full({kIn}, 2.0), to_left).sum().backward();
        for (const at::Tensor& parameter : net->parameters()) {
          EXPECT_TRUE(torch::equal(parameter.grad(), torch::ones({kIn}))) << fixed << parameter.grad();
          EXPECT_EQ(parameter.scalar_type(), at::kFloat);
        }
      }
      if (!fixed) {
        model->zero_grad();
        model->forward(torch::ones({kIn}), true).sum().backward();
        EXPECT_FALSE(net->right.grad().defined());
      }
    });
  }
}

TEST(MixedPrecision, HooksSeeBucketsOfTheReductionsType) {
  run_threads(2, [](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    DistributedDataParallel model(net, {.mixed_precision = in(at::kBFloat16, at::kHalf)});
    std::vector<at::ScalarType> seen;
    const CommHook average = allreduce_hook();
    model->register_comm_hook({.run =
                                   [&](GradBucket& bucket) {
                                     seen.push_back(bucket.buffer().scalar_type());
                                     return average.run(bucket);
                                   },
                               .name = "watch"});
    model->forward(input_of(0, rank)).sum().backward();
    ASSERT_EQ(seen.size(), 1u);
    EXPECT_EQ(seen[0], at::kHalf);
  });
}

TEST(MixedPrecision, AnOptimizerInsideBackwardStepsTheFullParameters) {
  run_threads(2, [](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    DistributedDataParallel model(net, {.mixed_precision = in(at::kBFloat16)});
    model->register_fused_optimizer(
        std::make_shared<FunctionalSGD>(net->parameters(), torch::optim::SGDOptions(0.1)));
    const Tensors before = copies(net->parameters(), at::kFloat);
    const Tensors gradients = formula<MlpImpl>(before, 0, 2, at::kBFloat16, at::kBFloat16);
    square_loss(model->forward(input_of(0, rank))).backward();
    for (std::size_t i = 0; i < before.size(); ++i) {
      const at::Tensor parameter = net->parameters()[i];
      EXPECT_TRUE(torch::allclose(parameter.detach(), before[i] - 0.1 * gradients[i], 0, 1e-7)) << i;
    }
  });
}

TEST(MixedPrecision, ParametersThatAreShortAlreadyKeepTheirPlace) {
  run_threads(2, [](int rank) {
    auto net = std::make_shared<ChoosyImpl>();
    net->left.set_data(net->left.to(at::kBFloat16));
    DistributedDataParallel model(net,
                                  {.find_unused_parameters = true, .mixed_precision = in(at::kBFloat16)});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      const at::Tensor x = torch::full({kIn}, rank + 1.0);
      (model->forward(x, true) + model->forward(x, false)).sum().backward();
      EXPECT_TRUE(torch::equal(net->left.grad(), torch::full({kIn}, 1.5, at::kBFloat16)));
      EXPECT_TRUE(torch::equal(net->right.grad(), torch::full({kIn}, 1.5)));
    }
  });
}

TEST(MixedPrecision, ServesScriptsToo) {
  run_threads(2, [](int rank) {
    torch::jit::Module net("net");
    net.register_parameter("weight", torch::full({kIn}, 0.3).set_requires_grad(true), false);
    net.register_buffer("scale", torch::ones({1}));
    net.define("def forward(self, x):\n  return [x * self.weight * self.scale]\n");
    MixedPrecision mixed = in(at::kBFloat16);
    mixed.buffer_dtype = at::kBFloat16;
    DistributedDataParallel model(net, {.mixed_precision = mixed});
    EXPECT_EQ(model->buffers()[0].scalar_type(), at::kBFloat16);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor y = model(torch::full({kIn}, rank + 1.0)).toTensorVector()[0];
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      y.sum().backward();
      const at::Tensor weight = net.attr("weight").toTensor();
      EXPECT_EQ(weight.scalar_type(), at::kFloat);
      EXPECT_TRUE(torch::equal(weight.grad(), torch::full({kIn}, 1.5)));
      weight.mutable_grad().reset();
    }
  });
}

TEST(MixedPrecision, RefusesWhatItCannotServe) {
  run_threads(2, [](int) {
    const auto words = [](MixedPrecision mixed, bool views = false) {
      return refusal([&] {
        DistributedDataParallel model(Mlp(), {.gradient_as_bucket_view = views, .mixed_precision = mixed});
      });
    };
    EXPECT_NE(words(in(at::kInt)).find("param_dtype is Int"), std::string::npos);
    EXPECT_NE(words(in(at::kHalf, at::kLong)).find("reduce_dtype is Long"), std::string::npos);
    EXPECT_NE(words(in(at::kHalf), true).find("gradient_as_bucket_view"), std::string::npos);
    const std::string sparse = refusal([] {
      torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
      DistributedDataParallel model(table, {.mixed_precision = in(at::kBFloat16)});
    });
    EXPECT_NE(sparse.find("sparse"), std::string::npos) << sparse;
  });
}

}  // namespace
}  // namespace lockstep
