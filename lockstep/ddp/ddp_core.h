// The part of DistributedDataParallel that does not depend on the wrapped module's type. Users meet it through ddp.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/logging_data.h"
#include "lockstep/ddp/mixed_precision.h"
#include "lockstep/ddp/module_tensors.h"
#include "lockstep/ddp/reducer_stats.h"
#include "lockstep/group/process_group.h"
#include "lockstep/join/join.h"
#include "lockstep/mesh/device_mesh.h"

namespace lockstep {

// Names, order and defaults are those of torch.nn.parallel.DistributedDataParallel.
struct DdpOptions {
  // Must stay empty: they belong to modules on GPUs.
  std::vector<int> device_ids{};
  std::optional<int> output_device{};
  // Rank 0's buffers (running statistics and the like) replace everyone's before each synced forward.
  bool broadcast_buffers = true;
  // Compare the parameters of all ranks and take rank 0's values. False: the caller vouches that they are equal.
  bool init_sync = true;
  Group group{};  // null: the default group
  // The ranks of a mesh of one dimension, for instance the slice mesh["dp"], instead of group.
  std::optional<DeviceMesh> device_mesh{};
  // Size of a gradient bucket in MiB. Unset: 25, and 1 for the first, so that reduction starts early.
  std::optional<double> bucket_cap_mb{};
  // Parameters may go without a gradient, on some ranks or all: each forward pass is followed by a walk over its graph,
  // and what is not in it is not waited for.
  bool find_unused_parameters = false;
  // Gradients lie in the buckets: no copy back after the reduction, and half the memory.
  bool gradient_as_bucket_view = false;
  // Gradients of so many bytes and more are made in memory that the ranks share, and averaged where they lie: no copy, and
  // no memory beside them, with or without the option above. While backward() runs, an allocator placed before libtorch's
  // serves requests of their sizes. Unset: LOCKSTEP_DDP_IN_PLACE_BYTES, 128 KiB; SIZE_MAX: all are copied into buckets.
  // Rank 0's value holds. During backward() such a gradient is not to be touched once it is there, and after a reduction
  // that failed it is worth nothing: call zero_grad().
  std::optional<std::size_t> in_place_bytes{};
  // Every step uses the same parameters the same number of times: learnt in the first. Allows what the search cannot
  // see: reentrant checkpointing, layers checkpointed twice, parameters used outside forward().
  bool static_graph = false;
  // Compute in a short type, see mixed_precision.h.
  std::optional<MixedPrecision> mixed_precision{};
  // With find_unused_parameters: buckets that no rank uses are not reduced. All ranks must leave out the same.
  bool skip_all_reduce_unused_params = false;
  // Sizes of the first, second, ... bucket; the last repeats. Overrides bucket_cap_mb.
  std::vector<double> bucket_cap_mb_list{};
  // Parameters averaged together, outside of the buckets, when the gradient of param_to_hook_all_reduce has arrived, which
  // must be after theirs. Their gradients are views of one buffer. Both or neither; not with find_unused_parameters.
  std::vector<std::string> delay_all_reduce_named_params{};
  std::string param_to_hook_all_reduce{};
  // Parameters and buffers (names as in the module's named_parameters) left alone: not synced, not averaged.
  std::vector<std::string> ignored{};
  std::source_location where = std::source_location::current();
};

// What is done about buffers instead of taking rank 0's. Gets the module's buffers by name, those in `ignored` left out;
// whatever futures it returns are waited for at the end of the next synced backward(). Before forward() the hook itself must
// have finished what the module is going to read or change.
struct BufferHook {
  std::function<std::vector<GradFuture>(const torch::OrderedDict<std::string, at::Tensor>& buffers)> run;
  enum class When : std::uint8_t { kBeforeForward, kAfterForward } when = When::kAfterForward;
};

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
  // While it lives, gradients accumulate here only; forward and backward must both lie inside. The next synced
  // backward averages what was accumulated. May be nested.
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
  // Raises when the last backward pass was not reduced to the end; the next forward() raises it as well.
  void check_reducer_finalized() const;
  // All zero in a world of one.
  ReducerStats stats() const;
  // How it was built, what it did, and the times of the last step that was sampled: the first ten are, and every 100th
  // after them. No times in a world of one.
  DdpLoggingData logging_data() const;
  // Every rate-th step instead; 1: all of them. Raises kUsage below that.
  void set_ddp_runtime_logging_sample_rate(std::int64_t rate);
  const Group& group() const { return group_; }
  // What is done with each bucket of gradients instead of averaging it (comm_hook.h, hooks.h). Once, before the first
  // backward pass, the same on all ranks; raises kUsage otherwise. In a world of one it is never called.
  void register_comm_hook(CommHook hook);
  // Called around each synced forward pass; once per model, the same on all ranks. In a world of one it is never called.
  // Raises kUsage for an empty hook or a second one.
  void register_buffer_hook(BufferHook hook);
  // Steps each parameter (all that are averaged in buckets, or `only` these) as its gradient is handed back at the end of
  // backward(), while later buckets are still being reduced; the gradients stay. Once; raises kUsage for null, a second
  // one, and a parameter that is unknown, sparse or steps by itself. Optimizers given to parameters with
  // apply_optimizer_in_backward need no such call: they are taken over, and their gradients are left undefined.
  void register_fused_optimizer(std::shared_ptr<FunctionalOptimizer> optimizer,
                                const std::vector<at::Tensor>& only = {});
  // The optimizer steps inside backward(), its overlap_with_ddp option set: as soon as a gradient is averaged, the rank
  // that keeps its state updates the parameter and sends it, while later buckets are still being reduced. When backward()
  // returns, parameters are equal on all ranks; gradients stay. Once, with all ranks; raises kUsage for another group, a
  // parameter that is not averaged in buckets, an optimizer without the option or with another model. Works with
  // communication hooks: what they make of the gradients is what is stepped with.
  void overlap_optimizer(ZeroCore& zero);
  // From the next forward pass on the ranks of `group` (null: the default group) train together; also when the last
  // reduction failed, since a rank was lost, say. All its ranks call it. Values are not sent: the caller vouches that they
  // are equal. Buckets begin anew and are rebuilt by order of arrival, a static graph is learnt again, statistics start
  // from zero, forward passes that wait for their backward are forgotten. Communication hooks with a group of their own
  // keep that one. Raises kUsage inside join() or backward(), or when this rank is no member.
  void update_process_group(Group group);
  // As the option; raises kUsage after the first forward pass.
  void set_static_graph();
  // Gradients are this rank's own from now on, as torch's _remove_autograd_hooks leaves them: for whoever averages otherwise. Until
  // update_process_group(), which hooks the parameters again. Raises kUsage inside backward() or join(), and when optimizers step
  // inside backward(), since they would no longer.
  void remove_autograd_hooks();
  // The outputs of forward() are copies of what the module returned, so that they may be changed in place. Only where
  // they must be watched (find_unused_parameters, static_graph, mixed precision); false saves the copy.
  void set_sink_clone(bool clone) { sink_clone_ = clone; }

  // Uneven inputs: lockstep::join({*model}, body, options). Inside, each synced forward() is followed by its own
  // backward(). Buffers come from the highest rank that has input; at the end all ranks get the model of the last one
  // (the highest, if several) that had. Gradients of ranks without input are the averages, too. Raises kUsage with
  // skip_all_reduce_unused_params: what others leave out is not known to who has no input. Layers with collectives of
  // their own (SyncBatchNorm) are shadowed in the background (join/background_shadow.h).
  const Group& join_group() const override { return group_; }
  void enter_join(const JoinOptions& options) override;
  bool shadow_iteration() override;
  void finish_join(bool is_last_joiner) override;
  void leave_join() noexcept override;

 protected:
  // `module` becomes the child named "module", which is what parameters(), train() and torch::save see.
  DdpCore(std::shared_ptr<const ModuleTensors> tensors, std::shared_ptr<torch::nn::Module> module,
          DdpOptions options);
  // module.clone(device), its errors as kUsage.
  static std::shared_ptr<torch::nn::Module> cloned(const torch::nn::Module& module,
                                                   const std::optional<torch::Device>& device);
  // Those of this one; the copies are taken for equal where the originals are.
  DdpOptions options_of_clone() const;

 private:
  friend class ForwardPass;
  // Collective unless in a world of one: checks the last backward pass, rebuilds buckets once, sends buffers.
  void before_forward();
  void after_forward(const std::function<void(const Visitor&)>& visit_outputs);
  void watch(std::vector<at::Tensor> outputs, bool synced,
             const std::function<void(const Visitor&)>& visit_outputs);
  void check_options() const;
  // Under join(): the last synced forward pass was followed by its backward pass; and what the others are told of this one.
  void check_answered() const;
  void announce();
  // Raises kUsage for a parameter that is trained and was not there when the model was wrapped.
  void check_nothing_added() const;
  void prepare_precisions(const internal::NamedTensors& parameters);
  void take_delayed(internal::NamedTensors& trained);
  void make_reducer(const Group& group);
  // There is something to do in a world of one.
  bool works_alone() const;
  // The end of the next reduced backward pass waits for these; without a reducer, this does.
  void wait_in_backward(std::vector<GradFuture> futures);
  void describe_construction(const internal::NamedTensors& trained, std::size_t cap_bytes);
  void log_construction(const internal::NamedTensors& trained, std::size_t n_all) const;
  void log_statistics();

  const DdpOptions options_;
  Group group_;
  const std::shared_ptr<const ModuleTensors> tensors_;
  std::vector<at::Tensor> known_;  // the module's parameters when it was wrapped
  std::uint64_t n_forwards_ = 0;   // with gradients
  // Shared with NoSync guards, which may outlive the model.
  const std::shared_ptr<bool> syncs_ = std::make_shared<bool>(true);
  std::unique_ptr<internal::NamedTensors> reduced_, delayed_;  // trained parameters: in buckets, or apart
  at::Tensor trigger_;                                         // of the delayed
  // Null in a world of one (less mixed precision); the reducer also where there is nothing to reduce.
  std::unique_ptr<internal::BufferSync> buffers_;
  std::unique_ptr<internal::DdpJoin> join_;
  std::shared_ptr<internal::Reducer> reducer_;
  // Null unless parameters are computed with in another type than their own.
  std::shared_ptr<internal::LowPrecisionParameters> precisions_;
  std::shared_ptr<internal::DelayedReduction> delayed_reduction_;
  const std::shared_ptr<internal::BackwardOptimizers> steps_;
  bool sink_clone_ = true;
  bool static_graph_;
  CommHook comm_hook_;
  BufferHook buffer_hook_;
  DdpLoggingData construction_;      // the part that is known from the start
  bool join_uneven_inputs_ = false;  // there was a join()
  std::int64_t sample_rate_ = kDefaultLoggingSampleRate;
  std::uint64_t n_logged_ = 0;  // sampled steps, when the log was last thought of
};

// Names as the wrapped module has them: takes `prefix` off where a key begins with it, so that what a wrapped model
// saved can be loaded into a bare one.
torch::OrderedDict<std::string, at::Tensor> strip_prefix(
    const torch::OrderedDict<std::string, at::Tensor>& tensors, const std::string& prefix = "module.");

}  // namespace lockstep
