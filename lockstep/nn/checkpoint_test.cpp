// checkpoint() in one process, both forms, against the plain call.
#include "lockstep/nn/checkpoint.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/tensor/gradient_access.h"
#include "lockstep/tensor/tensor_testing.h"

namespace lockstep {
namespace {

using torch::autograd::variable_list;

using tensor_testing::drawn;
using tensor_testing::refusal;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double dropout = 0) : rate(dropout) {
    first = register_module("first", torch::nn::Linear(6, 10));
    second = register_module("second", torch::nn::Linear(10, 6));
    torch::NoGradGuard no_grad;
    std::uint64_t seed = 0;
    for (auto& parameter : parameters()) parameter.copy_(0.3 * drawn(++seed, parameter.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) {
    ++n_runs;
    return second(torch::dropout(torch::tanh(first(x)), rate, is_training())).exp();
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  double rate;
  int n_runs = 0;
};
TORCH_MODULE(Block);

void expect_same_bits(const variable_list& a, const variable_list& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << "tensor " << i;
}

// Gradients of the input and all parameters after a step through `run`.
template <class Run>
variable_list gradients_of(Block block, const Run& run) {
  block->zero_grad(true);
  at::Tensor x = drawn(9, {4, 6}).requires_grad_();
  run(x).square().sum().backward();
  variable_list gradients{x.grad()};
  for (const auto& parameter : block->parameters()) gradients.push_back(parameter.grad().clone());
  return gradients;
}

class Checkpointing : public ::testing::TestWithParam<bool> {
 protected:
  Checkpoint checkpointed{.use_reentrant = GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Both, Checkpointing, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Reentrant" : "NonReentrant"; });

TEST_P(Checkpointing, GivesTheGradientsOfThePlainCallBitForBit) {
  Block block;
  const auto plain = gradients_of(block, [&](const at::Tensor& x) { return block(block(x)); });
  block->n_runs = 0;
  const auto saved =
      gradients_of(block, [&](const at::Tensor& x) { return checkpointed(block, checkpointed(block, x)); });
  expect_same_bits(plain, saved);
  EXPECT_EQ(block->n_runs, 4) << "each of two regions runs twice";
}

TEST_P(Checkpointing, RepeatsTheRandomNumbersAndLeavesTheGeneratorWhereItWas) {
  Block block(0.5);
  torch::manual_seed(3);
  const auto plain = gradients_of(block, [&](const at::Tensor& x) { return block(x); });
  const at::Tensor next = torch::rand({3});
  torch::manual_seed(3);
  const auto saved = gradients_of(block, [&](const at::Tensor& x) {
    const at::Tensor y = checkpointed(block, x);
    return y;
  });
  expect_same_bits(plain, saved);
  EXPECT_TRUE(torch::equal(next, torch::rand({3})));
}

TEST_P(Checkpointing, DrawsNewNumbersWhenTheStateIsNotPreserved) {
  Block block(0.5);
  checkpointed.preserve_rng_state = false;
  torch::manual_seed(3);
  const auto plain = gradients_of(block, [&](const at::Tensor& x) { return block(x); });
  torch::manual_seed(3);
  const auto saved = gradients_of(block, [&](const at::Tensor& x) { return checkpointed(block, x); });
  EXPECT_FALSE(torch::equal(plain[1], saved[1]));
}

TEST_P(Checkpointing, TakesAndReturnsContainersTuplesOptionalsAndOtherThings) {
  using Out = std::tuple<std::vector<at::Tensor>, std::optional<at::Tensor>,
                         std::map<std::string, at::Tensor>, int, at::Tensor>;
  const auto fn = [](const std::vector<at::Tensor>& xs, const std::pair<at::Tensor, double>& scaled,
                     const std::string& name) -> Out {
    return {{xs[0].exp(), xs[1].sin() * scaled.first * scaled.second},
            xs[0].cos(),
            {{name, xs[1].tanh()}},
            7,
            at::Tensor()};
  };
  const auto run = [&](bool plain) {
    const variable_list leaves{drawn(1, {3}).requires_grad_(), drawn(2, {3}).requires_grad_(),
                               drawn(3, {3}).requires_grad_()};
    const std::vector<at::Tensor> xs{leaves[0], leaves[1]};
    const std::pair<at::Tensor, double> scaled{leaves[2], 2.5};
    Out out = plain ? fn(xs, scaled, "key") : checkpointed(fn, xs, scaled, std::string("key"));
    EXPECT_EQ(std::get<3>(out), 7);
    EXPECT_FALSE(std::get<4>(out).defined());
    at::Tensor sum = std::get<2>(out).at("key").sum() + std::get<1>(out)->prod();
    for (const auto& tensor : std::get<0>(out)) sum = sum + tensor.sum();
    sum.backward();
    return variable_list{leaves[0].grad(), leaves[1].grad(), leaves[2].grad(), sum.detach()};
  };
  expect_same_bits(run(true), run(false));
}

TEST_P(Checkpointing, InputsWithoutGradientsAndIntegersPassThrough) {
  Block block;
  const at::Tensor mask = torch::tensor({0, 1, 1, 0});
  const auto fn = [&](const at::Tensor& x, const at::Tensor& rows) {
    return std::pair(block(x) * rows.unsqueeze(1), rows + 1);
  };
  const auto plain = gradients_of(block, [&](const at::Tensor& x) { return fn(x, mask).first; });
  const auto saved = gradients_of(block, [&](const at::Tensor& x) {
    const auto [y, count] = checkpointed(fn, x, mask);
    EXPECT_FALSE(count.requires_grad());
    EXPECT_TRUE(torch::equal(count, mask + 1));
    return y;
  });
  expect_same_bits(plain, saved);
}

TEST_P(Checkpointing, IsThePlainCallWithoutGradients) {
  torch::NoGradGuard no_grad;
  Block block;
  const at::Tensor x = drawn(4, {2, 6});
  const at::Tensor y = checkpointed(block, x);
  EXPECT_EQ(block->n_runs, 1);
  EXPECT_FALSE(y.requires_grad());
}

TEST_P(Checkpointing, RegionsMayBeNested) {
  Block block(0.5);
  const auto two = [&](const at::Tensor& x) { return block(block(x)); };
  torch::manual_seed(5);
  const auto plain = gradients_of(block, [&](const at::Tensor& x) { return two(two(x)); });
  torch::manual_seed(5);
  const auto inner = [&](const at::Tensor& x) { return checkpointed(block, checkpointed(block, x)); };
  const auto saved = gradients_of(block, [&](const at::Tensor& x) {
    return checkpointed([&](const at::Tensor& t) { return inner(inner(t)); }, x);
  });
  expect_same_bits(plain, saved);
}

TEST_P(Checkpointing, KeepsTheInputsAndNothingElse) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> inside;
  const auto watch = [&](const at::Tensor& tensor) {
    inside.emplace_back(tensor.storage().getWeakStorageImpl());
    return tensor;
  };
  const auto fn = [&](const at::Tensor& x) { return watch(watch(x.exp()).sin().exp()).sum(); };
  const auto alive = [&] {
    return std::count_if(inside.begin(), inside.end(), [](auto& storage) { return !storage.expired(); });
  };
  at::Tensor x = drawn(6, {64}).requires_grad_();
  {
    const at::Tensor plain = fn(x);
    EXPECT_EQ(alive(), 2) << "the plain call keeps what it needs";
  }
  inside.clear();
  at::Tensor loss = checkpointed(fn, x);
  EXPECT_EQ(alive(), 0);
  loss.backward();
  EXPECT_TRUE(x.grad().defined());
  loss.reset();
  EXPECT_EQ(alive(), 0) << "after backward";
}

TEST(CheckpointNonReentrant, AnOuterRegionDoesNotKeepTheInputsOfAnInnerOne) {
  c10::weak_intrusive_ptr<c10::StorageImpl> between{c10::intrusive_ptr<c10::StorageImpl>()};
  const auto inner = [](const at::Tensor& t) { return t.sin().exp(); };
  const auto outer = [&](const at::Tensor& t) {
    const at::Tensor middle = t.exp();
    between = middle.storage().getWeakStorageImpl();
    return checkpoint(inner, middle).sum();
  };
  at::Tensor x = drawn(6, {64}).requires_grad_();
  const at::Tensor loss = checkpoint(outer, x);
  EXPECT_TRUE(between.expired());
  loss.backward();
  EXPECT_TRUE(torch::allclose(x.grad(), x.exp().sin().exp() * x.exp().cos() * x.exp()));
}

TEST(CheckpointNonReentrant, SeesWhatTheFunctionCapturesAndWorksWithGrad) {
  at::Tensor w = drawn(1, {5}).requires_grad_(), x = drawn(2, {5});
  const at::Tensor v = w.exp();  // captured, with a history of its own
  const at::Tensor plain = torch::autograd::grad({(v * x).sin().exp().sum()}, {w})[0];
  const at::Tensor v2 = w.exp();
  const at::Tensor y = checkpoint([&](const at::Tensor& t) { return (v2 * t).sin().exp(); }, x);
  EXPECT_TRUE(torch::equal(torch::autograd::grad({y.sum()}, {w})[0], plain));
}

TEST(CheckpointNonReentrant, RetainedGraphsAndDoubleBackwardWork) {
  at::Tensor x = drawn(2, {5}).requires_grad_();
  const auto fn = [](const at::Tensor& t) { return t.sin().exp().tanh(); };
  const auto second = [&](const at::Tensor& y) {
    const at::Tensor once = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    return torch::autograd::grad({once.square().sum()}, {x}, {}, true)[0];
  };
  const at::Tensor plain = fn(x), saved = checkpoint(fn, x);
  const at::Tensor want = second(plain);
  EXPECT_TRUE(torch::equal(second(saved), want));
  EXPECT_TRUE(torch::equal(second(saved), want)) << "and once more over the same graph";
}

TEST(CheckpointNonReentrant, TheFunctionMayItselfDifferentiate) {
  const auto penalty = [](const at::Tensor& t) {
    const at::Tensor y = t.sin().exp();
    return torch::autograd::grad({y.sum()}, {t}, {}, true, true)[0].square().sum() + y.sum();
  };
  at::Tensor a = drawn(2, {5}).requires_grad_(), b = drawn(2, {5}).requires_grad_();
  penalty(a).backward();
  checkpoint(penalty, b).backward();
  EXPECT_TRUE(torch::equal(a.grad(), b.grad()));
}

TEST(CheckpointNonReentrant, TheSecondRunEndsEarlyUnlessDisabled) {
  for (const bool early_stop : {true, false}) {
    int n_ended = 0;
    at::Tensor x = drawn(2, {5}).requires_grad_();
    const auto fn = [&](const at::Tensor& t) {
      const at::Tensor y = t.exp() + 1;  // the sum saves nothing
      ++n_ended;
      return y;
    };
    Checkpoint{.early_stop = early_stop}(fn, x).sum().backward();
    EXPECT_EQ(n_ended, early_stop ? 1 : 2);
    EXPECT_TRUE(torch::equal(x.grad(), x.exp()));
  }
}

TEST(CheckpointNonReentrant, AnotherNumberOfTensorsInTheSecondRunIsAnError) {
  for (const bool more : {false, true}) {
    int n_runs = 0;
    at::Tensor x = drawn(2, {5}).requires_grad_();
    const auto fn = [&](const at::Tensor& t) {
      return (n_runs++ == 0) == more ? t.exp() : t.exp().sin().cos();
    };
    const at::Tensor y = Checkpoint{.early_stop = false}(fn, x).sum();
    const auto words = refusal([&] { y.backward(); });
    EXPECT_NE(words.find("second run of the function saved"), std::string::npos) << words;
  }
}

TEST(CheckpointNonReentrant, OtherSizesInTheSecondRunAreAnErrorUnlessNotChecked) {
  const auto run = [](bool check) {
    int n_runs = 0;
    at::Tensor x = drawn(2, {5}).requires_grad_();
    const auto fn = [&](const at::Tensor& t) {
      return (n_runs++ == 0 ? t : t.slice(0, 0, 3).clone()).exp().sum();
    };
    Checkpoint{.determinism_check = check}(fn, x).backward();
  };
  const auto words = refusal([&] { run(true); });
  EXPECT_NE(words.find("was Float[5] on cpu in the first run and is Float[3] on cpu"), std::string::npos)
      << words;
  EXPECT_THROW(run(false), c10::Error) << "torch notices that sizes do not fit";
}

TEST(CheckpointReentrant, OtherResultsInTheSecondRunAreAnError) {
  const auto run = [](bool number) {
    int n_runs = 0;
    at::Tensor x = drawn(2, {5}).requires_grad_();
    const auto fn = [&](const at::Tensor& t) -> std::vector<at::Tensor> {
      if (n_runs++ == 0) return {t.exp()};
      if (number) return {t.exp(), t.sin()};
      return {t.exp().slice(0, 0, 3)};
    };
    Checkpoint{.use_reentrant = true}(fn, x)[0].sum().backward();
  };
  auto words = refusal([&] { run(true); });
  EXPECT_NE(words.find("returned 2 tensors, the first 1"), std::string::npos) << words;
  words = refusal([&] { run(false); });
  EXPECT_NE(words.find("was [5] in the first run and is [3]"), std::string::npos) << words;
}

TEST(CheckpointReentrant, SaysThatItWorksWithBackwardOnly) {
  at::Tensor x = drawn(2, {5}).requires_grad_();
  const at::Tensor y = Checkpoint{.use_reentrant = true}([](const at::Tensor& t) { return t.exp(); }, x);
  const auto words = refusal([&] { torch::autograd::grad({y.sum()}, {x}); });
  EXPECT_NE(words.find("backward() only"), std::string::npos) << words;
}

class InBackward final : public GradientProvider {
 public:
  std::shared_ptr<GradientAccess> current() const override { return nullptr; }
  bool in_backward() const noexcept override { return true; }
};

TEST(CheckpointReentrant, IsRefusedWhereGradientsDoNotBelongInTheTensors) {
  at::Tensor x = drawn(2, {5}).requires_grad_();
  const at::Tensor y = Checkpoint{.use_reentrant = true}([](const at::Tensor& t) { return t.exp(); }, x);
  static const InBackward provider;
  set_gradient_provider(&provider);
  const auto words = refusal([&] { y.sum().backward(); });
  set_gradient_provider(nullptr);
  EXPECT_NE(words.find("leave use_reentrant off"), std::string::npos) << words;
}

TEST(CheckpointNonReentrant, AnInputChangedInPlaceIsNoticed) {
  at::Tensor x = drawn(2, {5}).requires_grad_();
  at::Tensor t = x * 2;
  const at::Tensor y = checkpoint([](const at::Tensor& u) { return u.exp().sin(); }, t).sum();
  t.add_(1);
  EXPECT_THROW(y.backward(), c10::Error);
}

TEST(CheckpointNonReentrant, AnErrorOfTheFunctionComesThroughAndLeavesNothingBehind) {
  at::Tensor x = drawn(2, {5}).requires_grad_();
  const auto bad = [](const at::Tensor&) -> at::Tensor { base::raise(ErrorKind::kUsage, "told so"); };
  EXPECT_EQ(refusal([&] { checkpoint(bad, x); }), "told so");
  c10::weak_intrusive_ptr<c10::StorageImpl> kept{c10::intrusive_ptr<c10::StorageImpl>()};
  const at::Tensor y = [&] {
    const at::Tensor middle = x.exp();
    kept = middle.storage().getWeakStorageImpl();
    return middle.sin();
  }();
  EXPECT_FALSE(kept.expired()) << "a plain call after it keeps its tensors";
}

TEST(CheckpointNonReentrant, AutocastingIsInForceInTheSecondRun) {
  const auto fn = [](const at::Tensor& t) {
    return std::pair(torch::mm(t, t).sin(), 0).first.to(at::kFloat);
  };
  at::Tensor a = drawn(2, {8, 8}).requires_grad_(), b = drawn(2, {8, 8}).requires_grad_();
  const auto loss_of = [&](bool saved, const at::Tensor& t) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor loss = (saved ? checkpoint(fn, t) : fn(t)).sum();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return loss;
  };
  loss_of(false, a).backward();
  loss_of(true, b).backward();
  EXPECT_TRUE(torch::equal(a.grad(), b.grad()));
}

}  // namespace
}  // namespace lockstep
