// A small GPT on a mesh of two dimensions: its layers are cut over "tp", and every such model is trained on
// its own part of the batch along "dp". Start it with an even number of ranks:
//
//   lockstep run -n 4 -- tensor_parallel
//
// The model is ordinary libtorch and knows of no ranks; (1) to (5) are all that tensor parallelism takes. The
// same model is trained beside it by each rank alone, on the whole batch, and the losses must agree.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>

namespace {

constexpr std::int64_t kVocabulary = 50, kLength = 16, kWidth = 32, kHeads = 4, kLayers = 2, kBatch = 8;
constexpr int kSteps = 10;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    for (auto* linear : {&q, &k, &v, &out}) *linear = torch::nn::Linear(kWidth, kWidth);
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    register_module("q", q);
    register_module("k", k);
    register_module("v", v);
    register_module("out", out);
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  at::Tensor forward(at::Tensor x) {
    const auto y = norm1(x);
    const auto heads = [&](torch::nn::Linear& linear) {
      return linear(y).view({y.size(0), y.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
    };
    const auto mixed = at::scaled_dot_product_attention(heads(q), heads(k), heads(v), {}, 0.0, true);
    x = x + out(mixed.transpose(1, 2).reshape(x.sizes()));
    return x + down(torch::gelu(up(norm2(x))));
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  GptImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", torch::nn::Embedding(kLength, kWidth));
    for (int i = 0; i < kLayers; ++i) layers->push_back(Block());
    register_module("layers", layers);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  }
  // The output layer is the token embedding itself.
  at::Tensor forward(const at::Tensor& ids) {
    auto x = tokens(ids) + positions(torch::arange(ids.size(1)));
    for (const auto& layer : *layers) x = layer->as<BlockImpl>()->forward(x);
    return torch::linear(norm(x), tokens->weight);
  }
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Gpt);

at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(scores.flatten(0, 1), targets.flatten());
}

// Random text of the given step, the same on every rank: {kBatch, kLength + 1}.
at::Tensor text(int step) {
  torch::manual_seed(100 + static_cast<std::uint64_t>(step));
  return torch::randint(kVocabulary, {kBatch, kLength + 1});
}

// (2) What is cut, and where: heads of the attention, hidden units, the vocabulary. Activations stay DTensors,
// so that the model above reads the global sizes.
void parallelize(GptImpl& net, const lockstep::DeviceMesh& tp) {
  using lockstep::ColwiseParallel, lockstep::RowwiseParallel;
  const ColwiseParallel columns{.use_local_output = false};
  const RowwiseParallel rows{.use_local_output = false};
  lockstep::parallelize_module(net, tp,
                               {{"tokens", rows},
                                {"layers.*.[qkv]", columns},
                                {"layers.*.out", rows},
                                {"layers.*.up", columns},
                                {"layers.*.down", rows}});
  // (3) The rest, norms and positions, on every rank.
  lockstep::distribute_module(net, tp);
}

// One step of any model; returns the loss.
template <class Model>
at::Tensor step_on(Model&& model, torch::optim::Optimizer& optimizer, const at::Tensor& text) {
  optimizer.zero_grad();
  const auto loss = loss_of(model.forward(text.slice(1, 0, kLength)), text.slice(1, 1));
  loss.backward();
  optimizer.step();
  return loss.detach();
}

int train() {
  lockstep::init_process_group();
  const int n = lockstep::get_world_size();
  const int tp = n % 2 == 0 ? 2 : 1;
  // (1) Ranks 0 and 1 cut one model between them, ranks 2 and 3 the next.
  const auto mesh = lockstep::init_device_mesh("cpu", {n / tp, tp}, {.mesh_dim_names = {"dp", "tp"}});
  torch::manual_seed(1);
  Gpt one, net;
  lockstep::load_full_state_dict(*net, lockstep::full_state_dict(*one));
  parallelize(*net, mesh["tp"]);
  // (4) Gradients are averaged along the other dimension, each rank's pieces with the same pieces.
  auto model = lockstep::DistributedDataParallel(net, {.device_mesh = mesh["dp"]});

  torch::optim::AdamW adam(model->parameters(), torch::optim::AdamWOptions(0.01));
  torch::optim::AdamW alone(one->parameters(), torch::optim::AdamWOptions(0.01));
  // (5) Token numbers are plain tensors, the same on all ranks of a row.
  const lockstep::ImplicitReplicationScope plain_means_replicated;

  const bool speaks = lockstep::get_rank() == 0;
  if (speaks) std::printf("%d ranks, mesh %d x %d (dp, tp)\nstep   one process   mesh\n", n, n / tp, tp);
  double worst = 0;
  for (int step = 0; step < kSteps; ++step) {
    const auto all = text(step);
    const double expected = step_on(*one, alone, all).item<double>();
    const lockstep::CommDebugScope collectives;
    const auto loss = step_on(*model, adam, all.chunk(n / tp)[mesh.get_local_rank("dp")]);
    const auto counted = collectives.describe();

    auto mean = lockstep::full_tensor(loss).clone();
    lockstep::all_reduce(mean, {.op = lockstep::ReduceOp::kAvg, .group = mesh["dp"].get_group()});
    worst = std::max(worst, std::abs(mean.item<double>() - expected));
    if (speaks) std::printf("%4d   %.6f      %.6f\n", step, expected, mean.item<double>());
    if (speaks && step + 1 == kSteps)
      std::printf("collectives of a step on this rank: %s\n", counted.c_str());
  }
  if (speaks) {
    std::printf("largest difference of the losses: %.1e\n%s\n", worst,
                lockstep::describe(net->tokens->weight).c_str());
  }
  lockstep::destroy_process_group();
  return worst < 1e-4 ? 0 : 1;
}

}  // namespace

int main() {
  return lockstep::run_main(train);
}
