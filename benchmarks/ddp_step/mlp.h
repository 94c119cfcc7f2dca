// The model and the step that are timed: `layers` times a square Linear and a ReLU, batch 32, mean squared error, SGD.
#pragma once

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdint>

namespace bench {

inline constexpr std::int64_t kBatch = 32;

inline torch::nn::Sequential make_mlp(std::int64_t hidden, std::int64_t layers) {
  torch::nn::Sequential mlp;
  for (std::int64_t k = 0; k < layers; ++k) {
    mlp->push_back(torch::nn::Linear(hidden, hidden));
    mlp->push_back(torch::nn::ReLU());
  }
  return mlp;
}

// One training step of anything with forward(tensor); returns the loss.
template <class Model>
double train_step(Model& model, torch::optim::Optimizer& optimizer, const at::Tensor& input,
                  const at::Tensor& target) {
  optimizer.zero_grad();
  const at::Tensor loss = torch::nn::functional::mse_loss(model->forward(input), target);
  loss.backward();
  optimizer.step();
  return loss.item<double>();
}

}  // namespace bench
