// Plans on stock modules, against one process: values, gradients, the number of collectives, what is refused.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/parallel/loss_parallel.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/prepare.h"

namespace lockstep {
namespace {

using testing::refused;
using testing::world;

at::Tensor numbers(at::IntArrayRef sizes, double shift = 0) {
  return (at::arange(c10::multiply_integers(sizes), at::kFloat) * 0.37 + shift).sin().reshape(sizes);
}
at::Tensor whole(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? full_tensor(tensor.detach()) : tensor.detach();
}
void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(whole(actual).sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(whole(actual), expected.detach(), 1e-4, 1e-5))
      << what << " differs by " << (whole(actual) - expected).abs().max();
}

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    up = register_module("up", torch::nn::Linear(8, 12));
    down = register_module("down", torch::nn::Linear(12, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int n) {
    words = register_module("words", torch::nn::Embedding(10, 8));
    for (int i = 0; i < n; ++i) layers->push_back(Mlp());
    register_module("layers", layers);
    for (auto& p : parameters()) p.detach().copy_(numbers(p.sizes(), p.numel()) * 0.4);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = prepare_inputs(*this, {words(tokens)})[0];
    for (const auto& layer : *layers) x = x + layer->as<MlpImpl>()->forward(x);
    return prepare_outputs(*this, {x})[0];
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Net);

const auto kTokens = (at::arange(12, at::kLong) * 7).remainder(10).reshape({3, 4});

void expect_same_training(Net& one, Net& many, const std::string& what) {
  const auto a = one(kTokens).pow(2).mean();
  const auto b = many(kTokens).pow(2).mean();
  expect_close(b, a, what + " loss");
  a.backward();
  b.backward();
  for (const auto& item : one->named_parameters()) {
    const auto gradient = many->named_parameters()[item.key()].grad();
    ASSERT_TRUE(gradient.defined()) << what << " " << item.key();
    expect_close(gradient, item.value().grad(), what + " " + item.key());
  }
  torch::optim::SGD(one->parameters(), 0.1).step();
  torch::optim::SGD(many->parameters(), 0.1).step();
  for (const auto& item : one->named_parameters()) {
    expect_close(many->named_parameters()[item.key()], item.value(), what + " after a step, " + item.key());
  }
}

TEST(Parallelize, ColumnsAndRowsGiveWhatOneProcessGives) {
  for (const int n : {2, 3}) {
    world(n, [&](int) {
      const auto mesh = init_device_mesh("cpu", {n}, {.mesh_dim_names = {"tp"}});
      for (const ParallelStyle& words : {ParallelStyle(RowwiseParallel()),
                                         ParallelStyle(ColwiseParallel{.output_layouts = Replicate()})}) {
        Net one(2), many(2);
        parallelize_module(
            *many, mesh,
            {{"words", words}, {"layers.*.up", ColwiseParallel()}, {"layers.*.down", RowwiseParallel()}});
        EXPECT_EQ(placements(many->named_parameters()["layers.1.up.weight"]), Placements{Shard(0)});
        EXPECT_EQ(placements(many->named_parameters()["layers.1.up.bias"]), Placements{Shard(0)});
        EXPECT_EQ(placements(many->named_parameters()["layers.0.down.weight"]), Placements{Shard(1)});
        EXPECT_EQ(placements(many->named_parameters()["layers.0.down.bias"]), Placements{Replicate()});
        expect_same_training(one, many, base::cat(n, " ranks"));
      }
    });
  }
}

TEST(Parallelize, ALayerCostsOneReductionEachWay) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    Mlp mlp;
    parallelize_module(*mlp, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    const auto x = numbers({4, 8}).requires_grad_();
    at::Tensor y;
    {
      const CommDebugScope scope;
      y = mlp(x);
      EXPECT_FALSE(is_dtensor(y));
      EXPECT_EQ(scope.describe(), "all_reduce 1");
    }
    const CommDebugScope scope;
    y.sum().backward();
    EXPECT_EQ(scope.describe(), "all_reduce 1");
  });
}

// Sequences split around the layers, whole at the end.
const ParallelPlan& sequence_plan() {
  static const ParallelPlan plan{
      {"words", RowwiseParallel{.output_layouts = Shard(1), .use_local_output = false}},
      {"layers.*.norm", SequenceParallel()},
      {"layers.*.up", ColwiseParallel{.input_layouts = Shard(1)}},
      {"layers.*.down", RowwiseParallel{.output_layouts = Shard(1), .use_local_output = false}},
      {"", PrepareModuleOutput{.output_layouts = {Shard(1)}, .desired_output_layouts = {Replicate()}}}};
  return plan;
}

TEST(Parallelize, SequencesAreGatheredBeforeALayerAndScatteredAfterIt) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    Net one(2), many(2);
    parallelize_module(*many, mesh, sequence_plan());
    {
      const CommDebugScope scope;
      many(kTokens);
      // words; gather and scatter per layer; the result.
      EXPECT_EQ(scope.total(), 6) << scope.describe();
    }
    expect_same_training(one, many, "sequence");
  });
}

// torch::nn::Linear adds the bias of a three-dimensional input after the product, which is a local tensor by
// then.
TEST(Parallelize, ABiasFitsTheLocalProductWhateverItsLayout) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = numbers({3, 4, 8});
    for (const Placement& output : {Placement(Replicate()), Placement(Shard(1)), Placement(Shard(2))}) {
      for (const ParallelStyle& style :
           {ParallelStyle(ColwiseParallel{.output_layouts = output}),
            ParallelStyle(RowwiseParallel{.input_layouts = Replicate(), .output_layouts = output})}) {
        const auto what = base::cat(style.index() == 0 ? "Colwise " : "Rowwise ", to_string(output));
        torch::nn::Linear one(8, 6), many(8, 6);
        for (auto& p : one->parameters()) p.detach().copy_(numbers(p.sizes(), p.numel()));
        for (auto& p : many->parameters()) p.detach().copy_(numbers(p.sizes(), p.numel()));
        parallelize_module(*many, mesh, style);
        const auto y = from_local(many(x), mesh, {output});
        expect_close(y, one(x), what);
        full_tensor(y).pow(2).sum().backward();
        one(x).pow(2).sum().backward();
        EXPECT_EQ(placements(many->bias.grad()), placements(many->bias)) << what;
        expect_close(many->bias.grad(), one->bias.grad(), what + " bias");
        expect_close(many->weight.grad(), one->weight.grad(), what + " weight");
      }
    }
  });
}

// However a gradient comes about, it arrives in its parameter's placements, so that an optimizer that reads it
// several times sends nothing.
TEST(Parallelize, GradientsArriveAsTheirParametersAreAndAStepSendsNothing) {
  for (const int n : {2, 3}) {
    world(n, [n](int) {
      const auto mesh = init_device_mesh("cpu", {n});
      Net many(2), sequences(2);
      parallelize_module(*many, mesh,
                         {{"words", RowwiseParallel()},
                          {"layers.*.up", ColwiseParallel()},
                          {"layers.*.down", RowwiseParallel()}});
      parallelize_module(*sequences, mesh, sequence_plan());
      for (auto* net : {&many, &sequences}) {
        torch::optim::AdamW optimizer((*net)->parameters());
        for (int step = 0; step < 2; ++step) {
          optimizer.zero_grad();
          (*net)(kTokens).pow(2).mean().backward();
          for (const auto& item : (*net)->named_parameters()) {
            if (!is_dtensor(item.value())) continue;
            EXPECT_EQ(placements(item.value().grad()), placements(item.value())) << item.key();
          }
          const CommDebugScope scope;
          optimizer.step();
          EXPECT_EQ(scope.describe(), "none");
        }
      }
    });
  }
}

// One reduction per backward pass for each parameter of a norm, whose gradient is a sum over the sequence.
TEST(Parallelize, TheGradientsOfASequenceParallelNormAreReducedOnce) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
    parallelize_module(*norm, mesh, SequenceParallel());
    const auto x = distribute_tensor(numbers({3, 4, 8}), mesh, {Shard(1)}).requires_grad_();
    const auto y = norm(x);
    const CommDebugScope scope;
    y.pow(2).sum().backward();
    EXPECT_EQ(scope.describe(), "all_reduce 2");
  });
}

// libtorch has no such module in C++.
struct RmsNormImpl : torch::nn::Module {
  RmsNormImpl() : weight(register_parameter("weight", numbers({8}, 1) + 2)) {}
  at::Tensor forward(const at::Tensor& x) { return at::rms_norm(x, {8}, weight, 1e-6); }
  at::Tensor weight;
};
TORCH_MODULE(RmsNorm);

TEST(Parallelize, AnRmsNormOfOnesOwnWorksOnSplitSequences) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = numbers({2, 5, 8});
    const auto one_input = whole.clone().requires_grad_();
    RmsNorm one, many;
    const auto expected = one(one_input);
    (expected * expected).sum().backward();
    parallelize_module(*many, mesh, SequenceParallel());
    EXPECT_EQ(placements(many->weight), Placements{Replicate()});
    const auto x = distribute_tensor(whole, mesh, {Shard(1)}).requires_grad_();
    {
      const CommDebugScope scope;
      const auto y = many(x);
      EXPECT_EQ(placements(y), Placements{Shard(1)});
      (y * y).sum().backward();
      EXPECT_EQ(scope.describe(), "all_reduce 1");  // the weight's gradient, a sum over the sequence
      expect_close(y, expected, "result");
    }
    expect_close(x.grad(), one_input.grad(), "gradient of the input");
    expect_close(many->weight.grad(), one->weight.grad(), "gradient of the weight");
    // A plain tensor is this rank's part of the sequence.
    RmsNorm local;
    parallelize_module(*local, mesh, SequenceParallel{.use_local_output = true});
    const auto part = local(numbers({2, 4, 8}).narrow(1, 2 * rank, 2));
    EXPECT_FALSE(is_dtensor(part));
    expect_close(part, at::rms_norm(numbers({2, 4, 8}), {8}, one->weight, 1e-6).narrow(1, 2 * rank, 2),
                 "part");
  });
}

TEST(LossParallel, TakesPlainTargetsAndWhatTorchRefuses) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto logits = numbers({6, 7});
    const auto classes = (at::arange(6, at::kLong) * 5).remainder(7);
    const auto chances = numbers({6, 7}, 3).softmax(1);
    const auto weight = numbers({7}, 1) + 2;
    const auto check = [&](const at::Tensor& targets, const std::optional<at::Tensor>& weights,
                           std::int64_t ignored, double smoothing, const std::string& what) {
      const auto a = logits.clone().requires_grad_();
      const auto b = distribute_tensor(logits, mesh, {Shard(1)}).requires_grad_();
      const auto expected =
          at::cross_entropy_loss(a, targets, weights, at::Reduction::Mean, ignored, smoothing);
      expected.backward();
      const CommDebugScope comm;
      const LossParallelScope scope;
      auto loss = at::cross_entropy_loss(b, targets, weights, at::Reduction::Mean, ignored, smoothing);
      loss.backward();
      EXPECT_EQ(comm.count(OpType::kAllGather) + comm.count(OpType::kAllGatherIntoTensor), 0) << what;
      expect_close(loss, expected, what);
      expect_close(b.grad(), a.grad(), what + " gradient");
    };
    check(classes, {}, -100, 0, "classes");
    check(classes, weight, -100, 0, "weighted");
    check(classes, {}, 3, 0, "ignored");
    check(classes, {}, -100, 0.1, "smoothed");
    check(chances, {}, -100, 0, "probabilities");
  });
}

TEST(LossParallel, RefusesALossThatWouldGatherTheClasses) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto logits = distribute_tensor(numbers({6, 7}), mesh, {Shard(1)});
    const auto classes = distribute_tensor((at::arange(6, at::kLong) * 5).remainder(7), mesh);
    const CommDebugScope comm;
    {
      const LossParallelScope scope;
      const auto failure = testing::caught([&] { at::multi_margin_loss(logits, classes); });
      EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
      EXPECT_TRUE(testing::says(failure,
                                "aten::multi_margin_loss([Shard(1)] [6, 7], [Replicate()] [6]): this loss "
                                "would gather a sharded input"))
          << failure.message;
      EXPECT_EQ(comm.describe(), "none");
    }
    at::multi_margin_loss(logits, classes);
    EXPECT_EQ(comm.total(), 1);
  });
}

TEST(Parallelize, PairwiseIsColumnsAndRowsInTurn) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    Mlp mlp;
    parallelize_module(*mlp, mesh, PairwiseParallel());
    EXPECT_EQ(placements(mlp->up->weight), Placements{Shard(0)});
    EXPECT_EQ(placements(mlp->down->weight), Placements{Shard(1)});
  });
}

TEST(Parallelize, DistributeModuleReplicatesWhatNobodyPlaced) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    Mlp mlp;
    distribute_module(*mlp, mesh,
                      [](const std::string& path, torch::nn::Module& module, const DeviceMesh& where) {
                        if (path == "up")
                          distribute_parameter(module.as<torch::nn::Linear>()->weight, where, {Shard(0)});
                      });
    EXPECT_EQ(placements(mlp->up->weight), Placements{Shard(0)});
    EXPECT_EQ(placements(mlp->up->bias), Placements{Replicate()});
    EXPECT_EQ(placements(mlp->norm->weight), Placements{Replicate()});
  });
}

// Local outputs beside replicated parameters, as distribute_module leaves them, inside a scope.
struct ScaledImpl : torch::nn::Module {
  ScaledImpl() : scale(register_parameter("scale", numbers({8}, 1) + 2)) {
    mlp = register_module("mlp", Mlp());
    for (auto& p : mlp->parameters()) p.detach().copy_(numbers(p.sizes(), p.numel()) * 0.4);
  }
  at::Tensor forward(const at::Tensor& x) { return x + scale * mlp(x); }
  at::Tensor scale;
  Mlp mlp{nullptr};
};
TORCH_MODULE(Scaled);

TEST(Parallelize, LocalOutputsMeetReplicatedParametersInAScope) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    Scaled one, many;
    parallelize_module(*many, mesh, {{"mlp.up", ColwiseParallel()}, {"mlp.down", RowwiseParallel()}});
    distribute_module(*many, mesh);
    const auto x = numbers({4, 8});
    const ImplicitReplicationScope scope;
    one(x).pow(2).mean().backward();
    many(x).pow(2).mean().backward();
    for (const auto& item : one->named_parameters())
      expect_close(many->named_parameters()[item.key()].grad(), item.value().grad(), item.key());
  });
}

// One input is placed, one is left alone, and the functions see what the plan made of them.
struct TwoInputsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask) {
    const auto placed = prepare_inputs(*this, {x, mask});
    seen = placed;
    return prepare_outputs(*this, {placed[0] * 2})[0];
  }
  std::vector<at::Tensor> seen;
};
TORCH_MODULE(TwoInputs);

TEST(Parallelize, InputsArePlacedByThePlanAndThenByTheFunctions) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto x = numbers({4, 3});
    const auto mask = numbers({5});
    TwoInputs module;
    const std::vector<std::optional<Placement>> none_second{Shard(0), std::nullopt};
    parallelize_module(*module, mesh,
                       PrepareModuleInput{.input_layouts = {Replicate(), std::nullopt},
                                          .desired_input_layouts = none_second});
    const auto y = module(x, mask);
    EXPECT_EQ(placements(module->seen[0]), Placements{Shard(0)});
    EXPECT_TRUE(module->seen[1].is_same(mask));
    EXPECT_TRUE(at::equal(to_local(y), x.chunk(2)[rank] * 2));

    distribute_module(
        *module, mesh, {},
        [](std::vector<at::Tensor> inputs, const DeviceMesh& where) {
          EXPECT_EQ(placements(inputs[0]), Placements{Shard(0)});
          inputs[1] = distribute_tensor(inputs[1], where, {Replicate()});
          return inputs;
        },
        [](std::vector<at::Tensor> outputs, const DeviceMesh&) {
          return std::vector<at::Tensor>{full_tensor(outputs[0])};
        });
    EXPECT_TRUE(at::equal(module(x, mask), x * 2));
    EXPECT_EQ(placements(module->seen[1]), Placements{Replicate()});
    EXPECT_THROW(prepare_inputs(*module, {x}), Error);  // the plan has two
  });
}

TEST(Parallelize, RefusesPlansThatDoNotFitBeforeItChangesAnything) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto two = init_device_mesh("cpu", {2, 1});
    Mlp mlp;
    refused([&] { parallelize_module(*mlp, two, {{"up", ColwiseParallel()}}); }, "2 dimensions");
    refused(
        [&] {
          parallelize_module(*mlp, mesh, {{"up", ColwiseParallel()}, {"norm", ColwiseParallel()}});
        },
        "\"norm\" (torch::nn::LayerNormImpl): ColwiseParallel is for Linear and Embedding");
    EXPECT_FALSE(is_dtensor(mlp->up->weight));
    refused([&] { parallelize_module(*mlp, mesh, {{"up", SequenceParallel()}}); }, "LayerNorm and Dropout");
    refused(
        [&] {
          parallelize_module(*mlp, mesh, {{"", PrepareModuleInput{.input_layouts = {Shard(0)}}}});
        },
        "one length");
    refused([&] { parallelize_module(*mlp->up, mesh, PairwiseParallel()); }, "even number");
  });
}

std::vector<std::string>& warnings() {
  static std::vector<std::string> lines;
  return lines;
}

TEST(Parallelize, WarnsOfPathsThatNameNothing) {
  set_log_sink([](LogLevel level, std::string_view text) {
    if (level == LogLevel::kWarn) warnings().emplace_back(text);
  });
  world(1, [](int) {
    const auto mesh = init_device_mesh("cpu", {1});
    Mlp mlp;
    parallelize_module(*mlp, mesh, {{"nothing.*", ColwiseParallel()}});
    parallelize_module(*mlp, mesh, ParallelPlan{});
  });
  set_log_sink(nullptr);
  ASSERT_EQ(warnings().size(), 2U);
  EXPECT_NE(warnings()[0].find("no submodule is called \"nothing.*\""), std::string::npos);
  EXPECT_NE(warnings()[1].find("the plan is empty"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
