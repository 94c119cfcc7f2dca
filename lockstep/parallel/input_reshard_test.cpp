// Saved activations sharded over the ranks: gradients, the memory that a graph holds, what is left alone.
#include "lockstep/parallel/input_reshard.h"

#include <c10/core/Allocator.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include "lockstep/base/detail/text.h"
#include "lockstep/collective/comm_debug.h"
#include "lockstep/dtensor/dtensor_testing.h"
#include "lockstep/dtensor/random.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/transformer_testing.h"

namespace lockstep {
namespace {

using testing::waves;
using testing::world;

constexpr std::int64_t kWidth = 16;
constexpr std::int64_t kFloats = 2 * 8 * kWidth;  // of an activation [2, 8, kWidth]

// What is between layers that are split: every rank computes all of it.
struct BetweenImpl : torch::nn::Module {
  BetweenImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::gelu(first(x))); }
  torch::nn::LayerNorm first{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::LayerNorm second{torch::nn::LayerNormOptions({kWidth})};
};
TORCH_MODULE(Between);

// The bytes allocated on this thread and not freed.
class HeldBytes final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, std::int64_t change, std::size_t, std::size_t, c10::Device) override {
    bytes_ += change;
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::int64_t bytes_ = 0;
};

struct Passed {
  std::int64_t held = 0;  // bytes, after forward
  std::string forward, backward;
  std::vector<at::Tensor> gradients;  // of the parameters and of the input
  at::Tensor result;
};

using Dim = std::optional<std::int64_t>;

// One pass forward and backward; `replicated` false: on plain tensors.
template <class Net>
Passed pass(Net& net, at::IntArrayRef sizes, const DeviceMesh& mesh, Dim dim,
            InputReshardOptions options = {}, bool replicated = true) {
  const auto held = std::make_shared<HeldBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, held);
  Passed passed;
  const auto leaf = waves(sizes).requires_grad_();
  at::Tensor y;
  {
    // Saved for backward, and nobody else keeps it.
    const auto x = (replicated ? from_local(leaf, mesh) : leaf) * 2;
    const CommDebugScope comm;
    const InputReshardScope scope(*net, mesh, dim, options);
    y = net(x);
    passed.forward = comm.describe();
  }
  passed.held = held->bytes();
  passed.result = (is_dtensor(y) ? full_tensor(y) : y).detach();
  net->zero_grad();
  const CommDebugScope comm;
  (y * y).sum().backward();
  passed.backward = comm.describe();
  for (const auto& parameter : net->parameters()) {
    const auto& gradient = parameter.grad();
    passed.gradients.push_back(is_dtensor(gradient) ? full_tensor(gradient) : gradient.clone());
  }
  passed.gradients.push_back(leaf.grad());
  return passed;
}

void expect_same(const Passed& actual, const Passed& expected) {
  EXPECT_TRUE(actual.result.equal(expected.result));
  ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
  for (std::size_t i = 0; i < actual.gradients.size(); ++i) {
    EXPECT_TRUE(actual.gradients[i].equal(expected.gradients[i])) << "gradient " << i;
  }
}

TEST(InputReshard, TheGraphHoldsAPieceOfWhatItSavedAndGradientsAreTheSame) {
  for (const int n : {2, 4}) {
    world(n, [&](int) {
      const auto mesh = init_device_mesh("cpu", {n});
      Between net;
      distribute_module(*net, mesh);
      const auto whole = pass(net, {2, 8, kWidth}, mesh, std::nullopt);
      const auto pieces = pass(net, {2, 8, kWidth}, mesh, 1);
      expect_same(pieces, whole);
      // Each norm saves its input, a mean and a scale per row; gelu saves its input.
      const auto saved = static_cast<std::int64_t>(sizeof(float)) * (3 * kFloats + 4 * kFloats / kWidth);
      EXPECT_EQ(whole.held - pieces.held, saved - saved / n);
      EXPECT_EQ(pieces.forward, "none");
      EXPECT_EQ(pieces.backward, "all_gather 7");
      EXPECT_EQ(whole.backward, "none");
    });
  }
}

TEST(InputReshard, PiecesNeedNotBeEqual) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    Between net;
    distribute_module(*net, mesh);
    for (const std::int64_t dim : {0, 1, -1, -2}) {
      const auto pieces = pass(net, {3, 5, kWidth}, mesh, dim);
      expect_same(pieces, pass(net, {3, 5, kWidth}, mesh, std::nullopt));
      // Of the norms' parameters, which have a dimension 0 too, nothing.
      EXPECT_EQ(pieces.backward, "all_gather 7");
    }
  });
}

TEST(InputReshard, ATransformerBlockKeepsItsSplitsAndItsParametersAsTheyAre) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    testing::DecoderBlock block(testing::DecoderOptions{.dropout = 0, .dtype = at::kFloat});
    testing::fill_with_waves(*block, at::kFloat);
    parallelize_module(*block, mesh, testing::tensor_plan(""));
    distribute_module(*block, mesh);
    const auto whole = pass(block, {2, 6, 8}, mesh, std::nullopt);
    const auto pieces = pass(block, {2, 6, 8}, mesh, 1);
    expect_same(pieces, whole);
    EXPECT_EQ(pieces.forward, whole.forward);
    // The input, mean and scale of each norm, and its result, which a split layer saves.
    EXPECT_EQ(whole.backward, "all_reduce 2");
    EXPECT_EQ(pieces.backward, "all_reduce 2, all_gather 8");
    EXPECT_LT(pieces.held, whole.held);
  });
}

TEST(InputReshard, ATensorThatIsSavedTwiceIsKeptOnce) {
  struct TwiceImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return at::gelu(x) + at::silu(x); }
  };
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    auto net = std::make_shared<TwiceImpl>();
    torch::nn::ModuleHolder<TwiceImpl> holder(net);
    const auto whole = pass(holder, {2, 8, kWidth}, mesh, std::nullopt);
    const auto pieces = pass(holder, {2, 8, kWidth}, mesh, 0);
    expect_same(pieces, whole);
    EXPECT_EQ(whole.held - pieces.held, static_cast<std::int64_t>(sizeof(float)) * kFloats / 2);
  });
}

TEST(InputReshard, SmallTensorsAreLeftAlone) {
  world(4, [](int) {
    const auto mesh = init_device_mesh("cpu", {4});
    Between net;
    distribute_module(*net, mesh);
    // Three rows: means and scales have fewer elements than there are ranks, activations have more.
    const auto whole = pass(net, {1, 3, kWidth}, mesh, std::nullopt);
    const auto pieces = pass(net, {1, 3, kWidth}, mesh, 2);
    expect_same(pieces, whole);
    EXPECT_EQ(pieces.backward, "all_gather 3");
    // No such dimension.
    EXPECT_EQ(pass(net, {1, 3, kWidth}, mesh, 3).backward, "none");
  });
}

TEST(InputReshard, PlainTensorsAreShardedOnlyWhenTheyAreSaidToBeReplicas) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    Between net;
    const auto whole = pass(net, {2, 8, kWidth}, mesh, std::nullopt, {}, false);
    const auto untouched = pass(net, {2, 8, kWidth}, mesh, 1, {}, false);
    const auto pieces = pass(net, {2, 8, kWidth}, mesh, 1, {.plain_tensors = true}, false);
    expect_same(untouched, whole);
    expect_same(pieces, whole);
    EXPECT_EQ(untouched.backward, "none");
    EXPECT_EQ(untouched.held, whole.held);
    EXPECT_EQ(pieces.backward, "all_gather 7");
    EXPECT_LT(pieces.held, whole.held);
  });
}

TEST(InputReshard, RefusesMeshesOfSeveralDimensions) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 1});
    Between net;
    testing::refused([&] { InputReshardScope scope(*net, mesh, 0); },
                     "the mesh has 2 dimensions; give the one for tensor parallelism, mesh[\"tp\"]");
  });
}

}  // namespace
}  // namespace lockstep
