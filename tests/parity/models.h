// The models of the cases and the numbers they are filled with: those of parity.py. Names and order of
// parameters are the same there.
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace parity {

constexpr std::int64_t kBatch = 4, kIn = 4, kWidth = 6, kOut = 2;

inline std::uint32_t scrambled(std::uint32_t tag, std::uint32_t index) {
  std::uint32_t h = tag * 0x9E3779B1U + index * 0x85EBCA77U + 1;
  h ^= h >> 16U;
  h *= 0x7FEB352DU;
  h ^= h >> 15U;
  h *= 0x846CA68BU;
  return h ^ h >> 16U;
}

// Between -1 and 1, exact in every type of 24 bits or more.
inline at::Tensor numbers(std::uint32_t tag, at::IntArrayRef shape) {
  at::Tensor values = torch::empty(shape, torch::kDouble);
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    const auto h = static_cast<std::int64_t>(scrambled(tag, static_cast<std::uint32_t>(i)) >> 8U);
    values.data_ptr<double>()[i] = static_cast<double>(h - (1 << 23)) / (1 << 23);
  }
  return values;
}

inline torch::nn::Linear linear(std::int64_t in, std::int64_t out, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(std::int64_t width = kWidth, bool bias = true)
      : first(register_module("first", linear(kIn, width, bias))),
        second(register_module("second", linear(width, width, bias))),
        last(register_module("last", linear(width, kOut, false))) {}
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(second(torch::tanh(first(x))))); }
  torch::nn::Linear first, second, last;
};

// One of two layers is used, or neither; one never is.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl()
      : trunk(register_module("trunk", torch::nn::Linear(kIn, kWidth))),
        left(register_module("left", torch::nn::Linear(kWidth, kWidth))),
        right(register_module("right", torch::nn::Linear(kWidth, kWidth))),
        never(register_module("never", torch::nn::Linear(kWidth, kWidth))),
        last(register_module("last", torch::nn::Linear(kWidth, kOut))) {}
  at::Tensor forward(const at::Tensor& x, int way) {
    at::Tensor y = torch::tanh(trunk(x));
    if (way == 0) y = torch::tanh(left(y));
    if (way == 1) y = torch::tanh(right(y));
    return last(y);
  }
  torch::nn::Linear trunk, left, right, never, last;
};

// One layer is used twice, one never.
struct RepeatsImpl : torch::nn::Module {
  RepeatsImpl()
      : first(register_module("first", torch::nn::Linear(kIn, kWidth))),
        shared(register_module("shared", torch::nn::Linear(kWidth, kWidth))),
        never(register_module("never", torch::nn::Linear(kWidth, kWidth))),
        last(register_module("last", torch::nn::Linear(kWidth, kOut))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::tanh(shared(torch::tanh(shared(torch::tanh(first(x)))))));
  }
  torch::nn::Linear first, shared, never, last;
};

// No bias before the norm: its gradient would be nothing but rounding.
struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : first(register_module("first", linear(kIn, kWidth, false))),
        norm(register_module("norm", torch::nn::BatchNorm1d(kWidth))),
        last(register_module("last", torch::nn::Linear(kWidth, kOut))) {}
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(norm(first(x)))); }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear last;
};

// Rows of a table, added up; their gradients are sparse.
struct BagsImpl : torch::nn::Module {
  static constexpr std::int64_t kRows = 12;
  BagsImpl()
      : table(register_module(
            "table", torch::nn::EmbeddingBag(
                         torch::nn::EmbeddingBagOptions(kRows, kWidth).mode(torch::kSum).sparse(true)))),
        last(register_module("last", torch::nn::Linear(kWidth, kOut))) {}
  at::Tensor forward(const at::Tensor& rows) { return last(torch::tanh(table(rows))); }
  torch::nn::EmbeddingBag table;
  torch::nn::Linear last;
};

}  // namespace parity
