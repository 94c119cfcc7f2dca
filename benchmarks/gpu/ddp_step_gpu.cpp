// A training step on CUDA with DistributedDataParallel over the same step without communication, in the same run:
//
//   lockstep run -n 2 -- ddp_step_gpu [row...]     rows: grads mlp256 mlp1024 mlp4096; all by default
//
// Every rank trains on the GPU that it shares with the others (or has alone); the steps without communication run on
// all ranks at the same time too. Rounds alternate; a line has the medians of the slowest rank and their ratio.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "lockstep/cuda/cuda.h"
#include "lockstep/lockstep.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace {

using namespace lockstep;

const c10::Device kGpu(c10::kCUDA, 0);

struct Row {
  const char* name;
  std::int64_t width, layers, batch;
  bool updates;  // the optimizer's step is part of it
};
// The first has eight gradients of 16 MiB; the others are the multilayer perceptrons of docs/results/gpu.md.
constexpr Row kRows[] = {{"grads", 2048, 8, 1024, false},
                         {"mlp256", 256, 8, 32, true},
                         {"mlp1024", 1024, 8, 32, true},
                         {"mlp4096", 4096, 8, 32, true}};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Row& row) {
    for (std::int64_t i = 0; i < row.layers; ++i) {
      const auto options = torch::nn::LinearOptions(row.width, row.width).bias(row.updates);
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(options)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::relu(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

template <class Forward>
double seconds_per_step(const Row& row, NetImpl& net, torch::optim::SGD& sgd, int n_steps,
                        const Forward& forward) {
  const auto x = torch::randn({row.batch, row.width}, kGpu);
  const auto once = [&] {
    sgd.zero_grad();
    forward(x).sum().backward();
    if (row.updates) sgd.step();
  };
  static_cast<void>(net);
  once();
  internal::synchronize_device(kGpu);
  barrier();
  const auto started = std::chrono::steady_clock::now();
  for (int i = 0; i < n_steps; ++i) once();
  internal::synchronize_device(kGpu);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count() / n_steps;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Of the slowest rank.
double slowest(double seconds) {
  auto value = torch::tensor({seconds}, torch::kDouble);
  all_reduce(value, {.op = ReduceOp::kMax});
  return value.item<double>();
}

void measure(const Row& row) {
  torch::manual_seed(1);
  auto plain = std::make_shared<NetImpl>(row), wrapped = std::make_shared<NetImpl>(row);
  plain->to(kGpu);
  wrapped->to(kGpu);
  auto model = DistributedDataParallel(wrapped, {});
  torch::optim::SGD of_plain(plain->parameters(), 1e-6), of_model(wrapped->parameters(), 1e-6);
  const int n_steps = row.width <= 1024 ? 50 : 15;
  std::vector<double> without, with;
  for (int round = 0; round < 9; ++round) {
    const double a =
        seconds_per_step(row, *plain, of_plain, n_steps, [&](const auto& x) { return plain->forward(x); });
    const double b =
        seconds_per_step(row, *wrapped, of_model, n_steps, [&](const auto& x) { return model->forward(x); });
    if (round < 2) continue;  // buckets are rebuilt, kernels loaded, segments opened
    without.push_back(slowest(a) * 1e3);
    with.push_back(slowest(b) * 1e3);
  }
  if (get_rank() != 0) return;
  std::printf("ddp %-8s %d ranks  without %8.3f ms  with %8.3f ms  ratio %.3f  (%s)\n", row.name,
              get_world_size(), median(without), median(with), median(with) / median(without),
              get_backend_config().c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::string why;
  if (!cuda::load(&why)) {
    std::printf("ddp_step_gpu: skipped, no GPU: %s\n", why.c_str());
    return 0;
  }
  init_process_group({.timeout = Milliseconds(120'000)});
  for (const Row& row : kRows) {
    const bool chosen = argc == 1 || std::any_of(argv + 1, argv + argc, [&](const char* name) {
                          return std::string(name) == row.name;
                        });
    if (chosen) measure(row);
  }
  destroy_process_group();
}
