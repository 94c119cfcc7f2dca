// Where the network between ranks is slow: PowerSGD sends two thin factors of each gradient matrix instead of
// the matrix, and adds what that leaves out to the next step's gradients.
//
//   lockstep run -n 2 -- build/dev/examples/power_sgd
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <memory>

#include "examples/ranks_equal.h"

namespace {

int train() {
  constexpr int kSteps = 120;
  lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  torch::manual_seed(1 + rank);

  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::ReLU(), torch::nn::Linear(256, 256),
                            torch::nn::ReLU(), torch::nn::Linear(256, 8));
  auto model = lockstep::DistributedDataParallel(net);
  // Early gradients do not compress well: the first steps are plain averages. 10 is for this short run; 1000
  // is usual.
  auto power_sgd = std::make_shared<lockstep::PowerSGDState>(
      lockstep::PowerSGDOptions{.matrix_approximation_rank = 2, .start_powerSGD_iter = 10});
  model->register_comm_hook(lockstep::powerSGD_hook(power_sgd));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));

  double first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    const auto input = torch::randn({32, 64});
    const auto target = input.slice(1, 0, 8).argmax(1);
    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(model->forward(input), target);
    loss.backward();
    optimizer.step();
    at::Tensor mean = loss.detach().clone();
    lockstep::all_reduce(mean, {.op = lockstep::ReduceOp::kAvg});
    last = mean.item<double>();
    if (step == 0) first = last;
    if (rank == 0 && step % 30 == 29) {
      const auto stats = power_sgd->compression_stats();
      std::printf("step %d  loss %.3f  compressed %.1f times\n", step, last, stats.compress_rate);
    }
  }

  const bool equal = ranks_equal(*net), compressed = power_sgd->compression_stats().compress_rate > 10;
  const bool worked = equal && compressed && last < 0.6 * first;
  if (rank == 0)
    std::printf("%s\n", worked ? "the loss fell; all ranks hold the same network" : "it did not work");
  lockstep::destroy_process_group();
  return worked ? 0 : 1;
}

}  // namespace

int main() {
  return lockstep::run_main(train);
}
