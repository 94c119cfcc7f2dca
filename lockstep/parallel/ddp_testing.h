// For tests of data parallelism over tensor parallelism: a net that is split over tp, the batches of both
// rows of a 2 x 2 mesh (dp, tp), and the same training in one process that sees both.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <string>

#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/dtensor_testing.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/prepare.h"

namespace lockstep::testing {

inline at::Tensor whole(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? full_tensor(tensor.detach()) : tensor.detach();
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    up = register_module("up", torch::nn::Linear(8, 10));
    down = register_module("down", torch::nn::Linear(10, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    blocks = register_module("blocks", torch::nn::ModuleList(Block(), Block()));
    head = register_module("head", torch::nn::Linear(8, 3));  // stays plain
    for (auto& p : parameters()) p.detach().copy_(waves(p.sizes(), p.numel()) * 0.4);
  }
  at::Tensor forward(at::Tensor x) {
    x = prepare_inputs(*this, {x})[0];
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head(prepare_outputs(*this, {x})[0]);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

inline const ParallelPlan& plan() {
  static const ParallelPlan plan{{"blocks.*.up", ColwiseParallel()}, {"blocks.*.down", RowwiseParallel()}};
  return plan;
}

inline at::Tensor batch(int step, int half) {
  return waves({6, 8}, step + 10 * half);
}
inline at::Tensor loss_of(const at::Tensor& y) {
  return y.pow(2).mean();
}
inline constexpr int kSteps = 4;

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what,
                         double tolerance = 1e-5) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(whole(actual).sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(whole(actual), expected.detach(), tolerance, tolerance))
      << what << " differs by " << (whole(actual) - expected).abs().max().item<double>();
}
inline void expect_same_parameters(const torch::nn::Module& many, const torch::nn::Module& one,
                                   const std::string& what, double tolerance = 1e-5) {
  for (const auto& item : one.named_parameters())
    expect_close(many.named_parameters()[item.key()], item.value(), what + " " + item.key(), tolerance);
}

// Both halves of every batch in one process: what training over dp must give.
template <class Optimizer, class Options>
Net trained_alone(const Options& options, int n_steps = kSteps) {
  Net net;
  Optimizer optimizer(net->parameters(), options);
  for (int step = 0; step < n_steps; ++step) {
    optimizer.zero_grad();
    loss_of(net(at::cat({batch(step, 0), batch(step, 1)}))).backward();
    optimizer.step();
  }
  return net;
}

struct Fixture {
  DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
  int half = mesh.get_local_rank("dp");
  Net net;
  explicit Fixture(const ParallelPlan& chosen = plan()) { parallelize_module(*net, mesh["tp"], chosen); }
};

}  // namespace lockstep::testing
