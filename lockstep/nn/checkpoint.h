// Activation checkpointing: a part of the forward pass keeps none of what its backward pass needs and is computed a
// second time when backward() comes to it. Memory for time.
//
//   at::Tensor y = lockstep::checkpoint(block, x);                              // a layer, or any function
//   auto [a, b] = lockstep::checkpoint([&](const at::Tensor& t) { return std::tuple(f(t), g(t)); }, x);
//   at::Tensor z = lockstep::checkpoint({.use_reentrant = true}, block, x);
//
// `fn` is a holder of or shared pointer to a module, whose forward is called, or anything callable. It is copied, and so
// are the arguments; both stay until the backward pass is over. It may take and return anything.
//
// Two forms:
// - The default keeps the graph of the forward pass and leaves out the values in it. Gradients are those of the plain
//   call, bit for bit, and everything autograd can do works: torch::autograd::grad, retain_graph, double backward, hooks,
//   tensors that `fn` captures, nesting. With DistributedDataParallel there are no limits.
// - use_reentrant runs without a graph and starts a backward pass inside the backward pass. It sees gradients only of
//   tensors in `args` (containers and tuples included, not behind pointers) and of parameters; one of the former must
//   require a gradient, or the parameters get none either; and it works with backward() only. With
//   DistributedDataParallel each layer is checkpointed at most once and find_unused_parameters is left off, unless
//   static_graph is set.
//
// `fn` must compute the same both times: a different number of tensors, or other sizes, is an error from backward().
// Random numbers repeat (preserve_rng_state), so that dropout drops the same. That goes by the state of libtorch's
// default generators, which rank threads (run_threads) share: with several of them masks can differ.
// With gradients switched off, `fn` is just called.
// Thread safety: as `fn`.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <concepts>
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

// A function and its arguments, with the tensors taken out of these.
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

// The defined ones.
template <class Value>
std::vector<at::Tensor> own_tensors(Value& value) {
  std::vector<at::Tensor> tensors;
  visit_owned_tensors(value, [&](auto& tensor) {
    if (tensor.defined()) tensors.push_back(tensor);
  });
  return tensors;
}

}  // namespace internal

// What fn(args...) returns. Errors are those of `fn`; from backward() also kUsage when the second run differs.
template <class Fn, class... Args>
auto checkpoint(CheckpointOptions options, Fn&& fn, Args&&... args) {
  static_assert(!std::is_base_of_v<torch::nn::Module, std::decay_t<Fn>>,
                "checkpoint copies its function: give it the module's holder or shared pointer");
  using Call = internal::CheckpointCall<std::decay_t<Fn>, std::decay_t<Args>...>;
  auto call = std::make_shared<Call>(std::forward<Fn>(fn), std::forward<Args>(args)...);
  const std::vector<at::Tensor> inputs = call->take_inputs();
  using Result = decltype(call->run(inputs));
  if (!at::GradMode::is_enabled()) return call->run(inputs);
  if constexpr (!std::is_void_v<Result>) {
    if (options.use_reentrant) {
      std::optional<Result> result;
      const auto first = [&](const auto& tensors) {
        result.emplace(call->run(tensors));
        return internal::own_tensors(*result);
      };
      const auto outputs =
          internal::checkpoint_reentrant(options, inputs, first, [call](const auto& tensors) {
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
  const internal::CheckpointRecording recording(options, inputs,
                                                [call](const auto& tensors) { call->run(tensors); });
  return call->run(inputs);
}

template <class Fn, class... Args>
requires(!std::same_as<std::decay_t<Fn>, CheckpointOptions>) auto checkpoint(Fn&& fn, Args&&... args) {
  return checkpoint(CheckpointOptions{}, std::forward<Fn>(fn), std::forward<Args>(args)...);
}

}  // namespace lockstep
