// The part of ZeroRedundancyOptimizer that does not depend on the optimizer it shards. Users meet it through
// zero_redundancy_optimizer.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <unordered_map>
#include <vector>

#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/optimizer_state.h"

namespace lockstep {

struct ZeroOptions {
  Group group{};  // null: the default group
  // Parameters are moved into one flat bucket per rank in the group's shared memory, so that what a rank has updated
  // travels by one broadcast, without copies. Otherwise one broadcast per parameter.
  bool parameters_as_bucket_view = false;
  // The step belongs to backward(): give it to a model with overlap_optimizer. step() itself then only warns, and neither
  // groups nor trainability may change.
  bool overlap_with_ddp = false;
  std::source_location where = std::source_location::current();
};

namespace internal {
class ParameterBuckets;
}
class ZeroCore;

// The step in pieces, as DistributedDataParallel makes it inside backward().
class ZeroOverlap {
 public:
  explicit ZeroOverlap(ZeroCore& zero);
  // The parameter's owner steps it with its averaged gradient and sends it, asynchronously; the others receive it. The same
  // parameters in the same order on all ranks. Nothing for parameters that are not the optimizer's. Raises as step().
  void step(const at::Tensor& parameter, const at::Tensor& average);
  // Blocks until all parameters of this pass are here.
  void finish();

 private:
  struct Sent {
    at::Tensor parameter;
    Work work;
    bool received;
  };
  struct Place {
    std::size_t group;
    int owner;
  };
  ZeroCore& zero_;  // owns it
  std::unordered_map<const void*, Place> places_;
  std::vector<Sent> sent_;
};

class ZeroCore : public torch::optim::Optimizer, public Joinable {
 public:
  ~ZeroCore() override;

  // Updates this rank's share, then takes the others' from them: collective, and all ranks end with the same bits. The
  // closure is called as the optimizer calls it, on every rank; its loss is this rank's. Parameters that do not require
  // a gradient are left alone, also when they have one. Raises kUsage when the parameters of a group were exchanged;
  // what the optimizer, the closure or the group raises otherwise.
  at::Tensor step(LossClosure closure = nullptr) override;

  // As torch's; the same call on all ranks. Shares of earlier groups stay where they are. Raises kUsage as the
  // constructor does. (A group added through a torch::optim::Optimizer& is found by the next step.)
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // Brings the shares of all ranks to rank `to` of the group, on the CPU; collective. Raises kUsage when `to` is no rank
  // of the group.
  void consolidate_state_dict(int to = 0);
  // The whole optimizer's state as plain Optim would have it, by number over all groups. Raises kUsage unless
  // consolidate_state_dict brought it here since the last step.
  OptimizerStateDict state_dict() const;
  // Takes a whole state and keeps this rank's share of it, on the parameters' devices (0-dim tensors stay on the CPU).
  // Not collective, but every rank must load the same one. Raises as set_optimizer_state_dict.
  void load_state_dict(const OptimizerStateDict& state_dict);
  // torch::save and torch::load: the whole state in a form that plain Optim reads and writes, too. save needs
  // consolidate_state_dict first.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // The rank that keeps the state of parameter i of group g: owners()[g][i] (partition.h). state() has this rank's only.
  const std::vector<std::vector<int>>& owners() const { return owners_; }
  const Group& group() const { return group_; }
  // Raises kUsage unless overlap_with_ddp is set, and when somebody has it already. Ends with the optimizer.
  std::shared_ptr<ZeroOverlap> overlap();

  // Uneven inputs: lockstep::join({*model, optimizer}, body). A rank without input goes on updating its share, with the
  // gradients that its DistributedDataParallel, named before it, hands back.
  const Group& join_group() const override { return group_; }
  bool shadow_iteration() override;

 protected:
  using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
      const std::vector<torch::optim::OptimizerParamGroup>& groups)>;
  ZeroCore(const std::vector<torch::optim::OptimizerParamGroup>& groups,
           std::unique_ptr<torch::optim::OptimizerOptions> defaults, MakeOptimizer make, ZeroOptions options);

 private:
  // step() and its two halves. Apart, because overlapping with DDP runs these bucket by bucket inside backward.
  friend class ZeroOverlap;
  at::Tensor step_together(LossClosure closure);
  void step_one(std::size_t g, const at::Tensor& parameter, const at::Tensor& gradient);
  at::Tensor local_step(LossClosure closure);
  void sync_parameters();

  void partition();
  void adopt_changes();
  void add_initial_state();
  std::vector<torch::optim::OptimizerParamGroup> own_groups() const;
  std::vector<std::vector<at::Tensor>> parameters_by_owner() const;
  OptimizerStateDict own_state_dict();

  const ZeroOptions options_;
  const Group group_;
  const MakeOptimizer make_;
  std::unique_ptr<torch::optim::Optimizer>
      optim_;  // steps this rank's share; empty but for its parameters between calls
  std::vector<std::vector<int>> owners_;
  std::vector<std::vector<at::Tensor>> partitioned_;  // the groups' parameters when owners_ was made
  std::unique_ptr<internal::ParameterBuckets> buckets_;
  std::optional<OptimizerStateDict> consolidated_;
  std::shared_ptr<ZeroOverlap> overlap_;
};

}  // namespace lockstep
