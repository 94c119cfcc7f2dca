#include "benchmarks/rpc/remote_backward.h"

#include <ATen/Context.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "benchmarks/rpc/samples.h"
#include "lockstep/autograd/autograd.h"
#include "lockstep/rpc/rpc.h"

namespace bench {
namespace {

namespace autograd = lockstep::autograd;
namespace rpc = lockstep::rpc;

// This process's layer: the callee's is the remote one, the caller's the local one.
struct Layer {
  at::Tensor weight;
  at::Tensor bias;
};
Layer layer;

// The same numbers in every process.
void make_layer(std::int64_t hidden) {
  at::manual_seed(1);
  layer = {.weight = at::randn({hidden, hidden}).div_(16).set_requires_grad(true),
           .bias = at::randn({hidden}).set_requires_grad(true)};
}
LOCKSTEP_RPC_FUNCTION(make_layer, "bench.make_layer");

at::Tensor forward(const at::Tensor& input) {
  return at::linear(input, layer.weight, layer.bias);
}
LOCKSTEP_RPC_FUNCTION(forward, "bench.forward");

struct Pass {
  double us;
  at::Tensor gradient;  // of the input
};

// Gradients are made anew, as in a context.
Pass local_pass(const at::Tensor& input) {
  for (const at::Tensor& leaf : {input, layer.weight, layer.bias}) leaf.mutable_grad().reset();
  const at::Tensor loss = forward(input).sum();
  const double us = timed([&] { loss.backward(); });
  return {us, input.grad()};
}

Pass remote_pass(const at::Tensor& input, const std::string& callee,
                 const autograd::BackwardOptions& options) {
  const autograd::DistAutogradContext context;
  const at::Tensor loss = rpc::rpc_sync(callee, forward, {input}).sum();
  const double us = timed([&] { autograd::backward(context, {loss}, options); });
  return {us, context.gradients().find(input)};
}

autograd::Mode mode_of(const std::string& name) {
  if (name == "smart") return autograd::Mode::kSmart;
  if (name == "fast") return autograd::Mode::kFast;
  throw std::runtime_error("no mode named " + name);
}

}  // namespace

std::string measure_backward(const Request& request, const std::string& callee) {
  const std::int64_t hidden = request.number("hidden");
  const autograd::BackwardOptions options{.mode = mode_of(request.text("mode"))};
  rpc::rpc_sync(callee, make_layer, {hidden});
  make_layer(hidden);
  const at::Tensor input = at::randn({request.number("batch"), hidden}).set_requires_grad(true);
  // The first passes also warm up.
  if (!at::allclose(local_pass(input).gradient, remote_pass(input, callee, options).gradient))
    throw std::runtime_error("the remote gradient is another one");
  std::vector<double> local;
  const std::vector<double> whole = samples(request, [&] {
    local.push_back(local_pass(input).us);
    return remote_pass(input, callee, options).us;
  });
  std::ostringstream text;
  text << "{\"us\":" << median(whole) - median(local) << ",\"local_us\":" << median(local)
       << ",\"whole_us\":" << median(whole) << ",\"iterations\":" << whole.size() << "}";
  return text.str();
}

}  // namespace bench
