// Models and training loops shared by the tests: the same steps by one process on the whole batch, and by one
// rank of n on its part of it.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "lockstep/ddp/ddp.h"
#include "lockstep/tensor/tensor_testing.h"

namespace lockstep::ddp_testing {

constexpr std::int64_t kIn = 6;
constexpr std::int64_t kOut = 3;

using tensor_testing::drawn;
using tensor_testing::refusal;

inline void fill_parameters(torch::nn::Module& module, std::uint64_t seed) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.copy_(0.3 * drawn(++seed, parameter.sizes()));
}

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    first = register_module("first", torch::nn::Linear(kIn, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
    last = register_module("last", torch::nn::Linear(torch::nn::LinearOptions(8, kOut).bias(false)));
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(second(torch::tanh(first(x))))); }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
};
TORCH_MODULE(Mlp);

// One layer registered under two names, and one weight used twice.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    table = register_parameter("table", torch::empty({kOut, kIn}));
    inner = register_module("inner", torch::nn::Linear(kIn, kIn));
    register_module("again", inner);
    register_parameter("table_again", table);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = torch::tanh(inner(torch::tanh(inner(x))));
    return torch::linear(torch::matmul(torch::linear(y, table), table), table);
  }
  at::Tensor table;
  torch::nn::Linear inner{nullptr};
};

inline at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

struct Trained {
  std::vector<at::Tensor> parameters;
  std::vector<double> losses;
};

constexpr int kSteps = 6;
constexpr std::int64_t kBatch = 4;

inline at::Tensor batch_input(int step, int n) {
  return drawn(1000 + static_cast<std::uint64_t>(step), {n * kBatch, kIn});
}
inline at::Tensor batch_target(int step, int n) {
  return drawn(2000 + static_cast<std::uint64_t>(step), {n * kBatch, kOut});
}

// Rank r's part of a batch for all.
inline at::Tensor part(const at::Tensor& batch, int rank) {
  return batch.narrow(0, rank * kBatch, kBatch);
}

inline std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> once;
  for (const auto& parameter : module.parameters()) {
    if (std::none_of(once.begin(), once.end(), [&](const auto& p) { return p.is_same(parameter); })) {
      once.push_back(parameter);
    }
  }
  return once;
}

template <class Impl>
Trained train_alone(int n) {
  auto model = std::make_shared<Impl>();
  fill_parameters(*model, 1);
  torch::optim::SGD sgd(unique_parameters(*model), torch::optim::SGDOptions(0.1).momentum(0.9));
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    const at::Tensor loss = loss_of(model->forward(batch_input(step, n)), batch_target(step, n));
    loss.backward();
    sgd.step();
    result.losses.push_back(loss.template item<double>());
  }
  result.parameters = model->parameters();
  return result;
}

// Rank r trains on the r-th part of the same batches; ranks start from different values, rank 0's win.
template <class Impl>
Trained train_rank(int rank, int n, const DdpOptions& options, bool set_to_none) {
  auto net = std::make_shared<Impl>();
  fill_parameters(*net, rank == 0 ? 1 : 77);
  auto model = DistributedDataParallel(net, options);
  torch::optim::SGD sgd(unique_parameters(*model), torch::optim::SGDOptions(0.1).momentum(0.9));
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad(set_to_none);
    const at::Tensor x = part(batch_input(step, n), rank);
    const at::Tensor y = part(batch_target(step, n), rank);
    const at::Tensor loss = loss_of(model->forward(x), y);
    loss.backward();
    sgd.step();
    result.losses.push_back(loss.template item<double>());
  }
  result.parameters = model->parameters();
  return result;
}

inline void expect_close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(torch::allclose(a[i], b[i], 1e-4, 1e-6)) << "tensor " << i << "\n" << a[i] << "\n" << b[i];
  }
}

// Collects one value per rank thread and compares them after the run.
template <class T>
class PerRank {
 public:
  void put(int rank, T value) {
    const std::lock_guard lock(mutex_);
    values_[rank] = std::move(value);
  }
  const std::map<int, T>& values() const { return values_; }

 private:
  std::mutex mutex_;
  std::map<int, T> values_;
};

inline void expect_same_bits(const PerRank<std::vector<at::Tensor>>& per_rank) {
  const auto& first = per_rank.values().at(0);
  for (const auto& [rank, tensors] : per_rank.values()) {
    ASSERT_EQ(tensors.size(), first.size());
    for (std::size_t i = 0; i < first.size(); ++i) {
      EXPECT_TRUE(torch::equal(tensors[i], first[i])) << "rank " << rank << ", tensor " << i;
    }
  }
}

inline at::Tensor input_of(int step, int rank) {
  return drawn(static_cast<std::uint64_t>(3000 + 10 * step + rank), {2, kIn});
}

}  // namespace lockstep::ddp_testing
