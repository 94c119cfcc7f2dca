#include "lockstep/ddp/internal/backward_optimizers.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/detail/optimizers_taken_over.h"
#include "lockstep/optim/detail/zero_core.h"
#include "lockstep/optim/functional_optimizer.h"
#include "lockstep/optim/in_backward.h"

namespace lockstep::internal {

// Taken over: from now on the reducer steps them with the average, instead of libtorch's hook with the local
// gradient.
void BackwardOptimizers::adopt(const std::vector<at::Tensor>& parameters,
                               const std::vector<at::Tensor>& others) {
  for (const at::Tensor& parameter : others) {
    if (!get_optimizers_in_backward(parameter).empty())
      base::raise(
          ErrorKind::kUsage,
          "DistributedDataParallel: a parameter of delay_all_reduce_named_params has an optimizer that steps "
          "inside backward; leave out one or the other");
  }
  for (const at::Tensor& parameter : parameters) {
    if (take_over_optimizers_in_backward(parameter).empty()) continue;
    if (fused_to_.contains(parameter.unsafeGetTensorImpl())) {
      base::raise(ErrorKind::kUsage,
                  "DistributedDataParallel: a parameter of the fused optimizer has another that steps inside "
                  "backward; it "
                  "would be stepped twice");
    }
    adopted_.emplace(parameter.unsafeGetTensorImpl(), parameter);
  }
}

void BackwardOptimizers::release() noexcept {
  for (const auto& entry : adopted_) give_back_optimizers_in_backward(entry.second);
  adopted_.clear();
}

void BackwardOptimizers::fuse(std::shared_ptr<FunctionalOptimizer> optimizer,
                              const std::vector<at::Tensor>& only, const std::vector<at::Tensor>& all,
                              const std::vector<bool>& sparse) {
  if (!optimizer) base::raise(ErrorKind::kUsage, "register_fused_optimizer: the optimizer is null");
  if (fused_) base::raise(ErrorKind::kUsage, "register_fused_optimizer: a model has one fused optimizer");
  // By the tensor's implementation: two handles of one parameter are one.
  std::unordered_map<const void*, bool> is_sparse;
  for (std::size_t i = 0; i < all.size(); ++i) is_sparse[all[i].unsafeGetTensorImpl()] = sparse[i];
  const auto& chosen = only.empty() ? all : only;
  if (chosen.empty())
    base::raise(ErrorKind::kUsage, "register_fused_optimizer: this model averages nothing in its buckets");
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const auto found =
        chosen[i].defined() ? is_sparse.find(chosen[i].unsafeGetTensorImpl()) : is_sparse.end();
    const char* const fault = found == is_sparse.end() ? " is not one that this model averages in its buckets"
                              : found->second          ? " has sparse gradients"
                              : !get_optimizers_in_backward(chosen[i]).empty()
                                  ? " has an optimizer of its own that steps inside backward"
                                  : nullptr;
    if (fault != nullptr)
      base::raise(ErrorKind::kUsage, base::cat("register_fused_optimizer: parameter ", i, fault));
  }
  for (const at::Tensor& parameter : chosen) fused_to_.insert(parameter.unsafeGetTensorImpl());
  fused_ = std::move(optimizer);
}

void BackwardOptimizers::overlap(ZeroCore& zero, const Group& group, const std::vector<at::Tensor>& all) {
  if (zero.group() != group)
    base::raise(ErrorKind::kUsage,
                base::cat("overlap_optimizer: the optimizer belongs to group \"", zero.group()->name(),
                          "\", the model to \"", group->name(), "\""));
  std::unordered_set<const void*> known;
  for (const at::Tensor& parameter : all) known.insert(parameter.unsafeGetTensorImpl());
  for (const auto& param_group : zero.param_groups()) {
    for (const at::Tensor& parameter : param_group.params()) {
      if (!known.contains(parameter.unsafeGetTensorImpl()))
        base::raise(
            ErrorKind::kUsage,
            "overlap_optimizer: the optimizer has a parameter that this model does not average in its "
            "buckets");
    }
  }
  // Held weakly: the optimizer belongs to the user and may go before the model.
  if (!zero_.expired())
    base::raise(ErrorKind::kUsage, "overlap_optimizer: the model has such an optimizer already");
  zero_ = zero.overlap();
  overlaps_ = true;
}

// After the last bucket: what the ranks have updated is exchanged.
void BackwardOptimizers::finish() {
  if (const auto zero = zero_.lock()) zero->finish();
}

// True: the gradient was used up, and the reducer leaves the parameter without one, as these optimizers do.
bool BackwardOptimizers::step(const at::Tensor& parameter, const at::Tensor& average) {
  if (fused_ && fused_to_.contains(parameter.unsafeGetTensorImpl())) fused_->step_param(parameter, average);
  if (const auto zero = zero_.lock()) zero->step(parameter, average);
  if (!adopted_.contains(parameter.unsafeGetTensorImpl())) return false;
  const auto optimizers = get_optimizers_in_backward(parameter);
  if (optimizers.empty()) return false;
  // In a distributed autograd context the average is not what Tensor::grad() holds.
  at::Tensor before = std::exchange(parameter.mutable_grad(), average);
  for (const auto& optimizer : optimizers) optimizer->step();
  parameter.mutable_grad() = std::move(before);
  return true;
}

}  // namespace lockstep::internal
