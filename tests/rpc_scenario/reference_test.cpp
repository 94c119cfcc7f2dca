// Models that lie on several workers train as they would in one process. Workers are processes.
#include <gtest/gtest.h>

#include "tests/rpc_scenario/scenario.h"

namespace lockstep::scenario {
namespace {

constexpr double kRate = 0.1;

struct StageImpl : torch::nn::Module {
  StageImpl(int in, int out, int seed) {
    torch::manual_seed(seed);
    fc_ = register_module("fc", torch::nn::Linear(in, out));
  }
  at::Tensor forward(const at::Tensor& input) { return torch::tanh(fc_->forward(input)); }
  torch::nn::Linear fc_{nullptr};
};
LOCKSTEP_RPC_MODULE(StageImpl, int, int, int);

at::Tensor gradient_of(const rpc::RRef<at::Tensor>& parameter, const autograd::Context& context) {
  return context.gradients().find(parameter.local_value());
}
LOCKSTEP_RPC_FUNCTION(gradient_of);

void require_close(const at::Tensor& a, const at::Tensor& b, const std::string& what) {
  require(torch::allclose(a, b, 1e-5, 1e-7), what + c10::str(": ", a, " and ", b));
}

struct Batch {
  at::Tensor input, target;
};
Batch batch_of(int step) {
  torch::manual_seed(100 + step);
  return {torch::rand({8, 4}), torch::rand({8, 2})};
}

// Three stages on three workers, worker 0 leading, against the same stages in one process.
void train_pipeline(const std::string& first_device, autograd::Mode mode, std::int64_t micro_batch) {
  const std::vector<std::pair<int, int>> widths{{4, 6}, {6, 5}, {5, 2}};
  const std::vector<std::string> devices{first_device, "worker1/cpu", "rank:2/cpu"};
  std::vector<rpc::RemoteModule<StageImpl>> stages;
  std::vector<std::shared_ptr<StageImpl>> here;
  std::vector<at::Tensor> parameters_here;
  std::vector<rpc::RRef<at::Tensor>> parameters;
  for (std::size_t i = 0; i < widths.size(); ++i) {
    const auto [in, out] = widths[i];
    stages.emplace_back(devices[i], rpc::Args{in, out, static_cast<int>(i)});
    for (const auto& parameter : stages[i].remote_parameters()) parameters.push_back(parameter);
    // Only now: while a stage of this worker is being made, its numbers come from the same generator.
    here.push_back(std::make_shared<StageImpl>(in, out, static_cast<int>(i)));
    for (const auto& parameter : here[i]->parameters()) parameters_here.push_back(parameter);
  }
  const rpc::DistributedOptimizer<torch::optim::SGD> optimizer(parameters,
                                                               rpc::Args{torch::optim::SGDOptions(kRate)});
  torch::optim::SGD optimizer_here(parameters_here, torch::optim::SGDOptions(kRate));
  for (int step = 0; step < 4; ++step) {
    const Batch batch = batch_of(step);
    at::Tensor all = batch.input;
    for (const auto& stage : here) all = stage->forward(all);
    optimizer_here.zero_grad();
    torch::mse_loss(all, batch.target).backward();

    const autograd::DistAutogradContext context;
    std::vector<rpc::Future<at::Tensor>> hidden;
    for (const auto& part : batch.input.split(micro_batch)) {
      const at::Tensor middle = stages[1].forward(stages[0].forward(part));
      hidden.push_back(stages[2].forward_async(middle));
    }
    std::vector<at::Tensor> outputs;
    for (const auto& part : hidden) outputs.push_back(part.wait());
    const at::Tensor loss = torch::mse_loss(torch::cat(outputs), batch.target);
    autograd::backward(context, {loss}, {.mode = mode});
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor gradient = rpc::rpc_sync(parameters[i].owner(), gradient_of, {parameters[i], context});
      require_close(gradient, parameters_here[i].grad(), "a gradient");
    }
    optimizer.step(context);
    optimizer_here.step();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      require_close(parameters[i].to_here(), parameters_here[i], "a parameter");
  }
}

TEST(RpcScenario, APipelineOverThreeWorkersTrainsAsOneProcess) {
  run_workers(3, [](int rank, const Meeting&) {
    if (rank != 0) return;
    train_pipeline("cpu", autograd::Mode::kSmart, 8);
    train_pipeline("worker0/cpu", autograd::Mode::kFast, 2);
    train_pipeline("worker1", autograd::Mode::kSmart, 3);
  });
}

// ---- a sparse table on a parameter server, dense layers in DDP on trainers ----

constexpr int kReferenceTrainers = 3, kServer = 3;

rpc::RRef<torch::nn::EmbeddingBagImpl> table() {
  static const auto made = [] {
    torch::manual_seed(7);
    return rpc::RRef<torch::nn::EmbeddingBagImpl>::of(
        torch::nn::EmbeddingBagOptions(20, 4).mode(torch::kSum).sparse(true));
  }();
  return made;
}
LOCKSTEP_RPC_FUNCTION(table);

std::shared_ptr<torch::nn::LinearImpl> dense_layer() {
  torch::manual_seed(8);
  return std::make_shared<torch::nn::LinearImpl>(4, 2);
}

struct Words {
  at::Tensor indices, offsets, target;
};
Words words_of(int step, int trainer) {
  torch::manual_seed(1000 * step + trainer);
  return {torch::randint(20, {12}), torch::arange(0, 12, 3), torch::rand({4, 2})};
}

// What one process makes of all trainers' batches: dense gradients are averaged, those of the table added up.
std::vector<at::Tensor> reference(int n_steps) {
  torch::manual_seed(7);
  torch::nn::EmbeddingBag bag(torch::nn::EmbeddingBagOptions(20, 4).mode(torch::kSum));
  const auto dense = dense_layer();
  for (int step = 0; step < n_steps; ++step) {
    bag->zero_grad();
    dense->zero_grad();
    for (int k = 0; k < kReferenceTrainers; ++k) {
      const Words words = words_of(step, k);
      torch::mse_loss(dense->forward(bag->forward(words.indices, words.offsets)), words.target).backward();
    }
    const torch::NoGradGuard no_grad;
    bag->weight.sub_(bag->weight.grad(), kRate);
    for (auto& parameter : dense->parameters()) parameter.sub_(parameter.grad(), kRate / kReferenceTrainers);
  }
  return {bag->weight.detach(), dense->weight.detach(), dense->bias.detach()};
}

void train_hybrid(int rank, const Group& trainers, int n_steps) {
  const auto bag = rpc::RemoteModule<torch::nn::EmbeddingBag>::init_from_module_rref(
      worker(kServer), rpc::rpc_sync(worker(kServer), table));
  const auto dense = dense_layer();
  auto model = DistributedDataParallel(dense, {.group = trainers, .gradient_as_bucket_view = true});
  auto parameters = bag.remote_parameters();
  for (const auto& parameter : dense->parameters()) parameters.emplace_back(parameter);
  const rpc::DistributedOptimizer<torch::optim::SGD> optimizer(parameters,
                                                               rpc::Args{torch::optim::SGDOptions(kRate)});
  for (int step = 0; step < n_steps; ++step) {
    const Words words = words_of(step, rank);
    const autograd::DistAutogradContext context;
    const at::Tensor output = model->forward(bag.forward(words.indices, words.offsets));
    autograd::backward(context, {torch::mse_loss(output, words.target)});
    barrier({.group = trainers});  // all gradients are of the same parameters
    optimizer.step(context);
    barrier({.group = trainers});
  }
  const auto expected = reference(n_steps);
  require_close(parameters[0].to_here(), expected[0], "the table");
  require_close(dense->weight, expected[1], "the dense weight");
  require_close(dense->bias, expected[2], "the dense bias");
  barrier({.group = trainers});
}

TEST(RpcScenario, ASparseTableOnAServerAndDenseLayersInDdpTrainAsOneProcess) {
  run_workers(kReferenceTrainers + 1, [](int rank, const Meeting& meeting) {
    enter_group(rank, kReferenceTrainers + 1, meeting);
    const auto trainers = new_group({0, 1, 2});
    if (rank != kServer) train_hybrid(rank, trainers, 6);
    barrier();
    destroy_process_group();
  });
}

}  // namespace
}  // namespace lockstep::scenario
