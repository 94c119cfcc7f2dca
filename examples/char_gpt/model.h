// A small GPT in plain libtorch. Nothing here knows about ranks.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>

namespace char_gpt {

struct GptOptions {
  std::int64_t vocabulary = 96;
  std::int64_t context = 64;  // characters it looks back on
  std::int64_t width = 96;
  std::int64_t heads = 4;
  std::int64_t layers = 3;
  // The output layer is the token embedding itself: one parameter, used at both ends.
  bool tie_weights = true;
};

// Attention over the characters so far, then a small network for each character; both add to their input.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptOptions& options) : heads_(options.heads) {
    const std::int64_t width = options.width;
    norm1_ = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv_ = register_module("qkv", torch::nn::Linear(width, 3 * width));
    mix_ = register_module("mix", torch::nn::Linear(width, width));
    norm2_ = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up_ = register_module("up", torch::nn::Linear(width, 4 * width));
    down_ = register_module("down", torch::nn::Linear(4 * width, width));

    const torch::NoGradGuard no_grad;
    const double scale = 1 / std::sqrt(static_cast<double>(width));
    for (auto& linear : {qkv_, up_}) linear->weight.normal_(0, scale);
    // Each block adds twice to its input; the sum of all should be no larger than what came in.
    const double share = scale / std::sqrt(2 * static_cast<double>(options.layers));
    for (auto& linear : {mix_, down_}) linear->weight.normal_(0, share);
  }

  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm1_(x));
    return x + down_(torch::gelu(up_(norm2_(x)), "tanh"));
  }

 private:
  at::Tensor attention(const at::Tensor& x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    // {3, batch, heads, length, width / heads}
    const auto qkv = qkv_(x).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
    const auto y =
        at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                         /*is_causal=*/true);
    return mix_(y.transpose(1, 2).reshape({batch, length, width}));
  }

  std::int64_t heads_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, mix_{nullptr}, up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  explicit GptImpl(const GptOptions& options) : options_(options) {
    tokens_ = register_module("tokens", torch::nn::Embedding(options.vocabulary, options.width));
    positions_ = register_module("positions", torch::nn::Embedding(options.context, options.width));
    blocks_ = register_module("blocks", torch::nn::Sequential());
    for (std::int64_t i = 0; i < options.layers; ++i) blocks_->push_back(Block(options));
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
    if (!options.tie_weights) {
      const auto head = torch::nn::LinearOptions(options.width, options.vocabulary).bias(false);
      head_ = register_module("head", torch::nn::Linear(head));
    }
    const torch::NoGradGuard no_grad;
    for (auto& embedding : {tokens_, positions_}) embedding->weight.normal_(0, 0.1);
  }

  // Character numbers {batch, length} to scores for the character after each, {batch, length, vocabulary}.
  at::Tensor forward(const at::Tensor& ids) {
    const auto x = tokens_(ids) + positions_(torch::arange(ids.size(1), ids.options()));
    const auto y = norm_(blocks_->forward(x));
    return head_ ? head_(y) : torch::linear(y, tokens_->weight);
  }

  const GptOptions& options() const { return options_; }

 private:
  GptOptions options_;
  torch::nn::Embedding tokens_{nullptr}, positions_{nullptr};
  torch::nn::Sequential blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};
TORCH_MODULE(Gpt);

// Mean over all characters of the batch, in nats.
inline at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(scores.flatten(0, 1), targets.flatten());
}

// Every run of `context` characters of the text, with the same run one character later as its target.
class Windows : public torch::data::Dataset<Windows> {
 public:
  Windows(at::Tensor ids, std::int64_t context) : ids_(std::move(ids)), context_(context) {}
  torch::data::Example<> get(std::size_t index) override {
    const auto begin = static_cast<std::int64_t>(index);
    return {ids_.slice(0, begin, begin + context_), ids_.slice(0, begin + 1, begin + 1 + context_)};
  }
  torch::optional<std::size_t> size() const override { return ids_.size(0) - context_; }

 private:
  at::Tensor ids_;
  std::int64_t context_;
};

}  // namespace char_gpt
