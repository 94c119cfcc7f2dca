// A model in two stages on two workers. A batch is cut into parts: while the second worker computes one, the
// first computes the next. The backward pass goes back the same way.
//
//   lockstep run -n 2 -- build/dev/examples/pipeline
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

#include "examples/as_worker.h"

namespace rpc = lockstep::rpc;
namespace autograd = lockstep::autograd;

constexpr int kWidth = 64, kSteps = 120, kParts = 4;

struct StageImpl : torch::nn::Module {
  StageImpl(int in, int out)
      : first(register_module("first", torch::nn::Linear(in, kWidth))),
        second(register_module("second", torch::nn::Linear(kWidth, out))) {}
  at::Tensor forward(const at::Tensor& x) { return second->forward(torch::relu(first->forward(x))); }
  torch::nn::Linear first, second;
};
LOCKSTEP_RPC_MODULE(StageImpl, int, int);

bool train() {
  torch::manual_seed(1);
  const rpc::RemoteModule<StageImpl> stage1("cpu", rpc::Args{8, kWidth});      // here
  const rpc::RemoteModule<StageImpl> stage2("worker1", rpc::Args{kWidth, 1});  // there
  auto parameters = stage1.remote_parameters();
  for (const auto& parameter : stage2.remote_parameters()) parameters.push_back(parameter);
  const rpc::DistributedOptimizer<torch::optim::Adam> optimizer(parameters,
                                                                rpc::Args{torch::optim::AdamOptions(3e-3)});

  double first = 0, last = 0;
  for (int step = 1; step <= kSteps; ++step) {
    const auto x = torch::randn({128, 8});
    const auto y = torch::sin(x.sum(1, true));
    const autograd::DistAutogradContext context;
    std::vector<rpc::Future<at::Tensor>> parts;
    for (const auto& part : x.chunk(kParts)) parts.push_back(stage2.forward_async(stage1.forward(part)));
    std::vector<at::Tensor> outputs;
    for (const auto& part : parts) outputs.push_back(part.wait());
    const auto loss = torch::mse_loss(torch::cat(outputs), y);
    autograd::backward(context, {loss});
    optimizer.step(context);  // each worker updates its stage
    last = loss.item<double>();
    if (step == 1) first = last;
    if (step % 40 == 0) std::printf("step %d: loss %.3f\n", step, last);
  }
  std::printf("two stages on two workers brought the loss from %.3f to %.3f\n", first, last);
  return last < 0.5 * first;
}

int main() {
  return as_worker([](int rank) {
    lockstep::init_rpc();
    const bool worked = rank != 0 || train();  // the other worker answers
    rpc::shutdown();
    return worked;
  });
}
