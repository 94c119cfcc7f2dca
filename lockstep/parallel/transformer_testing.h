// For tests: a small decoder of stock torch::nn modules whose output head is the embedding's weight, and the
// two plans that split it. Its forward is the same in one process and on a mesh.
#pragma once

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "lockstep/parallel/loss_parallel.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/prepare.h"

namespace lockstep::testing {

struct DecoderOptions {
  std::int64_t vocabulary = 12;
  std::int64_t length = 6;
  std::int64_t width = 8;
  std::int64_t heads = 2;
  std::int64_t layers = 2;
  double dropout = 0.2;
  at::ScalarType dtype = at::kDouble;
};

// Different for every element, and the same in every process.
inline void fill_with_waves(torch::nn::Module& module, at::ScalarType dtype) {
  module.to(dtype);
  double shift = 0;
  for (auto& parameter : module.parameters()) {
    shift += 1.7;
    const auto values = (at::arange(parameter.numel(), dtype) * 0.37 + shift).sin() * 0.4;
    parameter.detach().copy_(values.reshape(parameter.sizes()) + (parameter.dim() == 1 ? 0.5 : 0));
  }
}

struct DecoderBlockImpl : torch::nn::Module {
  explicit DecoderBlockImpl(const DecoderOptions& o)
      : heads(o.heads), dropout(register_module("dropout", torch::nn::Dropout(o.dropout))) {
    const torch::nn::LayerNormOptions norm({o.width});
    attention_norm = register_module("attention_norm", torch::nn::LayerNorm(norm));
    qkv = register_module("qkv", torch::nn::Linear(o.width, 3 * o.width));
    out = register_module("out", torch::nn::Linear(o.width, o.width));
    mlp_norm = register_module("mlp_norm", torch::nn::LayerNorm(norm));
    up = register_module("up", torch::nn::Linear(o.width, 4 * o.width));
    down = register_module("down", torch::nn::Linear(4 * o.width, o.width));
  }

  at::Tensor forward(at::Tensor x) {
    x = x + dropout(attention(attention_norm(x)));
    return x + dropout(down(at::gelu(up(mlp_norm(x)))));
  }

  at::Tensor attention(const at::Tensor& x) {
    const auto n = x.size(0), length = x.size(1), width = x.size(2);
    // Head by head, so that a cut between heads keeps q, k and v of a head together.
    const auto parts = qkv(x).view({n, length, heads, 3 * width / heads}).transpose(1, 2).chunk(3, -1);
    const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    return out(mixed.transpose(1, 2).reshape({n, length, width}));
  }

  const std::int64_t heads;
  torch::nn::Dropout dropout;
  torch::nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(DecoderBlock);

// The output head. It has no weight of its own; it is a module so that a plan can place its input.
struct TiedHeadImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight) {
    return at::linear(prepare_inputs(*this, {x})[0], weight);
  }
};
TORCH_MODULE(TiedHead);

struct DecoderImpl : torch::nn::Module {
  explicit DecoderImpl(const DecoderOptions& o)
      : words(register_module("words", torch::nn::Embedding(o.vocabulary, o.width))),
        positions(register_parameter("positions", at::zeros({o.length, o.width}))),
        dropout(register_module("dropout", torch::nn::Dropout(o.dropout))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})))) {
    register_module("blocks", blocks);
    register_module("head", head);
    for (std::int64_t i = 0; i < o.layers; ++i) blocks->push_back(DecoderBlock(o));
    fill_with_waves(*this, o.dtype);
  }

  // [n, length] -> [n, length, vocabulary]
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = dropout(words(tokens) + positions);
    for (const auto& block : *blocks) x = block->as<DecoderBlockImpl>()->forward(x);
    return head(norm(x), words->weight);
  }

  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) {
    return loss_of(forward(tokens), targets);
  }
  static at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets) {
    const LossParallelScope scope;  // does nothing to plain tensors
    return at::cross_entropy_loss(logits.view({-1, logits.size(2)}), targets.view({-1}));
  }

  torch::nn::Embedding words;
  at::Tensor positions;
  torch::nn::Dropout dropout;
  torch::nn::LayerNorm norm;
  torch::nn::ModuleList blocks;
  TiedHead head;
};
TORCH_MODULE(Decoder);

// Heads and hidden units are split; everything between is replicated. "blocks.*.", or "" for a block alone.
inline ParallelPlan tensor_plan(const std::string& blocks) {
  return {{blocks + "qkv", ColwiseParallel{.use_local_output = false}},
          {blocks + "out", RowwiseParallel{.use_local_output = false}},
          {blocks + "up", ColwiseParallel{.use_local_output = false}},
          {blocks + "down", RowwiseParallel{.use_local_output = false}}};
}

// As above, and everything between is split by positions of the sequence.
inline ParallelPlan sequence_plan(const std::string& blocks) {
  const Shard sequence(1);
  const ColwiseParallel columns{.input_layouts = sequence, .use_local_output = false};
  const RowwiseParallel rows{.output_layouts = sequence, .use_local_output = false};
  return {
      {blocks + "attention_norm", SequenceParallel()}, {blocks + "qkv", columns}, {blocks + "out", rows},
      {blocks + "mlp_norm", SequenceParallel()},       {blocks + "up", columns},  {blocks + "down", rows}};
}

// Splits a decoder over `tp`. The vocabulary is split in both plans.
inline void split(DecoderImpl& decoder, const DeviceMesh& tp, bool sequence) {
  auto plan = sequence ? sequence_plan("blocks.*.") : tensor_plan("blocks.*.");
  if (sequence) {
    plan.emplace_back("words", RowwiseParallel{.output_layouts = Shard(1), .use_local_output = false});
    plan.emplace_back("norm", SequenceParallel());
    plan.emplace_back(
        "head", PrepareModuleInput{.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}});
  } else {
    plan.emplace_back("words", RowwiseParallel{.use_local_output = false});
  }
  parallelize_module(decoder, tp, plan);
  distribute_module(decoder, tp);  // what no style named: replicas
}

}  // namespace lockstep::testing
