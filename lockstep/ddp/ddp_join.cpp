// DistributedDataParallel on uneven inputs.
#include <ATen/core/grad_mode.h>

#include <vector>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/detail/ddp_core.h"
#include "lockstep/ddp/internal/backward_optimizers.h"
#include "lockstep/ddp/internal/buffer_sync.h"
#include "lockstep/ddp/internal/ddp_join.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/ddp/internal/reducer.h"
#include "lockstep/tensor/gradient_access.h"

namespace lockstep {

void DdpCore::enter_join(const JoinOptions& options) {
  if (options_.skip_all_reduce_unused_params) {
    base::raise(
        ErrorKind::kUsage,
        "join: a DistributedDataParallel with skip_all_reduce_unused_params cannot be joined: a rank without "
        "input does not know which buckets the others leave out");
  }
  if (!delayed_->tensors.empty()) {
    base::raise(ErrorKind::kUsage,
                "join: a DistributedDataParallel with delay_all_reduce_named_params cannot be joined: a rank "
                "without input "
                "does not know when the others reduce these");
  }
  if (buffers_ && !reducer_) {
    base::raise(
        ErrorKind::kUsage,
        "join: this model's gradients are not averaged since remove_autograd_hooks(); update_process_group() "
        "averages them again");
  }
  join_uneven_inputs_ = true;
  if (!reducer_) return;
  join_->enter();
  reducer_->divide_by(options.divide_by_initial_world_size ? std::function<int()>() : [this] {
    return join_options() == nullptr ? group_->size() : n_active();
  });
  if (options.throw_on_early_termination) return;
  std::vector<LayerWithCollectives*> layers;
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* const layer = dynamic_cast<LayerWithCollectives*>(module.get())) layers.push_back(layer);
  }
  join_->enter_layers(layers);
}

void DdpCore::leave_join() noexcept {
  if (join_) join_->leave_layers();
}

void DdpCore::check_answered() const {
  reducer_->check_finalized();
  join_->check_answered(reducer_->n_reductions());
}

// Those with input need not wait for it.
void DdpCore::announce() {
  const bool with_gradients = at::GradMode::is_enabled();
  join_->announce({.active = true,
                   .with_gradients = with_gradients,
                   .synced = with_gradients && *syncs_,
                   .in_context = current_gradients() != nullptr},
                  reducer_->n_reductions());
}

// What forward() and backward() of the others do together, in their order.
bool DdpCore::shadow_iteration() {
  if (!reducer_) return true;
  check_answered();
  join_->shadow_layers();  // the others' forward passes may wait for it
  join_->announce({}, reducer_->n_reductions());
  const internal::DdpJoin::Agreed others = join_->agreed();
  if (others.with_gradients) {
    steps_->adopt(reduced_->tensors, delayed_->tensors);
    reducer_->prepare_for_forward();
  }
  wait_in_backward(buffers_->before_forward([&] { return others.highest_active; }));
  wait_in_backward(buffers_->after_forward(others.synced));
  if (!others.synced) return false;
  reducer_->shadow(others.in_context ? internal::Reducer::Shadow::kOfAContext
                                     : internal::Reducer::Shadow::kOfBackward);
  return true;
}

void DdpCore::finish_join(bool is_last_joiner) {
  if (!reducer_) return;
  join_->finish_layers();
  const int root = join_->last_active(is_last_joiner);
  std::vector<at::Tensor> tensors = internal::parameters_of(*tensors_, options_.ignored).tensors;
  for (const auto& buffer : internal::buffers_of(*tensors_, options_.ignored).tensors)
    tensors.push_back(buffer);
  buffers_->send(tensors, root);
  reducer_->share_learnt(root);
  reducer_->divide_by({});
}

}  // namespace lockstep
