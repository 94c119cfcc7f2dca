// A parameter server: one worker holds the model, the others train it. Each computes its forward and backward
// pass through the server, gradients meet in an autograd context, and the server's optimizer applies them as
// they come.
//
//   lockstep run -n 3 -- build/dev/examples/parameter_server
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

#include "examples/as_worker.h"

namespace rpc = lockstep::rpc;
namespace autograd = lockstep::autograd;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int width)
      : in(register_module("in", torch::nn::Linear(2, width))),
        out(register_module("out", torch::nn::Linear(width, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return out->forward(torch::relu(in->forward(x))); }
  torch::nn::Linear in, out;
};
LOCKSTEP_RPC_MODULE(NetImpl, int);

// The server's one model. Made when the first trainer asks for it.
rpc::RRef<NetImpl> model() {
  static const auto net = rpc::RRef<NetImpl>::of(16);
  return net;
}
LOCKSTEP_RPC_FUNCTION(model);

// Points on two rings: which one?
std::pair<at::Tensor, at::Tensor> batch(int n) {
  const auto label = torch::randint(2, {n});
  const auto angle = torch::rand({n}) * 6.2832;
  const auto radius = label + 0.5 + 0.1 * torch::randn({n});
  return {torch::stack({radius * torch::cos(angle), radius * torch::sin(angle)}, 1), label};
}

void train(int rank) {
  torch::manual_seed(rank);
  const auto net =
      rpc::RemoteModule<NetImpl>::init_from_module_rref("server", rpc::rpc_sync("server", model));
  const rpc::DistributedOptimizer<torch::optim::SGD> optimizer(net.remote_parameters(),
                                                               rpc::Args{torch::optim::SGDOptions(0.2)});
  for (int step = 1; step <= 200; ++step) {
    const auto [points, labels] = batch(32);
    const autograd::DistAutogradContext context;
    const auto loss = torch::nn::functional::cross_entropy(net.forward(points), labels);
    autograd::backward(context, {loss});  // through the server and back
    optimizer.step(context);              // there, with this context's gradients
    if (step % 50 == 0) std::printf("trainer %d, step %d: loss %.3f\n", rank, step, loss.item<double>());
  }
}

// On the server: what the trainers have made of its model.
bool test_model() {
  const torch::NoGradGuard no_grad;
  const auto [points, labels] = batch(1000);
  const auto right = model().local_value().forward(points).argmax(1).eq(labels).sum().item<int>();
  std::printf("server: the model knows the ring of %d of 1000 new points\n", right);
  return right > 900;
}

int main() {
  return as_worker([](int rank) {
    lockstep::init_rpc(rank == 0 ? "server" : "trainer" + std::to_string(rank));
    if (rank != 0) train(rank);                           // the server has nothing to do but to answer
    rpc::barrier({}, {.timeout = lockstep::kNoTimeout});  // however long they train
    const bool worked = rank != 0 || test_model();
    rpc::shutdown();
    return worked;
  });
}
