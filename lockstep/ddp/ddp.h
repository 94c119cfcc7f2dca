// DistributedDataParallel: every rank holds a copy of the module, computes gradients on its own part of the batch, and
// the wrapper averages them over the ranks while backward() is still running.
//
//   auto model = lockstep::DistributedDataParallel(net, {.bucket_cap_mb = 25});
//   loss_fn(model->forward(input), target).backward();   // gradients are now equal on all ranks
//
// Gradients are averaged, not summed: a loss that sums over the batch yields gradients world-size times smaller than
// one process would get on the whole batch.
//
// Constructor, forward and backward are collective: all ranks run them in the same order. Parameters must not be added,
// removed, resized or moved after wrapping, and are registered in the same order everywhere. In a world of one the
// wrapper does nothing but call the module.
// Thread safety: as torch::nn::Module, one thread at a time.
#pragma once

#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/ddp/ddp_core.h"
#include "lockstep/ddp/distributed_sampler.h"
#include "lockstep/ddp/visit_tensors.h"

namespace lockstep {

// Linear, Sequential and every holder made with TORCH_MODULE.
template <class T>
concept ModuleHolderType = requires(const T& holder) {
  typename T::ContainedType;
  { holder.ptr() } -> std::convertible_to<std::shared_ptr<typename T::ContainedType>>;
};

template <class M>
class DistributedDataParallelImpl final : public DdpCore {
  static_assert(std::is_base_of_v<torch::nn::Module, M>, "DistributedDataParallel wraps a torch::nn::Module");

 public:
  // Blocks until all ranks construct theirs. Raises kUsage when there is no group, no trainable parameter, or the ranks'
  // modules differ; what the group raises otherwise.
  DistributedDataParallelImpl(std::shared_ptr<M> module, DdpOptions options)
      : DdpCore(module, std::move(options)), module_(std::move(module)) {}

  // The module's own forward: its arguments, its result. Raises when the last backward pass was not reduced.
  // With gradients switched off (NoGradGuard) nothing is prepared for reduction.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    before_forward();
    if constexpr (std::is_void_v<decltype(module_->forward(std::forward<Args>(args)...))>) {
      module_->forward(std::forward<Args>(args)...);
      after_forward([](const Visitor&) {});
    } else {
      decltype(auto) output = module_->forward(std::forward<Args>(args)...);
      after_forward([&](const Visitor& visit) { visit_tensors(output, visit); });
      return output;
    }
  }

  // The wrapped module. Its forward is purely local: use it to evaluate on one rank alone.
  const std::shared_ptr<M>& module() const { return module_; }

 private:
  const std::shared_ptr<M> module_;
};

// A value, like the holders of torch::nn: copies share the module; model->forward(...), model->parameters().
template <class M>
class DistributedDataParallel : public torch::nn::ModuleHolder<DistributedDataParallelImpl<M>> {
  using Base = torch::nn::ModuleHolder<DistributedDataParallelImpl<M>>;

 public:
  explicit DistributedDataParallel(std::shared_ptr<M> module, DdpOptions options = {})
      : Base(std::make_shared<DistributedDataParallelImpl<M>>(std::move(module), std::move(options))) {}
  template <ModuleHolderType Holder>
  requires std::same_as<typename Holder::ContainedType, M>
  explicit DistributedDataParallel(const Holder& holder, DdpOptions options = {})
      : DistributedDataParallel(holder.ptr(), std::move(options)) {}
  // model(x) is model->forward(x). The inherited one does not see a forward that is a template.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return this->get()->forward(std::forward<Args>(args)...);
  }
  // Empty, to be assigned later.
  DistributedDataParallel(std::nullptr_t) : Base(nullptr) {}
};

template <class M>
DistributedDataParallel(std::shared_ptr<M>, DdpOptions = {}) -> DistributedDataParallel<M>;
template <ModuleHolderType Holder>
DistributedDataParallel(const Holder&, DdpOptions = {})
    -> DistributedDataParallel<typename Holder::ContainedType>;

}  // namespace lockstep
