// DistributedDataParallel on uneven inputs.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/ddp/ddp_core.h"
#include "lockstep/ddp/internal/backward_optimizers.h"
#include "lockstep/ddp/internal/flat_broadcast.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/ddp/internal/reducer.h"
#include "lockstep/group/collectives.h"
#include "lockstep/tensor/gradient_access.h"

namespace lockstep {
namespace {

at::Tensor as_tensor(std::initializer_list<std::int64_t> values) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<std::int64_t>());
  return tensor;
}

}  // namespace

void DdpCore::enter_join(const JoinOptions& options) {
  if (options_.skip_all_reduce_unused_params) {
    raise(
        ErrorKind::kUsage,
        "join: a DistributedDataParallel with skip_all_reduce_unused_params cannot be joined: a rank without "
        "input does not know which buckets the others leave out");
  }
  if (!delayed_->tensors.empty()) {
    raise(ErrorKind::kUsage,
          "join: a DistributedDataParallel with delay_all_reduce_named_params cannot be joined: a rank "
          "without input "
          "does not know when the others reduce these");
  }
  join_uneven_inputs_ = true;
  if (!reducer_) return;
  reduced_before_.reset();
  reducer_->divide_by(options.divide_by_initial_world_size ? std::function<int()>() : [this] {
    return join_options() == nullptr ? group_->size() : n_active();
  });
  if (!options.throw_on_early_termination) enter_companion();
}

void DdpCore::enter_companion() {
  if (!companion_) {
    std::vector<LayerWithCollectives*> layers;
    for (const auto& module : modules(/*include_self=*/false)) {
      if (auto* const layer = dynamic_cast<LayerWithCollectives*>(module.get())) layers.push_back(layer);
    }
    if (layers.empty()) return;
    companion_ = layers.front()->make_companion(layers, group_);
  }
  companion_->enter();
  accompanied_ = true;
}

void DdpCore::leave_join() noexcept {
  if (!std::exchange(accompanied_, false)) return;
  companion_ = nullptr;  // something was raised; layers go back to their own groups
  keeps_company_ = false;
}

void DdpCore::keep_company() {
  if (companion_ && !std::exchange(keeps_company_, true)) companion_->keep_company();
}

// Ranks without input shadow one backward pass for each synced forward pass.
void DdpCore::check_answered() const {
  reducer_->check_finalized();
  if (!reduced_before_ || reducer_->n_reductions() != *reduced_before_) return;
  raise(ErrorKind::kUsage,
        "join: forward() is called again before the backward() of the last synced forward(). Under join "
        "every synced "
        "forward() needs its own backward(); evaluate under NoGradGuard, accumulate under no_sync()");
}

// One small reduction: a maximum over the ranks of each entry. Who has input need not wait for it.
void DdpCore::say(Has has) {
  say_work_.wait();  // of the last iteration, long over
  const bool active = has == Has::kInput;
  const bool with_gradients = active && at::GradMode::is_enabled();
  reduced_before_.reset();
  if (with_gradients && *syncs_) reduced_before_ = reducer_->n_reductions();
  said_ = as_tensor({active ? group_->rank() : -1, with_gradients, with_gradients && *syncs_,
                     active && current_gradients() != nullptr});
  say_work_ =
      all_reduce(said_, {.op = ReduceOp::kMax, .group = group_, .async_op = true, .where = options_.where});
}

DdpCore::Said DdpCore::heard() {
  say_work_.wait();
  const auto* values = said_.const_data_ptr<std::int64_t>();
  return {.highest_active = static_cast<int>(values[0]),
          .with_gradients = values[1] != 0,
          .synced = values[2] != 0,
          .in_context = values[3] != 0};
}

// What forward() and backward() of the others do together, in their order.
bool DdpCore::shadow_iteration() {
  if (!reducer_) return true;
  check_answered();
  keep_company();  // the others' forward passes may wait for it
  say(Has::kNone);
  const Said said = heard();
  if (said.with_gradients) {
    steps_->adopt(reduced_->tensors, delayed_->tensors);
    reducer_->prepare_for_forward();
  }
  if (buffers_due_) sync_buffers(true);
  buffers_due_ = said.synced;
  if (!said.synced) return false;
  if (buffer_hook_.run && buffer_hook_.when == BufferHook::When::kAfterForward) run_buffer_hook();
  reducer_->launch_shadow(said.in_context ? internal::Reducer::Shadow::kOfAContext
                                          : internal::Reducer::Shadow::kOfBackward);
  reducer_->finish_shadow();
  return true;
}

void DdpCore::finish_join(bool is_last_joiner) {
  if (!reducer_) return;
  keep_company();
  if (std::exchange(keeps_company_, false)) {
    companion_->finish();
    accompanied_ = false;
  }
  const at::Tensor last = as_tensor({is_last_joiner ? group_->rank() : -1});
  all_reduce(last, {.op = ReduceOp::kMax, .group = group_, .where = options_.where});
  const int speaker = static_cast<int>(*last.const_data_ptr<std::int64_t>());
  std::vector<at::Tensor> tensors = internal::parameters_of(*tensors_, options_.ignored).tensors;
  for (const auto& buffer : internal::buffers_of(*tensors_, options_.ignored).tensors)
    tensors.push_back(buffer);
  broadcast_->run(tensors, speaker);
  reducer_->share_learnt(speaker);
  reducer_->divide_by({});
}

}  // namespace lockstep
