// The part of ZeroRedundancyOptimizer that does not depend on the optimizer it shards. ZeroCore's public
// members are the optimizer's interface, promised as that of zero_redundancy_optimizer.h, which programs
// include; this header's name is not. Thread safety: one thread at a time.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"
#include "lockstep/join/join.h"
#include "lockstep/optim/optimizer_state.h"
#include "lockstep/optim/zero_options.h"

namespace lockstep {

namespace internal {
class ParameterBuckets;
}
class ZeroCore;

// The step parameter by parameter, as DistributedDataParallel runs it inside backward().
class ZeroOverlap {
 public:
  explicit ZeroOverlap(ZeroCore& zero);
  // The parameter's owner steps it with its averaged gradient and broadcasts it asynchronously; the others
  // receive it. Must be called for the same parameters in the same order on all ranks. No-op for parameters
  // that are not the optimizer's. Raises as step().
  void step(const at::Tensor& parameter, const at::Tensor& average);
  // Blocks until all parameters of this pass are updated.
  void finish();

 private:
  struct Sent {
    at::Tensor parameter;
    Work work;
    bool received;
  };
  struct ParameterOwner {
    std::size_t group;
    int rank;
  };
  ZeroCore& zero_;  // owns this
  std::unordered_map<const void*, ParameterOwner> owners_;
  std::vector<Sent> sent_;
};

class ZeroCore : public torch::optim::Optimizer, public Joinable {
 public:
  ~ZeroCore() override;

  // Updates this rank's shard, then receives the others': collective, and parameters end bitwise equal on all
  // ranks. The optimizer calls the closure on every rank; the loss returned is this rank's. Parameters that
  // do not require a gradient are skipped, even if they have one. Raises kUsage when the parameters of a
  // group were replaced; otherwise what the optimizer, the closure or the group raises.
  at::Tensor step(LossClosure closure = nullptr) override;

  // As torch's; the same call on all ranks. Owners of earlier groups' parameters do not change. Raises kUsage
  // as the constructor does. (A group added through a torch::optim::Optimizer& is picked up by the next
  // step.)
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  // Gathers the shards of all ranks on rank `to` of the group, on the CPU; collective. Raises kUsage when
  // `to` is not a rank of the group.
  void consolidate_state_dict(int to = 0);
  // The whole optimizer's state as a plain Optim would have it, numbered over all groups. Raises kUsage
  // unless consolidate_state_dict gathered it on this rank since the last step.
  OptimizerStateDict state_dict() const;
  // Takes a whole state and keeps this rank's shard, on the parameters' devices (0-dim tensors stay on the
  // CPU). Not collective, but every rank must load the same one. Raises as set_optimizer_state_dict.
  void load_state_dict(const OptimizerStateDict& state_dict);
  // torch::save and torch::load: the whole state in the format of a plain Optim. save requires
  // consolidate_state_dict first.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  // owners()[g][i] is the rank that owns the state of parameter i of group g (partition.h). state() has only
  // this rank's.
  const std::vector<std::vector<int>>& owners() const { return owners_; }
  const Group& group() const { return group_; }
  // Raises kUsage unless overlap_with_ddp is set, and when it is already in use. Must not be used after the
  // optimizer's destruction.
  std::shared_ptr<ZeroOverlap> overlap();

  // Uneven inputs: lockstep::join({*model, optimizer}, body). A rank that has exhausted its input keeps
  // updating its shard, with the gradients that DistributedDataParallel, listed before it, restores.
  const Group& join_group() const override { return group_; }
  bool shadow_iteration() override;

 protected:
  using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
      const std::vector<torch::optim::OptimizerParamGroup>& groups)>;
  ZeroCore(const std::vector<torch::optim::OptimizerParamGroup>& groups,
           std::unique_ptr<torch::optim::OptimizerOptions> defaults, MakeOptimizer make, ZeroOptions options);

 private:
  // step() and its two halves, separate because overlapping with DDP runs them inside backward.
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
  // Steps this rank's shard; between calls holds only its parameters.
  std::unique_ptr<torch::optim::Optimizer> optim_;
  std::vector<std::vector<int>> owners_;
  std::vector<std::vector<at::Tensor>> partitioned_;  // the groups' parameters when owners_ was computed
  std::unique_ptr<internal::ParameterBuckets> buckets_;
  std::optional<OptimizerStateDict> consolidated_;
  std::shared_ptr<ZeroOverlap> overlap_;
};

}  // namespace lockstep
