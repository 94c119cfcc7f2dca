// Ranks with different amounts of data: one that has run out of batches would leave the others waiting in
// their next reduction. join() runs the loop, then keeps participating with zero contributions until every
// rank is through.
//
//   lockstep run -n 2 -- build/dev/examples/uneven_inputs
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

#include "examples/ranks_equal.h"

namespace {

int train() {
  lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  const int n_batches = 30 + 25 * rank;
  torch::manual_seed(1 + rank);

  torch::nn::Sequential net(torch::nn::Linear(16, 32), torch::nn::BatchNorm1d(32), torch::nn::ReLU(),
                            torch::nn::Linear(32, 4));
  lockstep::convert_sync_batchnorm(net);  // its collectives are shadowed, too
  auto model = lockstep::DistributedDataParallel(net);
  lockstep::ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(model->parameters(),
                                                                  torch::optim::AdamOptions(1e-2));

  int n_steps = 0;
  double first = 0, last = 0;
  const auto train = [&] {
    for (; n_steps < n_batches; ++n_steps) {
      const auto input = torch::randn({16, 16});
      const auto target = input.slice(1, 0, 4).argmax(1);
      optimizer.zero_grad();
      const auto loss = torch::nn::functional::cross_entropy(model->forward(input), target);
      loss.backward();
      optimizer.step();
      last = loss.item<double>();
      if (n_steps == 0) first = last;
    }
    std::printf("rank %d is through after %d batches  loss %.3f\n", rank, n_steps, last);
    std::fflush(stdout);
  };
  // Everything that communicates in each iteration, the model first. Sums of gradients are divided by the
  // number of ranks that still have batches; by default by that of all ranks.
  lockstep::join({*model, optimizer}, train, {.divide_by_initial_world_size = false});

  const bool equal = ranks_equal(*net), worked = equal && last < 0.8 * first;
  at::Tensor n_worked = torch::tensor({worked ? 1 : 0});
  lockstep::all_reduce(n_worked);
  const bool all_worked = n_worked.item<int>() == lockstep::get_world_size();
  if (rank == 0)
    std::printf("%s\n", all_worked ? "the loss fell; all ranks hold the same network" : "it did not work");
  lockstep::destroy_process_group();
  return all_worked ? 0 : 1;
}

}  // namespace

int main() {
  return lockstep::run_main(train);
}
