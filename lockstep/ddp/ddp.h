// DistributedDataParallel: every rank holds a copy of the module, computes gradients on its own part of the
// batch, and the wrapper averages them over the ranks while backward() is still running.
//
//   auto model = lockstep::DistributedDataParallel(net, {.gradient_as_bucket_view = true});
//   loss_fn(model->forward(input), target).backward();   // gradients are now equal on all ranks
//
// Gradients are averaged, not summed: a loss that sums over the batch yields gradients world-size times
// smaller than one process would get on the whole batch.
//
// Constructor, forward and backward are collective: all ranks run them in the same order. Parameters must not
// be added, removed, resized or moved after wrapping, and must be registered in the same order on all ranks.
// Added ones are detected before the first forward pass and every 100th after it, and raise kUsage. In a
// world of one the wrapper only calls the module.
//
// Besides forward() a model has the public members of DdpCore (detail/ddp_core.h): no_sync,
// register_comm_hook, register_buffer_hook, register_fused_optimizer, overlap_optimizer,
// update_process_group, set_static_graph, logging_data, stats, and what join() calls.
// Thread safety: as torch::nn::Module, one thread at a time.
#pragma once

#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/ddp_options.h"
#include "lockstep/ddp/detail/ddp_core.h"
#include "lockstep/ddp/detail/forward_pass.h"
#include "lockstep/ddp/distributed_sampler.h"
#include "lockstep/tensor/visit_tensors.h"

namespace lockstep {

// Linear, Sequential and every holder declared with TORCH_MODULE.
template <class T>
concept ModuleHolderType = requires(const T& holder) {
  typename T::ContainedType;
  { holder.ptr() } -> std::convertible_to<std::shared_ptr<typename T::ContainedType>>;
};

// Modules that are handles themselves and are wrapped by value instead of by pointer: AnyModule;
// torch::jit::Module when ddp_script.h is included.
template <class M>
inline constexpr bool wrapped_by_value = false;
template <>
inline constexpr bool wrapped_by_value<torch::nn::AnyModule> = true;

template <class M>
class DistributedDataParallelImpl final : public DdpCore {
  static_assert(
      std::is_base_of_v<torch::nn::Module, M>,
      "DistributedDataParallel wraps torch::nn::Module, AnyModule and, with lockstep/ddp/ddp_script.h, "
      "torch::jit::Module");

 public:
  // Blocks until all ranks construct theirs. Raises kUsage when there is no group or this rank is not in it,
  // when there is no trainable parameter, a weight was tied by assignment to a layer's member, or the ranks'
  // modules differ; otherwise what the group raises.
  DistributedDataParallelImpl(std::shared_ptr<M> module, DdpOptions options)
      : DdpCore(internal::tensors_of(module), module, std::move(options)), module_(std::move(module)) {}

  // The module's own forward: its arguments, its result. Raises when the last backward pass was not reduced.
  // With gradients disabled (NoGradGuard) no reduction is prepared.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    const auto call = [this](auto&&... inputs) -> decltype(auto) {
      return module_->forward(std::forward<decltype(inputs)>(inputs)...);
    };
    return internal::run_forward(*this, call, std::forward<Args>(args)...);
  }

  // A deep copy with the same options and the same group. Collective, since the copy has buckets of its own;
  // values are neither compared nor sent: every rank copies what it has. Hooks are not copied. Raises kUsage
  // when the module cannot be cloned (torch::nn::Cloneable).
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    const auto copy = std::dynamic_pointer_cast<M>(cloned(*module_, device));
    return std::make_shared<DistributedDataParallelImpl>(copy, options_of_clone());
  }

  // The wrapped module. Its forward is purely local: use it to evaluate on a single rank.
  const std::shared_ptr<M>& module() const { return module_; }

 private:
  const std::shared_ptr<M> module_;
};

// As AnyModule, which hides the module's type: model->forward<Result>(...), Result is a tensor by default,
// and arguments must have exactly the types that the module's forward takes.
template <>
class DistributedDataParallelImpl<torch::nn::AnyModule> final : public DdpCore {
 public:
  DistributedDataParallelImpl(torch::nn::AnyModule module, DdpOptions options)
      : DdpCore(internal::tensors_of(pointer_of(module)), pointer_of(module), std::move(options)),
        module_(std::move(module)) {}

  template <class Result = at::Tensor, class... Args>
  Result forward(Args&&... args) {
    const auto call = [this](auto&&... inputs) -> Result {
      return module_.forward<Result>(std::forward<decltype(inputs)>(inputs)...);
    };
    return internal::run_forward(*this, call, std::forward<Args>(args)...);
  }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    cloned(*module_.ptr(), device);  // raises our own error when it cannot be cloned
    return std::make_shared<DistributedDataParallelImpl>(module_.clone(device), options_of_clone());
  }

  const torch::nn::AnyModule& module() const { return module_; }

 private:
  static std::shared_ptr<torch::nn::Module> pointer_of(const torch::nn::AnyModule& module) {
    return module.is_empty() ? nullptr : module.ptr();
  }

  torch::nn::AnyModule module_;
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
  explicit DistributedDataParallel(const M& module, DdpOptions options = {}) requires wrapped_by_value<M>
      : Base(std::make_shared<DistributedDataParallelImpl<M>>(module, std::move(options))) {}
  // model(x) is model->forward(x). The inherited operator does not support a forward that is a template.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return this->get()->forward(std::forward<Args>(args)...);
  }
  // See DistributedDataParallelImpl::clone. The copy is an independent model.
  DistributedDataParallel clone(const std::optional<torch::Device>& device = std::nullopt) const {
    return DistributedDataParallel(
        std::dynamic_pointer_cast<DistributedDataParallelImpl<M>>(this->ptr()->clone(device)));
  }
  // Empty, to be assigned later.
  DistributedDataParallel(std::nullptr_t) : Base(nullptr) {}

 private:
  explicit DistributedDataParallel(std::shared_ptr<DistributedDataParallelImpl<M>> made)
      : Base(std::move(made)) {}
};

template <class M>
DistributedDataParallel(std::shared_ptr<M>, DdpOptions = {}) -> DistributedDataParallel<M>;
template <ModuleHolderType Holder>
DistributedDataParallel(const Holder&, DdpOptions = {})
    -> DistributedDataParallel<typename Holder::ContainedType>;

// Removes `prefix` from keys that begin with it, so that what a wrapped model saved can be loaded into an
// unwrapped one.
torch::OrderedDict<std::string, at::Tensor> strip_prefix(
    const torch::OrderedDict<std::string, at::Tensor>& tensors, const std::string& prefix = "module.");

}  // namespace lockstep
