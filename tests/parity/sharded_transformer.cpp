// A transformer of two layers, changed by parallelize_module and trained for two steps.
#include <torch/torch.h>

#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/prepare.h"
#include "tests/parity/models.h"
#include "tests/parity/sharded_cases.h"

namespace parity {
namespace {

using lockstep::ColwiseParallel;
using lockstep::PrepareModuleInput;
using lockstep::Replicate;
using lockstep::RowwiseParallel;
using lockstep::SequenceParallel;
using lockstep::Shard;

constexpr std::int64_t kWords = 11, kWide = 4, kHeads = 2, kHidden = 8, kSamples = 2, kLength = 4;

torch::nn::LayerNorm layer_norm() {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWide}));
}

// No bias for the keys: its gradient would be nothing but rounding.
struct AttentionImpl : torch::nn::Module {
  AttentionImpl()
      : q(register_module("q", linear(kWide, kWide, true))),
        k(register_module("k", linear(kWide, kWide, false))),
        v(register_module("v", linear(kWide, kWide, true))),
        out(register_module("out", linear(kWide, kWide, true))) {}
  at::Tensor forward(at::Tensor x) {
    x = lockstep::prepare_inputs(*this, {x})[0];
    const auto heads = [&x](torch::nn::Linear& layer) {
      return layer(x).view({kSamples, kLength, -1, kWide / kHeads}).transpose(1, 2);
    };
    const auto mixed = at::scaled_dot_product_attention(heads(q), heads(k), heads(v), {}, 0.0, true);
    return out(mixed.transpose(1, 2).reshape({kSamples, kLength, -1}));
  }
  torch::nn::Linear q, k, v, out;
};
TORCH_MODULE(Attention);

struct FeedForwardImpl : torch::nn::Module {
  FeedForwardImpl()
      : up(register_module("up", linear(kWide, kHidden, true))),
        down(register_module("down", linear(kHidden, kWide, true))) {}
  at::Tensor forward(const at::Tensor& x) {
    return down(torch::gelu(up(lockstep::prepare_inputs(*this, {x})[0])));
  }
  torch::nn::Linear up, down;
};
TORCH_MODULE(FeedForward);

struct LayerImpl : torch::nn::Module {
  LayerImpl()
      : norm1(register_module("norm1", layer_norm())),
        attention(register_module("attention", Attention())),
        norm2(register_module("norm2", layer_norm())),
        mlp(register_module("mlp", FeedForward())) {}
  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm1(x));
    return x + mlp(norm2(x));
  }
  torch::nn::LayerNorm norm1;
  Attention attention;
  torch::nn::LayerNorm norm2;
  FeedForward mlp;
};
TORCH_MODULE(Layer);

struct TransformerImpl : torch::nn::Module {
  TransformerImpl()
      : words(register_module("words", torch::nn::Embedding(kWords, kWide))),
        layers(register_module("layers", torch::nn::ModuleList(Layer(), Layer()))),
        norm(register_module("norm", layer_norm())),
        head(register_module("head", linear(kWide, kWords, false))) {}
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = words(tokens);
    for (const auto& layer : *layers) x = layer->as<LayerImpl>()->forward(x);
    return head(norm(x));
  }
  torch::nn::Embedding words;
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Transformer);

lockstep::ParallelPlan tensor_plan() {
  return {{"words", RowwiseParallel{.input_layouts = Replicate()}},
          {"layers.*.attention.[qkv]", ColwiseParallel()},
          {"layers.*.attention.out", RowwiseParallel()},
          {"layers.*.mlp.up", ColwiseParallel()},
          {"layers.*.mlp.down", RowwiseParallel()},
          {"head", ColwiseParallel{.use_local_output = false}}};
}

lockstep::ParallelPlan sequence_plan() {
  const PrepareModuleInput gathered{.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}};
  return {{"words", RowwiseParallel{.input_layouts = Replicate(), .output_layouts = Shard(1)}},
          {"layers.*.norm[12]", SequenceParallel()},
          {"layers.*.attention", gathered},
          {"layers.*.attention.[qkv]", ColwiseParallel()},
          {"layers.*.attention.out", RowwiseParallel{.output_layouts = Shard(1)}},
          {"layers.*.mlp", gathered},
          {"layers.*.mlp.up", ColwiseParallel()},
          {"layers.*.mlp.down", RowwiseParallel{.output_layouts = Shard(1)}},
          {"norm", SequenceParallel()},
          {"head", ColwiseParallel{.input_layouts = Shard(1), .use_local_output = false}}};
}

Transformer filled(at::ScalarType dtype) {
  Transformer net;
  net->to(dtype);
  const torch::NoGradGuard no_grad;
  std::uint32_t tag = 1;
  for (at::Tensor& parameter : net->parameters()) parameter.copy_(0.5 * numbers(tag++, parameter.sizes()));
  return net;
}

// Two steps of SGD. The logits lie sharded over the words, and the loss is taken there.
void train(ShardedRun& run, const lockstep::ParallelPlan& plan) {
  auto net = filled(run.dtype());
  lockstep::parallelize_module(*net, run.mesh(), plan);
  for (const auto& item : net->named_parameters()) run.see("param." + item.key(), item.value());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (std::uint32_t step = 0; step < 2; ++step) {
    const std::string when = "step" + std::to_string(step) + ".";
    const auto tokens = ShardedRun::plain_indices(1000 + step, {kSamples, kLength}, kWords);
    optimizer.zero_grad();
    const auto logits = net(tokens);
    run.see(when + "logits", logits);
    const auto loss = at::cross_entropy_loss(logits.flatten(0, 1),
                                             run.indices(2000 + step, {kSamples * kLength}, kWords, {}));
    run.see(when + "loss", loss);
    loss.backward();
    for (const auto& item : net->named_parameters())
      run.see(when + "grad." + item.key(), item.value().grad());
    optimizer.step();
  }
  for (const auto& item : net->named_parameters()) run.see("end." + item.key(), item.value());
}

}  // namespace

std::vector<ShardedCase> transformer_cases() {
  // Not in f32: see sharded_transformer.py.
  return {{"transformer_tensor_parallel", [](ShardedRun& run) { train(run, tensor_plan()); }, false},
          {"transformer_sequence_parallel", [](ShardedRun& run) { train(run, sequence_plan()); }, false}};
}

}  // namespace parity
