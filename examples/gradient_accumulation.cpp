// Batches larger than memory: several small ones per optimizer step. Inside no_sync() gradients only add up
// on this rank; the last backward pass of a step averages the sum. Communication is then once per step, not
// once per part.
//
//   lockstep run -n 2 -- build/dev/examples/gradient_accumulation
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

#include "examples/ranks_equal.h"

namespace {

int train() {
  constexpr int kSteps = 40, kParts = 4;
  lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  torch::manual_seed(1 + rank);

  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  auto model = lockstep::DistributedDataParallel(net, {.gradient_as_bucket_view = true});
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(5e-3));

  double first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    at::Tensor sum = torch::zeros({});
    const auto run_part = [&] {
      const auto input = torch::randn({8, 16});
      const auto target = input.slice(1, 0, 4).sum(1, /*keepdim=*/true).sin();
      const auto loss = torch::mse_loss(model->forward(input), target) / kParts;
      loss.backward();
      sum += loss.detach();
    };
    {
      const auto guard = model->no_sync();  // around forward and backward
      for (int part = 0; part + 1 < kParts; ++part) run_part();
    }
    run_part();  // this one communicates
    optimizer.step();
    lockstep::all_reduce(sum, {.op = lockstep::ReduceOp::kAvg});
    last = sum.item<double>();
    if (step == 0) first = last;
    if (rank == 0 && step % 10 == 9) std::printf("step %d  loss %.4f\n", step, last);
  }

  const auto reductions = model->stats().n_reductions;
  if (rank == 0) {
    std::printf("%d backward passes, %llu reductions\n", kSteps * kParts,
                static_cast<unsigned long long>(reductions));
  }
  const bool equal = ranks_equal(*net), worked = equal && last < 0.7 * first;
  if (rank == 0)
    std::printf("%s\n", worked ? "the loss fell; all ranks hold the same network" : "it did not work");
  lockstep::destroy_process_group();
  return worked ? 0 : 1;
}

}  // namespace

int main() {
  return lockstep::run_main(train);
}
