// checkpoint() under DistributedDataParallel: what works, and what is refused.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/nn/checkpoint.h"
#include "lockstep/tensor/tensor_testing.h"

namespace lockstep {
namespace {

constexpr int kRanks = 2;

using tensor_testing::drawn;

enum class How { kPlain, kNonReentrant, kReentrant };

// A layer, then `times` times through a second one that is checkpointed; a third that is used when asked.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(How chosen, int rounds) : how(chosen), times(rounds) {
    a = register_module("a", torch::nn::Linear(5, 5));
    b = register_module("b", torch::nn::Linear(5, 5));
    spare = register_module("spare", torch::nn::Linear(5, 5));
    torch::NoGradGuard no_grad;
    std::uint64_t seed = 0;
    for (auto& parameter : parameters()) parameter.copy_(0.3 * drawn(++seed, parameter.sizes()));
  }
  at::Tensor layer(const torch::nn::Linear& linear, const at::Tensor& x) {
    const auto fn = [linear = linear.ptr()](const at::Tensor& t) { return torch::tanh(linear->forward(t)); };
    if (how == How::kPlain) return fn(x);
    return Checkpoint{.use_reentrant = how == How::kReentrant}(fn, x);
  }
  at::Tensor forward(at::Tensor x, bool with_spare) {
    x = torch::tanh(a(x));
    for (int i = 0; i < times; ++i) x = layer(b, x);
    return with_spare ? layer(spare, x) : x;
  }
  How how;
  int times;
  torch::nn::Linear a{nullptr}, b{nullptr}, spare{nullptr};
};
TORCH_MODULE(Net);

struct Case {
  How how;
  int times = 1;
  bool with_spare = true;
};

// The gradients after each of three steps, none as an empty tensor.
std::vector<at::Tensor> run_steps(int rank, const Case& how, const DdpOptions& options) {
  Net net(how.how, how.times);
  auto model = DistributedDataParallel(net, options);
  std::vector<at::Tensor> gradients;
  for (int step = 0; step < 3; ++step) {
    model->zero_grad();
    const at::Tensor x = drawn(static_cast<std::uint64_t>(10 * step + rank), {3, 5}).requires_grad_();
    model->forward(x, how.with_spare).square().sum().backward();
    for (const auto& parameter : net->parameters())
      gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::empty({0}));
  }
  return gradients;
}

// Both under the same options, so that only checkpointing differs.
void expect_like_plain(const Case& how, const DdpOptions& options) {
  run_threads(kRanks, [&](int rank) {
    const auto plain = run_steps(rank, {How::kPlain, how.times, how.with_spare}, options);
    const auto saved = run_steps(rank, how, options);
    ASSERT_EQ(plain.size(), saved.size());
    for (std::size_t i = 0; i < plain.size(); ++i)
      EXPECT_TRUE(torch::equal(plain[i], saved[i])) << "rank " << rank << " gradient " << i;
  });
}

std::string refusal_of(const Case& how, const DdpOptions& options) {
  std::string words = "no error";
  run_threads(kRanks, [&](int rank) {
    try {
      run_steps(rank, how, options);
    } catch (const Error& error) {
      if (rank == 0) words = error.what();
    }
  });
  return words;
}

TEST(CheckpointDdp, NonReentrantHasNoLimits) {
  expect_like_plain({How::kNonReentrant}, {});
  expect_like_plain({How::kNonReentrant, 2}, {.bucket_cap_mb = 0.0001});
  expect_like_plain({How::kNonReentrant, 2, false}, {.find_unused_parameters = true});
  expect_like_plain({How::kNonReentrant, 3, false},
                    {.find_unused_parameters = true, .gradient_as_bucket_view = true});
  expect_like_plain({How::kNonReentrant, 2, false}, {.static_graph = true});
}

TEST(CheckpointDdp, ReentrantWorksWhenEachLayerIsCheckpointedOnce) {
  expect_like_plain({How::kReentrant}, {});
  expect_like_plain({How::kReentrant}, {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = true});
}

TEST(CheckpointDdp, ReentrantTwiceThroughALayerIsRefused) {
  const auto words = refusal_of({How::kReentrant, 2}, {});
  EXPECT_NE(words.find("twice"), std::string::npos) << words;
  EXPECT_NE(words.find("checkpoint"), std::string::npos) << words;
}

TEST(CheckpointDdp, ReentrantWithTheSearchForUnusedParametersIsRefused) {
  const auto words = refusal_of({How::kReentrant, 1, false}, {.find_unused_parameters = true});
  EXPECT_NE(words.find("twice"), std::string::npos) << words;
}

TEST(CheckpointDdp, ReentrantTwiceWorksWithAStaticGraph) {
  expect_like_plain({How::kReentrant, 2}, {.static_graph = true});
  expect_like_plain({How::kReentrant, 2, false}, {.bucket_cap_mb = 0.0001, .static_graph = true});
}

// The search would take such a parameter for unused, and it may be one whose only use is outside.
TEST(CheckpointDdp, AStaticGraphMayUseParametersOutsideForward) {
  run_threads(kRanks, [](int rank) {
    const auto gradient = [&](const DdpOptions& options) {
      Net net(How::kReentrant, 2);
      auto model = DistributedDataParallel(net, options);
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        const at::Tensor x = drawn(static_cast<std::uint64_t>(10 * step + rank), {3, 5}).requires_grad_();
        const at::Tensor y = model->forward(x, false);
        (y.square().sum() + (1 + rank) * net->spare->weight.square().sum()).backward();
      }
      return std::pair(net->spare->weight.grad().clone(), net->spare->weight.detach());
    };
    const auto [got, weight] = gradient({.static_graph = true});
    EXPECT_TRUE(torch::allclose(got, 3 * weight)) << "the mean of 2 w and 4 w";
  });
}

}  // namespace
}  // namespace lockstep
