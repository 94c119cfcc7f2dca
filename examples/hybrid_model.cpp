// A table too large for one trainer lies on a server; the dense layers are small and copied to every trainer.
// Rows of the table travel by RPC, dense gradients are averaged by DistributedDataParallel, and one backward
// pass does both.
//
//   lockstep run -n 3 -- build/dev/examples/hybrid_model
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

#include "examples/as_worker.h"
#include "examples/ranks_equal.h"

namespace rpc = lockstep::rpc;
namespace autograd = lockstep::autograd;
using torch::nn::EmbeddingBag;

constexpr int kWords = 60, kWidth = 16, kClasses = 4, kSteps = 200;

// The server's one table. Its gradients are sparse: only rows that were looked up.
rpc::RRef<torch::nn::EmbeddingBagImpl> table() {
  static const auto made = rpc::RRef<torch::nn::EmbeddingBagImpl>::of(
      torch::nn::EmbeddingBagOptions(kWords, kWidth).mode(torch::kSum).sparse(true));
  return made;
}
LOCKSTEP_RPC_FUNCTION(table);

// Texts of five words; the class is that of the first word.
std::pair<at::Tensor, at::Tensor> batch() {
  const auto words = torch::randint(kWords, {64, 5});
  words.slice(1, 1).sub_(words.slice(1, 1).remainder(kClasses));  // the others are all of class 0
  return {words, words.select(1, 0).remainder(kClasses)};
}

bool train(int rank, const lockstep::Group& trainers) {
  const auto rows =
      rpc::RemoteModule<EmbeddingBag>::init_from_module_rref("server", rpc::rpc_sync("server", table));
  const torch::nn::Linear dense(kWidth, kClasses);
  auto model = lockstep::DistributedDataParallel(dense, {.group = trainers});

  auto parameters = rows.remote_parameters();  // the server's, and this trainer's own
  for (const auto& parameter : dense->parameters()) parameters.emplace_back(parameter);
  const rpc::DistributedOptimizer<torch::optim::SGD> optimizer(parameters,
                                                               rpc::Args{torch::optim::SGDOptions(0.3)});

  torch::manual_seed(rank);
  double last = 0;
  for (int step = 1; step <= kSteps; ++step) {
    const auto [words, classes] = batch();
    const autograd::DistAutogradContext context;
    const auto loss = torch::nn::functional::cross_entropy(model->forward(rows.forward(words)), classes);
    // Dense gradients are averaged over the trainers; those of the table stay where it is.
    autograd::backward(context, {loss});
    optimizer.step(context);  // the server's table, this trainer's layer
    last = loss.item<double>();
    if (step % 50 == 0) std::printf("trainer %d, step %d: loss %.3f\n", rank, step, last);
  }
  const bool equal = ranks_equal(*dense, trainers);
  std::printf("trainer %d: the dense layers of all trainers are %s\n", rank, equal ? "equal" : "not equal");
  return equal && last < 0.7;
}

int main() {
  return as_worker([](int rank) {
    lockstep::init_process_group();
    lockstep::init_rpc(rank == 0 ? "server" : "trainer" + std::to_string(rank));
    std::vector<int> others;
    for (int i = 1; i < lockstep::get_world_size(); ++i) others.push_back(i);
    const auto trainers = lockstep::new_group(others);
    const bool worked = rank == 0 || train(rank, trainers);  // the server answers
    rpc::shutdown();
    lockstep::destroy_process_group();
    return worked;
  });
}
