// The models that are timed and the step: forward, mean squared error, backward, optimizer.
#pragma once

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/optimizer.h>

#include <cstdint>

#include "benchmarks/common/request.h"

namespace bench {

// `layers` times a square Linear, with or without bias, and a ReLU. torch_ddp.py builds the same.
struct Shape {
  std::int64_t hidden = 0;
  std::int64_t layers = 0;
  std::int64_t batch = 0;
  bool bias = true;
  friend bool operator==(const Shape&, const Shape&) = default;
};

inline Shape shape_of(const Request& request) {
  return {request.number("hidden"), request.number("layers"), request.number("batch"),
          request.number("bias") != 0};
}

inline torch::nn::Sequential make_model(const Shape& shape) {
  torch::nn::Sequential model;
  for (std::int64_t k = 0; k < shape.layers; ++k) {
    model->push_back(
        torch::nn::Linear(torch::nn::LinearOptions(shape.hidden, shape.hidden).bias(shape.bias)));
    model->push_back(torch::nn::ReLU());
  }
  return model;
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
