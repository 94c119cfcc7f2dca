#include "lockstep/ddp/internal/ddp_join.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"

namespace lockstep::internal {
namespace {

at::Tensor as_tensor(std::initializer_list<std::int64_t> values) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<std::int64_t>());
  return tensor;
}

}  // namespace

void DdpJoin::enter() {
  reduced_before_.reset();
}

// One small reduction: a maximum over the ranks of each entry.
void DdpJoin::announce(const Iteration& mine, std::uint64_t n_reductions) {
  work_.wait();  // of the last iteration, long over
  reduced_before_.reset();
  if (mine.synced) reduced_before_ = n_reductions;
  announced_ =
      as_tensor({mine.active ? group_->rank() : -1, mine.with_gradients, mine.synced, mine.in_context});
  work_ = all_reduce(announced_, {.op = ReduceOp::kMax, .group = group_, .async_op = true, .where = where_});
}

DdpJoin::Agreed DdpJoin::agreed() {
  work_.wait();
  const auto* values = announced_.const_data_ptr<std::int64_t>();
  return {.highest_active = static_cast<int>(values[0]),
          .with_gradients = values[1] != 0,
          .synced = values[2] != 0,
          .in_context = values[3] != 0};
}

void DdpJoin::check_answered(std::uint64_t n_reductions) const {
  if (!reduced_before_ || n_reductions != *reduced_before_) return;
  base::raise(
      ErrorKind::kUsage,
      "join: forward() is called again before the backward() of the last synced forward(). Under join "
      "every synced "
      "forward() needs its own backward(); evaluate under NoGradGuard, accumulate under no_sync()");
}

int DdpJoin::last_active(bool is_last) const {
  const at::Tensor last = as_tensor({is_last ? group_->rank() : -1});
  all_reduce(last, {.op = ReduceOp::kMax, .group = group_, .where = where_});
  return static_cast<int>(*last.const_data_ptr<std::int64_t>());
}

void DdpJoin::enter_layers(const std::vector<LayerWithCollectives*>& layers) {
  if (!background_) {
    if (layers.empty()) return;
    background_ = layers.front()->make_background_shadow(layers, group_);
  }
  background_->enter();
  entered_ = true;
}

void DdpJoin::shadow_layers() {
  if (background_ && !std::exchange(shadows_, true)) background_->shadow();
}

void DdpJoin::finish_layers() {
  shadow_layers();
  if (!std::exchange(shadows_, false)) return;
  background_->finish();
  entered_ = false;
}

void DdpJoin::leave_layers() noexcept {
  if (!std::exchange(entered_, false)) return;
  background_ = nullptr;
  shadows_ = false;
}

}  // namespace lockstep::internal
