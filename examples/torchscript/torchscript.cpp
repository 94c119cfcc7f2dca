// Trains a TorchScript module on several ranks:
//
//   lockstep run -n 2 -- torchscript
//
// The script is written out here; torch::jit::load gives the same kind of module from a file that Python
// saved. Each rank sees its own points of a curve; all of them end with the same parameters.
#include <lockstep/ddp/ddp_script.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <iostream>

namespace {

torch::jit::Module curve_net() {
  torch::manual_seed(1);
  torch::jit::Module net("curve");
  net.register_parameter("wide", torch::randn({32, 1}).set_requires_grad(true), false);
  net.register_parameter("shift", torch::randn({32}).set_requires_grad(true), false);
  net.register_parameter("narrow", (0.1 * torch::randn({1, 32})).set_requires_grad(true), false);
  net.define(R"(
def forward(self, x):
  hidden = torch.tanh(torch.matmul(x, self.wide.t()) + self.shift)
  return {"y": torch.matmul(hidden, self.narrow.t())}
)");
  return net;
}

int train() {
  lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  torch::jit::Module net = curve_net();
  auto model = lockstep::DistributedDataParallel(net, {.gradient_as_bucket_view = true});
  torch::optim::Adam adam(model->parameters(), 0.02);

  torch::manual_seed(100 + rank);
  double first = 0, last = 0;
  for (int step = 0; step < 300; ++step) {
    const at::Tensor x = 4 * torch::rand({64, 1}) - 2;
    adam.zero_grad();
    const at::Tensor y = model->forward(x).toGenericDict().at("y").toTensor();
    const at::Tensor loss = torch::mse_loss(y, torch::sin(2 * x));
    loss.backward();
    adam.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }

  // The largest and the smallest value of any rank are the same one.
  torch::NoGradGuard no_grad;
  at::Tensor sum = torch::zeros({1});
  for (const at::Tensor& parameter : model->parameters()) sum += parameter.sum();
  at::Tensor ends = torch::cat({sum, -sum});
  lockstep::all_reduce(ends, {.op = lockstep::ReduceOp::kMax});
  if (rank == 0) std::cout << "loss " << first << " -> " << last << '\n';
  if (ends.sum().item<float>() != 0 || last > 0.2 * first) return 1;
  if (rank == 0) std::cout << "all ranks hold the same script\n";
  lockstep::destroy_process_group();
  return 0;
}

}  // namespace

int main() {
  return lockstep::run_main(train);
}
