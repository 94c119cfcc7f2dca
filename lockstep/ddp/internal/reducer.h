// Averages gradients over the ranks of a group while the backward pass is still computing others.
//
// One pass, from top to bottom; each box is a class in its own file:
//
//   forward()    prepare_for_forward     raise the last pass's failure; hooks follow their parameters; rebuild buckets once
//                expect_backward         Readiness: on_forward (search the graph)
//
//   backward()   +--------------------+  a parameter has got its gradient (gradient_hooks.h), or the outputs announce that
//                | Reducer            |  the pass begins: on_gradient, on_backward_begins
//                +---------+----------+
//                          | first one: begin
//                +---------v----------+
//                | Readiness          |  AllParameters | SearchedParameters | StaticGraph: is this gradient ready?
//                +---------+----------+
//                          | kReady                      kMoreToCome: it stays local for now
//                +---------v----------+
//                | ReductionPass      |  which gradients have arrived, which buckets are full; starts these in order
//                +----+----------+----+
//            deposit  |          |  full bucket: start
//   +-----------------v--+   +---v----------------+
//   | GradientTransfer   |   | BucketExchange     |   both work on GradientBuckets, the memory
//   +-----------------^--+   +---^----------------+
//            deliver  |          |  wait
//                +----+----------+----+
//                | ReductionPass      |  finish: at the end of the graph, bucket by bucket
//                +---------+----------+
//                          |
//                     Reducer: statistics; ready for the next forward pass
//
// States: idle -> reducing (first hook of an expected backward pass) -> idle (finished). A backward pass that
// ends in an error, or that reaches only some parameters, stays in `reducing`, and the next forward pass
// raises an error. The first failure sticks.
//
// A rank that has exhausted its input shadows the others' passes (join.h): shadow().
//
// Thread safety: none needed, hence no locks. Gradients of CPU parameters arrive in the thread that called
// backward(), those of a GPU in libtorch's one thread for that device, while the caller waits for it; forward and backward of one model must not run at the same time. Only blocks of the pool may be
// freed on other threads. Ownership: keeps its group and its parameters alive; its hooks are removed with it.
// Callbacks queued in the engine share ownership of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/internal/bucket_exchange.h"
#include "lockstep/ddp/internal/gradient_buckets.h"
#include "lockstep/ddp/internal/gradient_hooks.h"
#include "lockstep/ddp/internal/gradient_transfer.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/ddp/internal/readiness.h"
#include "lockstep/ddp/internal/reduction_pass.h"
#include "lockstep/ddp/internal/step_timer.h"
#include "lockstep/ddp/reducer_stats.h"
#include "lockstep/group/process_group.h"
#include "lockstep/tensor/gradient_access.h"

namespace lockstep::internal {

class LowPrecisionParameters;

struct ReducerOptions {
  Group group{};  // required
  BucketCaps caps{};
  // By parameter; empty: none has sparse gradients. Where true, a dense gradient is an error, and the
  // communication hook is not called: sums over the ranks are divided by their number.
  std::vector<bool> sparse{};
  bool gradient_as_bucket_view = false;
  // Gradients of at least this many bytes are allocated in the group's memory and reduced in place
  // (gradient_pool.h); the others are copied into the flat part of their bucket. Not with a communication
  // hook, which needs the bucket contiguous.
  std::optional<std::size_t> in_place_bytes{};  // unset: LOCKSTEP_DDP_IN_PLACE_BYTES
  bool find_unused_parameters = false;
  bool static_graph = false;  // makes find_unused_parameters unnecessary
  // Buckets whose parameters are all unused are not reduced. They must be the same on all ranks, otherwise
  // the ranks deadlock.
  bool skip_all_reduce_unused_params = false;
  // Mixed precision (mixed_precision.h): the type of the buckets of floating-point gradients, unset: their
  // own; and the parameters that are in low precision while gradients arrive, null: none. Averages are
  // delivered in the parameters' own type.
  std::optional<at::ScalarType> reduce_dtype{};
  std::shared_ptr<LowPrecisionParameters> precisions{};
  // Null: the distributed autograd context that a backward pass runs in (lockstep/autograd), otherwise
  // Tensor::grad().
  std::shared_ptr<GradientAccess> access{};
  std::source_location where = std::source_location::current();
};

class Reducer final : public std::enable_shared_from_this<Reducer> {
 public:
  // names[i] is parameters[i]'s name, for messages. Raises kUnsupported for a parameter that is not a dense
  // tensor on the CPU or a GPU, or on another GPU than the first; kUsage for one on another type of device;
  // kResource when bucket memory cannot be allocated.
  static std::shared_ptr<Reducer> create(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                         ReducerOptions options);
  ~Reducer() = default;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // ---- around a forward pass ----

  // Before a forward pass that builds a graph. Raises when the last backward pass was not finished: kUsage
  // with the parameters that got no gradient, or the error it failed with; kUsage when a parameter changed
  // its type or size. The first call after the first finished backward pass rebuilds the buckets by order of
  // arrival, which is collective: it blocks until rank 0's order is received.
  void prepare_for_forward();
  // True: expect_backward needs the outputs that a loss can be computed from.
  bool searches() const { return readiness_.searches(); }
  // After a forward pass whose backward pass is to be reduced.
  void expect_backward(std::span<const at::Tensor> outputs = {});
  // After a forward pass inside no_sync: its gradients only accumulate. A synced forward pass that still
  // awaits its backward pass remains expected, and what was accumulated is averaged with it.
  void expect_local_backward(std::span<const at::Tensor> outputs = {});
  // True when the outputs must go through pass_sink, so that the backward pass announces itself:
  // on_backward_begins, on the thread that runs it, even if it reaches no parameter.
  bool wants_sink() const { return readiness_.wants_announcement(); }
  void on_backward_begins();
  // True when on_outputs_reached, called from on_reached, suffices.
  bool wants_to_know() const { return buckets_.pool() != nullptr; }
  void on_outputs_reached() { buckets_.open_pool(); }
  // Raises as prepare_for_forward does; has no other effect.
  void check_finalized() const;
  // The end of the next reduced backward pass waits for these as well, and fails with the first that failed.
  void also_wait_for(std::vector<GradFuture> futures) { pass_.also_wait_for(std::move(futures)); }
  // The parameters have new gradient accumulators. Graphs built before keep their hooks.
  void renew_hooks() { hooks_.renew(); }

  // ---- how passes are reduced ----

  // Replaces the averaging of a bucket. Once, before the first backward pass; the same on all ranks. Raises
  // kUsage otherwise, or for an empty hook.
  void register_comm_hook(CommHook hook);
  // Switches to the buckets of a static graph, whatever it was built for. Raises kUsage after the first
  // forward pass.
  void set_static_graph();
  // OnAverage runs on the thread that ends backward(); `end` after the last one of a pass.
  void on_average(OnAverage call, std::function<void()> end);
  // The divisor of sums in later passes, called once per pass: must be the same on all ranks. Null: the
  // group's size. A communication hook divides by itself.
  void divide_by(std::function<int()> count) { count_ = std::move(count); }

  // ---- join ----

  // Shadows a backward pass of other ranks: contributes zeros to their sums and delivers the averages here,
  // too; parameters no rank used have no gradient afterwards, as after zero_grad(). Blocks until it is over.
  // For a pass in a distributed autograd context that this rank is not in, Tensor::grad() is left unchanged.
  enum class Shadow : std::uint8_t { kOfBackward, kOfAContext };
  void shadow(Shadow kind = Shadow::kOfBackward);
  // Static graph: copies what rank `root` of the group has learnt. Collective.
  void share_learnt(int root);

  // ---- observers ----

  ReducerStats stats() const;
  const BucketIndices& buckets() const { return buckets_.plan(); }
  std::uint64_t n_reductions() const { return stats_.n_reductions; }
  StepTimer& timer() { return timer_; }

 private:
  Reducer(NamedTensors parameters, ReducerOptions options);
  void rebuild_by_arrival();
  void search(std::span<const at::Tensor> outputs, bool first);

  // On the thread that runs backward(), in this order.
  void on_gradient(std::size_t index, const at::Tensor& incoming);
  void begin(std::shared_ptr<GradientAccess> context);
  void mark_ready(std::size_t index, const at::Tensor& incoming = {});
  void on_graph_end();
  void finish();

  // The context that the pass on this thread runs in; null: none, or one access was given for all passes.
  std::shared_ptr<GradientAccess> find_context() const;
  // The same gradients, of sharded parameters the local pieces.
  std::shared_ptr<GradientAccess> of_shards(std::shared_ptr<GradientAccess> whole) const;
  void keep_local(std::size_t index, GradientAccess& access);
  int divisor() const { return count_ ? count_() : options_.group->size(); }
  // Calls `step` at the end of the running backward pass.
  void queue(void (Reducer::*step)());
  // Whatever `step` raises sticks: the next forward pass raises it again.
  template <class Step>
  void guarded(Step step);
  void check_unchanged() const;
  [[noreturn]] void raise_unfinished() const;

  // Constant after construction.
  const NamedTensors parameters_;
  const ReducerOptions options_;
  const bool sharded_;                            // some parameter is
  const std::shared_ptr<GradientAccess> access_;  // outside of contexts
  std::function<int()> count_;

  StepTimer timer_;
  GradientBuckets buckets_;
  Readiness readiness_;
  GradientTransfer transfer_;
  BucketExchange exchange_;
  ReductionPass pass_;

  bool ending_ = false;  // the graph of the current pass has been traversed
  std::optional<Failure> failure_;
  // Synced forward passes whose backward pass may still come: two forwards may be followed by one backward of
  // the sum or by two backwards. The first forward after a backward restarts the count.
  int n_expected_ = 0;
  bool backward_seen_ = false;
  bool any_forward_ = false;
  ReducerStats stats_;

  GradientHooks hooks_;  // last: they call into everything above
};

}  // namespace lockstep::internal
