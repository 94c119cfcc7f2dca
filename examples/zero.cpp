// Adam keeps two more tensors per parameter. ZeroRedundancyOptimizer splits them over the ranks: each updates
// its share of the parameters and sends them to the others. Less memory, and less work per step.
//
//   lockstep run -n 2 -- build/dev/examples/zero
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <sstream>

#include "examples/ranks_equal.h"

namespace {

int train() {
  constexpr int kSteps = 60;
  lockstep::init_process_group();
  const int rank = lockstep::get_rank(), n_ranks = lockstep::get_world_size();
  torch::manual_seed(1 + rank);

  torch::nn::Sequential net(torch::nn::Linear(32, 128), torch::nn::ReLU(), torch::nn::Linear(128, 128),
                            torch::nn::ReLU(), torch::nn::Linear(128, 4));
  auto model = lockstep::DistributedDataParallel(net, {.gradient_as_bucket_view = true});
  lockstep::ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(
      model->parameters(), torch::optim::AdamOptions(3e-3), {.parameters_as_bucket_view = true});

  double first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    const auto input = torch::randn({32, 32});
    const auto target = input.slice(1, 0, 4).argmax(1);
    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(model->forward(input), target);
    loss.backward();   // gradients are averaged
    optimizer.step();  // each rank updates its share, and all hold all of it afterwards
    at::Tensor mean = loss.detach().clone();
    lockstep::all_reduce(mean, {.op = lockstep::ReduceOp::kAvg});
    last = mean.item<double>();
    if (step == 0) first = last;
    if (rank == 0 && step % 20 == 19) std::printf("step %d  loss %.3f\n", step, last);
  }

  const std::size_t n_mine = optimizer.state().size(), n_all = net->parameters().size();
  if (rank == 0) std::printf("rank 0 keeps the state of %zu of %zu parameters\n", n_mine, n_all);
  // A checkpoint: rank 0 gathers the whole state, and writes what torch::optim::Adam itself would have
  // written.
  optimizer.consolidate_state_dict(/*to=*/0);
  if (rank == 0) {
    std::stringstream file;
    torch::save(optimizer, file);
    torch::optim::Adam alone(net->parameters(), torch::optim::AdamOptions(3e-3));
    torch::load(alone, file);
    std::printf("a plain Adam has loaded the state of all %zu\n", alone.state().size());
    if (alone.state().size() != n_all) return 1;
  }

  const bool equal = ranks_equal(*net), shared = n_ranks == 1 || n_mine < n_all;
  const bool worked = equal && shared && last < 0.7 * first;
  if (rank == 0)
    std::printf("%s\n", worked ? "the loss fell; all ranks hold the same network" : "it did not work");
  lockstep::destroy_process_group();
  return worked ? 0 : 1;
}

}  // namespace

int main() {
  return lockstep::run_main(train);
}
