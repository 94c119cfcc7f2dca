// Where a parameter's gradient is kept. The reducer reads and writes gradients only through this interface, so that a
// distributed-autograd context can stand in for Tensor::grad().
// Thread safety: called from the thread that runs backward(), one call at a time per reducer.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace lockstep {

class GradientAccess {
 public:
  virtual ~GradientAccess() = default;
  // The gradient, undefined when there is none. Writing into the tensor changes the gradient.
  virtual at::Tensor get(const at::Tensor& parameter) const = 0;
  // Makes `gradient` the gradient; from now on they share memory.
  virtual void set(const at::Tensor& parameter, at::Tensor gradient) = 0;
};

// Tensor::grad(), what optimizers read.
class GradField final : public GradientAccess {
 public:
  at::Tensor get(const at::Tensor& parameter) const override { return parameter.grad(); }
  void set(const at::Tensor& parameter, at::Tensor gradient) override {
    parameter.mutable_grad() = std::move(gradient);
  }
};

}  // namespace lockstep
