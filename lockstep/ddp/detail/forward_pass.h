// One forward pass of a wrapped module: what DistributedDataParallel does before and after calling it. The
// kinds of module differ only in how they are called.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lockstep/ddp/detail/ddp_core.h"
#include "lockstep/tensor/visit_tensors.h"

namespace lockstep {

class ForwardPass {
 public:
  // Collective unless in a world of one. Profilers see the pass as "DistributedDataParallel.forward".
  explicit ForwardPass(DdpCore& core);
  // An unfinished pass (the module raised) prepares no reduction and restores the parameters.
  ~ForwardPass();
  ForwardPass(const ForwardPass&) = delete;
  ForwardPass& operator=(const ForwardPass&) = delete;

  // Whether the module's inputs differ from the caller's arguments, and the conversion: to the module's GPU where
  // device_ids names it, and to the type of mixed precision.
  bool changes_inputs() const { return input_dtype_.has_value() || input_device_.has_value(); }
  void change_input(at::Tensor& tensor) const;
  // The module has returned. `visit_outputs` calls its argument with every tensor of the outputs.
  void finish(const std::function<void(const DdpCore::Visitor&)>& visit_outputs);

 private:
  class Range;

  DdpCore& core_;
  std::unique_ptr<Range> range_;
  std::optional<at::ScalarType> input_dtype_;
  std::optional<c10::Device> input_device_;
  bool shortened_ = false;  // by this pass
};

namespace internal {

// The argument itself where it cannot be copied.
template <class Arg>
using InputCopy = std::conditional_t<std::is_same_v<std::decay_t<Arg>, std::remove_cvref_t<Arg>> &&
                                         std::is_constructible_v<std::decay_t<Arg>, Arg>,
                                     std::decay_t<Arg>, Arg&&>;

template <class Call, class... Args>
decltype(auto) call_with_inputs(const ForwardPass& pass, Call& call, Args&&... args) {
  if (!pass.changes_inputs()) return call(std::forward<Args>(args)...);
  std::tuple<InputCopy<Args>...> copies(std::forward<Args>(args)...);
  return std::apply(
      [&](auto&... copy) -> decltype(auto) {
        (visit_owned_tensors(copy, [&](at::Tensor& tensor) { pass.change_input(tensor); }), ...);
        return call(static_cast<Args&&>(copy)...);
      },
      copies);
}

// call(args...) as one forward pass of `core`.
template <class Call, class... Args>
decltype(auto) run_forward(DdpCore& core, Call&& call, Args&&... args) {
  ForwardPass pass(core);
  if constexpr (std::is_void_v<std::invoke_result_t<Call&, Args...>>) {
    call_with_inputs(pass, call, std::forward<Args>(args)...);
    pass.finish([](const DdpCore::Visitor&) {});
  } else {
    decltype(auto) output = call_with_inputs(pass, call, std::forward<Args>(args)...);
    pass.finish([&](const DdpCore::Visitor& visit) { visit_tensors(output, visit); });
    return output;
  }
}

}  // namespace internal
}  // namespace lockstep
