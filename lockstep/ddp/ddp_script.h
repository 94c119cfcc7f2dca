// DistributedDataParallel for TorchScript modules, created or loaded with torch::jit. A separate header,
// since torch::jit is slow to compile.
//
//   torch::jit::Module net = torch::jit::load("net.pt");
//   auto model = lockstep::DistributedDataParallel(net);
//   loss_fn(model->forward(input).toTensor(), target).backward();
//
// Everything in ddp.h applies. Thread safety: one thread at a time. model->parameters(), named_parameters()
// (the script's names prefixed by "module."), train(), eval() and torch::save see the script's tensors.
// Gradients are sparse for a submodule with a true attribute `sparse` and a `weight`, as in scripted
// embeddings.
#pragma once

#include <torch/csrc/jit/api/module.h>

#include <concepts>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/ddp/ddp.h"

namespace lockstep {

namespace internal {
class ScriptMirror;
}

template <>
inline constexpr bool wrapped_by_value<torch::jit::Module> = true;

template <>
class DistributedDataParallelImpl<torch::jit::Module> final : public DdpCore {
 public:
  // Holds the script module itself, not a copy.
  DistributedDataParallelImpl(const torch::jit::Module& module, DdpOptions options);
  ~DistributedDataParallelImpl() override;

  // As torch::jit::Module::forward. Outputs are found in lists, tuples, dicts and objects.
  c10::IValue forward(std::vector<c10::IValue> inputs, torch::jit::Kwargs named = {});
  template <class... Args>
  requires(sizeof...(Args) != 0 && (std::constructible_from<c10::IValue, Args> && ...)) c10::IValue
      forward(Args&&... args) {
    return forward(std::vector<c10::IValue>{c10::IValue(std::forward<Args>(args))...});
  }

  // A deep copy, as for other modules.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

  // The wrapped module. Its forward is purely local.
  const torch::jit::Module& module() const { return module_; }

 private:
  DistributedDataParallelImpl(const torch::jit::Module& module,
                              std::shared_ptr<internal::ScriptMirror> mirror, DdpOptions options);

  torch::jit::Module module_;
  const std::shared_ptr<internal::ScriptMirror> mirror_;
};

}  // namespace lockstep
