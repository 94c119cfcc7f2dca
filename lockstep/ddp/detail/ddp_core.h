// The part of DistributedDataParallel that does not depend on the wrapped module's type. Its public members
// are the model's interface, promised as that of ddp.h, which programs include; this header's name, and what
// is protected or private, are not. Thread safety: as torch::nn::Module, one thread at a time.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/ddp_options.h"
#include "lockstep/ddp/detail/module_tensors.h"
#include "lockstep/ddp/logging_data.h"
#include "lockstep/ddp/reducer_stats.h"
#include "lockstep/group/process_group.h"
#include "lockstep/join/join.h"

namespace lockstep {

class FunctionalOptimizer;
class ZeroCore;
namespace internal {
class BackwardOptimizers;
class BufferSync;
class DdpJoin;
class DelayedReduction;
class Reducer;
struct NamedTensors;
}  // namespace internal

class DdpCore : public torch::nn::Module, public Joinable {
 public:
  // For its lifetime gradients accumulate locally only; forward and backward must both run inside it. The
  // next synced backward averages what was accumulated. May be nested.
  class [[nodiscard]] NoSync {
   public:
    ~NoSync() { *syncs_ = before_; }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    friend class DdpCore;
    explicit NoSync(std::shared_ptr<bool> syncs) : syncs_(std::move(syncs)), before_(*syncs_) {
      *syncs_ = false;
    }
    std::shared_ptr<bool> syncs_;
    bool before_;
  };

  using Visitor = std::function<void(at::Tensor&)>;

  ~DdpCore() override;
  NoSync no_sync() { return NoSync(syncs_); }
  // Raises when the last backward pass was not completely reduced; the next forward() raises it as well.
  void check_reducer_finalized() const;
  // All zero in a world of one.
  ReducerStats stats() const;
  // Configuration, counters, and the times of the last sampled step: the first ten are sampled, and every
  // 100th after them. No times in a world of one.
  DdpLoggingData logging_data() const;
  // Samples every rate-th step; 1: all. Raises kUsage below 1.
  void set_ddp_runtime_logging_sample_rate(std::int64_t rate);
  const Group& group() const { return group_; }
  // Replaces the averaging of each bucket of gradients (comm_hook.h, hooks.h). Call once, before the first
  // backward pass, with the same hook on all ranks; raises kUsage otherwise. In a world of one it is never
  // called.
  void register_comm_hook(CommHook hook);
  // Called around each synced forward pass; once per model, the same on all ranks. In a world of one it is
  // never called. Raises kUsage for an empty hook or a second one.
  void register_buffer_hook(BufferHook hook);
  // Steps each parameter (all that are averaged in buckets, or `only` these) when its averaged gradient is
  // delivered at the end of backward(), while later buckets are still being reduced; the gradients are kept.
  // Call once; raises kUsage for null, a second one, and a parameter that is unknown, sparse or has its own
  // optimizer. Optimizers set with apply_optimizer_in_backward need no such call: they are taken over, and
  // their gradients are left undefined.
  void register_fused_optimizer(std::shared_ptr<FunctionalOptimizer> optimizer,
                                const std::vector<at::Tensor>& only = {});
  // Runs the optimizer, which must have overlap_with_ddp set, inside backward(): as soon as a gradient is
  // averaged, the rank that owns its state updates the parameter and broadcasts it, while later buckets are
  // still being reduced. When backward() returns, parameters are equal on all ranks; gradients are kept. Call
  // once, on all ranks; raises kUsage for another group, a parameter that is not averaged in buckets, an
  // optimizer without the option or used by another model. With communication hooks, their results are the
  // gradients used.
  void overlap_optimizer(ZeroCore& zero);
  // From the next forward pass on, the ranks of `group` (null: the default group) train together; also
  // allowed after a failed reduction, for example when a rank was lost. All its ranks must call it. Values
  // are not broadcast: the caller guarantees that they are equal. Buckets are planned anew and rebuilt by
  // order of arrival, a static graph is recorded again, statistics are reset, and forward passes awaiting
  // their backward are dropped. Communication hooks with their own group keep it. Raises kUsage inside join()
  // or backward(), or when this rank is not a member.
  void update_process_group(Group group);
  // As the option; raises kUsage after the first forward pass.
  void set_static_graph();
  // Gradients stay local from now on, as with torch's _remove_autograd_hooks, for callers that average them
  // by other means. Lasts until update_process_group(), which installs the hooks again. Raises kUsage inside
  // backward() or join(), and when optimizers step inside backward(), since they would no longer run.
  void remove_autograd_hooks();
  // The outputs of forward() are copies of what the module returned, so that they may be modified in place.
  // Applies only where outputs are observed (find_unused_parameters, static_graph, mixed precision); false
  // saves the copy.
  void set_sink_clone(bool clone) { sink_clone_ = clone; }

  // Uneven inputs: lockstep::join({*model}, body, options). Inside, each synced forward() is followed by its
  // own backward(). Buffers come from the highest rank that still has input; at the end all ranks get the
  // model of the last rank (the highest, if several) that had input. Ranks without input receive the averaged
  // gradients, too. Raises kUsage with skip_all_reduce_unused_params: ranks without input do not know which
  // buckets the others skip. Layers with their own collectives (SyncBatchNorm) are shadowed in the background
  // (join/background_shadow.h).
  const Group& join_group() const override { return group_; }
  void enter_join(const JoinOptions& options) override;
  bool shadow_iteration() override;
  void finish_join(bool is_last_joiner) override;
  void leave_join() noexcept override;

 protected:
  // `module` is registered as the child "module", so parameters(), train() and torch::save see it.
  DdpCore(std::shared_ptr<const internal::ModuleTensors> tensors, std::shared_ptr<torch::nn::Module> module,
          DdpOptions options);
  // module.clone(device); its errors become kUsage.
  static std::shared_ptr<torch::nn::Module> cloned(const torch::nn::Module& module,
                                                   const std::optional<torch::Device>& device);
  // This model's options; the clones are assumed equal on all ranks if the originals are.
  DdpOptions options_of_clone() const;

 private:
  friend class ForwardPass;
  // Collective unless in a world of one: checks the last backward pass, rebuilds buckets once, sends buffers.
  void before_forward();
  void after_forward(const std::function<void(const Visitor&)>& visit_outputs);
  void watch(std::vector<at::Tensor> outputs, bool synced,
             const std::function<void(const Visitor&)>& visit_outputs);
  void check_options() const;
  // Under join(): checks that the last synced forward pass was followed by its backward pass; announces this
  // pass to the other ranks.
  void check_answered() const;
  void announce();
  // Raises kUsage for a trainable parameter that was added after the model was wrapped.
  void check_nothing_added() const;
  void prepare_precisions(const internal::NamedTensors& parameters);
  void take_delayed(internal::NamedTensors& trained);
  void make_reducer(const Group& group);
  // True when a reducer is needed even in a world of one.
  bool works_alone() const;
  // The end of the next reduced backward pass waits for these; without a reducer this call waits.
  void wait_in_backward(std::vector<GradFuture> futures);
  void describe_construction(const internal::NamedTensors& trained, std::size_t cap_bytes);
  void log_construction(const internal::NamedTensors& trained, std::size_t n_all) const;
  void log_statistics();

  const DdpOptions options_;
  Group group_;
  const std::shared_ptr<const internal::ModuleTensors> tensors_;
  std::vector<at::Tensor> known_;  // the module's parameters when it was wrapped
  std::uint64_t n_forwards_ = 0;   // with gradients enabled
  // Shared with NoSync guards, which may outlive the model.
  const std::shared_ptr<bool> syncs_ = std::make_shared<bool>(true);
  std::unique_ptr<internal::NamedTensors> reduced_, delayed_;  // trained parameters: in buckets, or delayed
  at::Tensor trigger_;                                         // starts the delayed reduction
  // Null in a world of one unless works_alone(); the reducer also when there is nothing to reduce.
  std::unique_ptr<internal::BufferSync> buffers_;
  std::unique_ptr<internal::DdpJoin> join_;
  std::shared_ptr<internal::Reducer> reducer_;
  // Null unless the module computes in another type than the parameters'.
  std::shared_ptr<internal::LowPrecisionParameters> precisions_;
  std::shared_ptr<internal::DelayedReduction> delayed_reduction_;
  const std::shared_ptr<internal::BackwardOptimizers> steps_;
  bool sink_clone_ = true;
  bool static_graph_;
  CommHook comm_hook_;
  BufferHook buffer_hook_;
  DdpLoggingData construction_;      // the part known at construction
  bool join_uneven_inputs_ = false;  // join() was entered
  std::int64_t sample_rate_ = kDefaultLoggingSampleRate;
  std::uint64_t n_logged_ = 0;  // sampled steps at the time of the last log line
};

}  // namespace lockstep
