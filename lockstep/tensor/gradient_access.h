// Where a parameter's gradient is stored: Tensor::grad(), or a replacement for it. The reducer and other
// layers that read or write gradients during a backward pass do so through this interface, without knowing
// the layer that redirects them. Distributed autograd is that layer: it installs the one GradientProvider of
// the process. Thread safety: a GradientAccess is called from the thread that runs backward(), one call at a
// time per reducer. The free functions may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "lockstep/tensor/torch_compat.h"

namespace lockstep {

class GradientAccess {
 public:
  virtual ~GradientAccess() = default;
  // The gradient, undefined when there is none. Writing into the tensor changes the gradient.
  virtual at::Tensor get(const at::Tensor& parameter) const = 0;
  // Makes `gradient` the gradient; from now on they share memory.
  virtual void set(const at::Tensor& parameter, at::Tensor gradient) = 0;
  // The nodes through which gradients of other processes can enter this process's graph: a search of the
  // graph that starts at local outputs must start at these as well.
  virtual std::vector<compat::NodePtr> entry_nodes() const { return {}; }
};

// Tensor::grad(), what optimizers read.
class GradField final : public GradientAccess {
 public:
  at::Tensor get(const at::Tensor& parameter) const override { return parameter.grad(); }
  void set(const at::Tensor& parameter, at::Tensor gradient) override {
    parameter.mutable_grad() = std::move(gradient);
  }
};

// Determines where the gradients of the calling thread are stored. Both methods may be called from any
// thread.
class GradientProvider {
 public:
  virtual ~GradientProvider() = default;
  // Null: in Tensor::grad().
  virtual std::shared_ptr<GradientAccess> current() const = 0;
  // The calling thread runs a node of a backward pass whose gradients do not belong in Tensor::grad(). A
  // context may be current without such a pass: a plain backward() inside it fills Tensor::grad() as usual.
  virtual bool in_backward() const noexcept = 0;
};

// Replaces the provider of the process; null: none. It must outlive its use: providers are static objects.
// Returns the previous one.
const GradientProvider* set_gradient_provider(const GradientProvider* provider) noexcept;

// Forwarded to the provider; null and false without one.
std::shared_ptr<GradientAccess> current_gradients();
bool in_redirected_backward() noexcept;

}  // namespace lockstep
