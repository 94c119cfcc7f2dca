// The step of ZeroRedundancyOptimizer in pieces, inside backward().
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/optim/detail/zero_core.h"
#include "lockstep/optim/internal/lend.h"
#include "lockstep/optim/internal/parameter_buckets.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep {

std::shared_ptr<ZeroOverlap> ZeroCore::overlap() {
  if (!options_.overlap_with_ddp)
    base::raise(ErrorKind::kUsage, "ZeroRedundancyOptimizer: it was made without overlap_with_ddp");
  if (overlap_)
    base::raise(ErrorKind::kUsage, "ZeroRedundancyOptimizer: it steps with another model already");
  overlap_ = std::make_shared<ZeroOverlap>(*this);
  return overlap_;
}

// Any optimizer can: it is lent one parameter instead of its share.
void ZeroCore::step_one(std::size_t g, const at::Tensor& parameter, const at::Tensor& gradient) {
  std::vector<std::vector<at::Tensor>> share;
  for (auto& group : optim_->param_groups()) share.push_back(std::exchange(group.params(), {}));
  const at::Tensor before = std::exchange(parameter.mutable_grad(), gradient);
  const auto restore = [&] {
    parameter.mutable_grad() = before;
    for (std::size_t k = 0; k < share.size(); ++k) optim_->param_groups()[k].params() = std::move(share[k]);
  };
  try {
    optim_->param_groups()[g].params() = {parameter};
    internal::Lend lend(*this, *optim_, internal::Lend::What::kShare);
    optim_->step();
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

ZeroOverlap::ZeroOverlap(ZeroCore& zero) : zero_(zero) {
  for (std::size_t g = 0; g < zero.partitioned_.size(); ++g) {
    for (std::size_t i = 0; i < zero.partitioned_[g].size(); ++i)
      owners_[zero.partitioned_[g][i].unsafeGetTensorImpl()] = {g, zero.owners_[g][i]};
  }
}

// Called when an average is delivered, bucket by bucket and so in the same order on all ranks: the owner
// steps and broadcasts the parameter while later buckets are still reduced. finish() waits for all of them.
void ZeroOverlap::step(const at::Tensor& parameter, const at::Tensor& average) {
  const auto found = owners_.find(parameter.unsafeGetTensorImpl());
  if (found == owners_.end() || !parameter.requires_grad()) return;
  if (sent_.empty()) zero_.adopt_changes();
  zero_.consolidated_.reset();
  const auto [group, owner] = found->second;
  const bool mine = owner == zero_.group_->rank();
  if (mine) zero_.step_one(group, parameter, average);
  sent_.push_back(
      {.parameter = parameter,
       .work = broadcast(
           internal::local_shard(parameter).detach(),
           {.group_src = owner, .group = zero_.group_, .async_op = true, .where = zero_.options_.where}),
       .received = !mine});
}

void ZeroOverlap::finish() {
  for (const Sent& sent : std::exchange(sent_, {})) {
    sent.work.wait();
    // The optimizer has bumped the versions of its own.
    if (sent.received) sent.parameter.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace lockstep
