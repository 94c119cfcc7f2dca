// Hooks on the gradient accumulators of a list of parameters: they notify a listener that a gradient has been
// accumulated.
//
//   GradientHooks hooks(parameters, [this](std::size_t index, const at::Tensor& incoming) { ... });
//
// The listener is called on the thread that runs backward(), once each time an accumulator has run;
// `incoming` is what autograd passed to the accumulator, undefined when there was no gradient. The listener
// is compiled into the hook: one virtual call per gradient, libtorch's own, and no allocation.
//
// libtorch gives a parameter a new accumulator when its data is replaced, as torch::load does; hooks on the
// old one then run only for graphs built before. Hence each parameter has one current hook, and there is a
// list of former ones:
//
//   attached --accumulator replaced, follow() or renew()--> former (its graph still calls the listener)
//   former   --its graph is destroyed--> dropped at the next renew()
//
// Thread safety: none; call between forward and backward, or inside backward() on its own thread. Ownership:
// keeps parameters and their current accumulators alive (a parameter holds its accumulator only weakly, and
// the hook would be destroyed with it). The listener must outlive this object, whose destructor removes all
// hooks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/tensor/torch_compat.h"

namespace lockstep::internal {

class GradientHooks final {
 public:
  template <class Listener>
  GradientHooks(std::vector<at::Tensor> parameters, Listener listener)
      : GradientHooks(std::move(parameters), MakeHook([listener](std::size_t index) {
                        return std::make_unique<Hook<Listener>>(listener, index);
                      })) {}
  ~GradientHooks() { detach(); }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Before a forward pass: renew() if any parameter's accumulator is not the one its hook is on.
  void follow();
  // Puts a hook on the current accumulator of each parameter that requires a gradient; the others have none.
  void renew();
  // Permanent: the listener is not called again.
  void detach() noexcept;
  // By parameter; null where there is no hook.
  std::span<const compat::NodePtr> accumulators() const { return accumulators_; }

 private:
  using MakeHook = std::function<std::unique_ptr<torch::autograd::FunctionPostHook>(std::size_t index)>;
  template <class Listener>
  class Hook final : public torch::autograd::FunctionPostHook {
   public:
    Hook(Listener listener, std::size_t index) : listener_(std::move(listener)), index_(index) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list& gradients) override {
      listener_(index_, gradients.empty() ? at::Tensor() : gradients.front());
      return outputs;
    }

   private:
    Listener listener_;
    const std::size_t index_;
  };

  GradientHooks(std::vector<at::Tensor> parameters, MakeHook make);
  void attach();
  bool all_current() const;

  const std::vector<at::Tensor> parameters_;
  const MakeHook make_hook_;
  std::vector<compat::NodePtr> accumulators_;  // by parameter, as keys_
  std::vector<std::uintptr_t> keys_;
  std::vector<std::pair<compat::WeakNodePtr, std::uintptr_t>> former_;
};

}  // namespace lockstep::internal
