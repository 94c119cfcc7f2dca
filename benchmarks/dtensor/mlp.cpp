#include <ATen/ops/allclose.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>
#include <stdexcept>
#include <vector>

#include "benchmarks/dtensor/cases.h"
#include "benchmarks/dtensor/loops.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/parallel/parallelize.h"

namespace bench {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct MlpImpl : torch::nn::Module {
  MlpImpl(std::int64_t hidden, std::int64_t inner)
      : up(register_module("up", torch::nn::Linear(hidden, inner))),
        down(register_module("down", torch::nn::Linear(inner, hidden))) {}
  at::Tensor forward(const at::Tensor& x) { return down(at::relu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Mlp);

// Every rank computes with the input: its gradient is the sum of theirs.
struct EnterRanks : torch::autograd::Function<EnterRanks> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.view_as(x); }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    lockstep::all_reduce(gradients[0]);
    return gradients;
  }
};
// The sum of all ranks' products, in the memory of this rank's.
struct LeaveRanks : torch::autograd::Function<LeaveRanks> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& y) {
    context->mark_dirty({y});
    lockstep::all_reduce(y);
    return y;
  }
  static variable_list backward(AutogradContext*, variable_list gradients) { return gradients; }
};

struct Half {
  at::Tensor up, up_bias, down, down_bias;
  at::Tensor forward(const at::Tensor& x) const {
    const auto inner = at::relu(at::linear(EnterRanks::apply(x), up, up_bias));
    return LeaveRanks::apply(at::linear(inner, down)) + down_bias;
  }
  std::vector<at::Tensor> parameters() const { return {up, up_bias, down, down_bias}; }
};

at::Tensor leaf(const at::Tensor& parameter) {
  return lockstep::to_local(parameter.detach()).clone().set_requires_grad(true);
}

struct Step {
  std::function<at::Tensor(const at::Tensor&)> forward;
  std::vector<at::Tensor> parameters;
  at::Tensor input, gradient;

  at::Tensor operator()() const {
    for (const auto& parameter : parameters) parameter.mutable_grad().reset();
    input.mutable_grad().reset();
    auto y = forward(input);
    y.backward(gradient);
    return y.detach();
  }
};

void check(const Step& a, const Step& b) {
  const auto ours = a(), theirs = b();
  if (!at::allclose(ours, theirs, 1e-4, 1e-5) || !at::allclose(a.input.grad(), b.input.grad(), 1e-4, 1e-5) ||
      !at::allclose(lockstep::to_local(a.parameters[0].grad()), b.parameters[0].grad(), 1e-4, 1e-5))
    throw std::runtime_error("the two blocks differ");
}

Loop stepping(std::string name, const Step& step) {
  return {std::move(name), [step](std::int64_t n) {
            for (std::int64_t k = 0; k < n; ++k) step();
          }};
}

}  // namespace

std::string measure_mlp(Link& link, const lockstep::DeviceMesh& mesh, const Request& request) {
  const std::int64_t batch = request.number("batch"), hidden = request.number("hidden");
  torch::manual_seed(1);
  Mlp mlp(hidden, request.number("inner"));
  const auto x = at::randn({batch, hidden}), gradient = at::randn({batch, hidden});
  lockstep::parallelize_module(*mlp, mesh,
                               {{"up", lockstep::ColwiseParallel()}, {"down", lockstep::RowwiseParallel()}});
  const Half half{leaf(mlp->up->weight), leaf(mlp->up->bias), leaf(mlp->down->weight), leaf(mlp->down->bias)};
  const auto input = [&] { return x.clone().set_requires_grad(true); };
  const Step sharded{[mlp](const at::Tensor& t) mutable { return mlp(t); }, mlp->parameters(), input(),
                     gradient};
  const Step by_hand{[half](const at::Tensor& t) { return half.forward(t); }, half.parameters(), input(),
                     gradient};
  check(sharded, by_hand);
  return measure_loops(link, request, {stepping("", sharded), stepping("hand", by_hand)});
}

}  // namespace bench
