// Activation checkpointing: a region of the forward pass saves no activations for its backward pass and is
// recomputed when backward() reaches it. Trades time for memory.
//
//   at::Tensor y = lockstep::checkpoint(block, x);                              // a layer, or any function
//   auto [a, b] = lockstep::checkpoint([&](const at::Tensor& t) { return std::tuple(f(t), g(t)); }, x);
//   at::Tensor z = lockstep::Checkpoint{.use_reentrant = true}(block, x);       // with options
//
// `fn` is a module holder or shared pointer, whose forward is called, or any callable. It and its arguments
// are copied and kept until the backward pass is over. It may take and return any types.
//
// Two forms:
// - The default keeps the graph of the forward pass without its saved tensors. Gradients are bitwise those of
//   the plain call, and all autograd features work: torch::autograd::grad, retain_graph, double backward,
//   hooks, tensors that `fn` captures, nesting. There are no restrictions with DistributedDataParallel.
// - use_reentrant runs without a graph and starts a nested backward pass. Only tensors in `args` (containers
//   and tuples included, not behind pointers) and parameters get gradients; one of the former must require a
//   gradient, otherwise the parameters get none either; and only backward() is supported. With
//   DistributedDataParallel each layer may be checkpointed at most once and find_unused_parameters must be
//   off, unless static_graph is set.
//
// `fn` must compute the same both times: a different number of tensors, or other sizes, is an error from
// backward(). Random numbers repeat (preserve_rng_state), so dropout masks are equal. This saves the state of
// libtorch's default generators, which rank threads (run_threads) share: with several of them masks can
// differ. With gradients disabled, `fn` is simply called.
// Thread safety: as `fn`.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/nn/detail/checkpoint_core.h"
#include "lockstep/tensor/visit_tensors.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

namespace internal {

// A function and its arguments, with the tensors moved out of the arguments.
template <class Fn, class... Args>
class CheckpointCall {
 public:
  CheckpointCall(Fn fn, Args... args) : fn_(std::move(fn)), args_(std::move(args)...) {}
  std::vector<at::Tensor> take_inputs() {
    std::vector<at::Tensor> inputs;
    visit_owned_tensors(args_, [&](auto& tensor) {
      inputs.push_back(std::move(tensor));
      tensor.reset();
    });
    return inputs;
  }
  auto run(const std::vector<at::Tensor>& inputs) {
    auto args = args_;
    auto next = inputs.begin();
    visit_owned_tensors(args, [&](auto& tensor) { tensor = *next++; });
    return std::apply([&](auto&... arg) { return call(fn_, arg...); }, args);
  }

 private:
  static auto call(Fn& fn, Args&... args) {
    if constexpr (requires { fn->forward(args...); }) {
      return fn->forward(args...);
    } else {
      return std::invoke(fn, args...);
    }
  }
  Fn fn_;
  std::tuple<Args...> args_;
};

// The defined tensors that `value` holds.
template <class Value>
std::vector<at::Tensor> own_tensors(Value& value) {
  std::vector<at::Tensor> tensors;
  visit_owned_tensors(value, [&](auto& tensor) {
    if (tensor.defined()) tensors.push_back(tensor);
  });
  return tensors;
}

}  // namespace internal

// A way to checkpoint: the options, and the call.
struct Checkpoint {
  // False: the graph is kept without its saved tensors. True: no graph, and a nested backward pass inside
  // backward().
  bool use_reentrant = false;
  // The recomputation draws the same random numbers; the generators are restored afterwards.
  bool preserve_rng_state = true;
  // Compare sizes, type and device of the tensors that both runs save.
  bool determinism_check = true;
  // End the recomputation when backward has what it needs, by an exception that `fn` must not catch.
  bool early_stop = true;

  // Returns fn(args...). Raises what `fn` raises; backward() raises kUsage if the recomputation differs.
  template <class Fn, class... Args>
  auto operator()(Fn&& fn, Args&&... args) const;
};

// With the default options.
template <class Fn, class... Args>
auto checkpoint(Fn&& fn, Args&&... args) {
  return Checkpoint{}(std::forward<Fn>(fn), std::forward<Args>(args)...);
}

template <class Fn, class... Args>
auto Checkpoint::operator()(Fn&& fn, Args&&... args) const {
  static_assert(!std::is_base_of_v<torch::nn::Module, std::decay_t<Fn>>,
                "checkpoint copies its function: give it the module's holder or shared pointer");
  using Call = internal::CheckpointCall<std::decay_t<Fn>, std::decay_t<Args>...>;
  auto call = std::make_shared<Call>(std::forward<Fn>(fn), std::forward<Args>(args)...);
  const std::vector<at::Tensor> inputs = call->take_inputs();
  using Result = decltype(call->run(inputs));
  if (!at::GradMode::is_enabled()) return call->run(inputs);
  if constexpr (!std::is_void_v<Result>) {
    if (use_reentrant) {
      std::optional<Result> result;
      const auto first = [&](const auto& tensors) {
        result.emplace(call->run(tensors));
        return internal::own_tensors(*result);
      };
      const auto outputs = internal::checkpoint_reentrant(*this, inputs, first, [call](const auto& tensors) {
        Result again = call->run(tensors);
        return internal::own_tensors(again);
      });
      auto next = outputs.begin();
      visit_owned_tensors(*result, [&](auto& tensor) {
        if (tensor.defined()) tensor = *next++;
      });
      return *std::move(result);
    }
  }
  const internal::CheckpointRecording recording(*this, inputs,
                                                [call](const auto& tensors) { call->run(tensors); });
  return call->run(inputs);
}

}  // namespace lockstep
