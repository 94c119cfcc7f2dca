// Averages gradients over the ranks of a group while the backward pass is still computing others.
//
// A hook on each parameter's gradient accumulator copies the new gradient into its place in a bucket: a flat tensor in
// the group's shared memory, so that the reduction needs no staging. Large gradients are made in such memory by autograd
// itself (internal/gradient_pool.h) and belong to their bucket as they are. A full bucket is reduced by asynchronous
// all_reduces, one for the flat tensor and one for each large gradient, started strictly in the order of the buckets, so
// that all ranks agree. When the last ones have been started, a callback at the end of backward() waits for them in order
// and hands the averages back.
//
// A gradient that never comes would hold up its bucket for ever. Two options deal with it:
// - find_unused_parameters walks the graph from the outputs after each forward pass. What it does not meet is ready at
//   once, with zeros; a map of who used what is summed over the ranks, and a parameter that nobody used keeps its
//   gradient as it was.
// - static_graph learns in the first backward pass which parameters take part and how many times each hook fires (more
//   than once under reentrant checkpointing), reduces that pass at its end, and expects the same of every later one.
//
// States: idle -> reducing (first hook of an expected backward pass) -> idle (finalised). A backward pass that ends
// in an error, or that reaches only some parameters, stays in `reducing` and the next forward says so.
//
// A rank that has run out of input shadows the others' passes (join.h): launch_shadow, finish_shadow.
//
// Thread safety: none needed. Gradients of CPU parameters arrive in the thread that called backward(); forward and
// backward of one model must not run at the same time.
// Ownership: keeps its group and its parameters alive; its hooks end with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <vector>

#include "lockstep/tensor/gradient_access.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/internal/gradient_buckets.h"
#include "lockstep/ddp/internal/gradient_hooks.h"
#include "lockstep/ddp/internal/step_timer.h"
#include "lockstep/ddp/reducer_stats.h"
#include "lockstep/group/collectives.h"
#include "lockstep/group/process_group.h"

namespace lockstep::internal {

class LowPrecisionParameters;

struct ReducerOptions {
  Group group{};  // required
  BucketCaps caps{};
  // By parameter; empty: none has sparse gradients. Where true, a dense one is an error, and the communication hook is
  // not asked: sums over the ranks are divided by their number.
  std::vector<bool> sparse{};
  bool gradient_as_bucket_view = false;
  // Large gradients are born in the group's memory and reduced where they lie (internal/gradient_pool.h); the others are copied
  // into the flat part of their bucket. Not with a communication hook, which wants the bucket in one piece.
  std::optional<std::size_t> in_place_bytes{};  // unset: LOCKSTEP_DDP_IN_PLACE_BYTES
  bool find_unused_parameters = false;
  bool static_graph = false;  // makes find_unused_parameters superfluous
  // Buckets whose parameters are all unused are not reduced. The same ones on all ranks, or they part ways.
  bool skip_all_reduce_unused_params = false;
  // Mixed precision (mixed_precision.h): the type of the buckets of floating-point gradients, unset: their own; and the
  // parameters that are short while gradients come, null: none. What is handed back is in the parameters' own type.
  std::optional<at::ScalarType> reduce_dtype{};
  std::shared_ptr<LowPrecisionParameters> precisions{};
  // Null: the distributed autograd context that a backward pass runs in (lockstep/autograd), else Tensor::grad().
  std::shared_ptr<GradientAccess> access{};
  std::source_location where = std::source_location::current();
};

class Reducer final : public std::enable_shared_from_this<Reducer> {
 public:
  // names[i] is parameters[i]'s name, for messages. Raises kUnsupported for a parameter that is not a dense tensor on
  // the CPU, kResource when bucket memory is not to be had. Held by shared_ptr only.
  static std::shared_ptr<Reducer> create(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                         ReducerOptions options);
  ~Reducer() = default;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Before a forward pass that builds a graph. Raises when the last backward pass was not finalised: kUsage with the
  // parameters that got no gradient, or the error it died of; kUsage when a parameter changed its type or size. The first
  // call after the first finalised backward pass rebuilds the buckets by order of arrival, which is a collective: it
  // blocks until rank 0 has said its order.
  void prepare_for_forward();
  // After a forward pass whose backward pass is to be reduced. `outputs` is what a loss can be made of; looked at with
  // find_unused_parameters only.
  void expect_backward(std::span<const at::Tensor> outputs = {});
  // True when the outputs must pass through pass_sink, so that the backward pass announces itself.
  bool wants_sink() const;
  // True when it is enough to be told by on_reached; then on_outputs_reached is what to call.
  bool wants_to_know() const { return buckets_.pool() != nullptr; }
  void on_outputs_reached();
  // The backward pass has begun, though perhaps at no parameter. On the thread that runs it.
  void on_backward_begins();
  // After a forward pass inside no_sync: its gradients only accumulate. A synced forward pass that still waits for its
  // backward pass keeps its claim, and what was accumulated is averaged with it.
  void expect_local_backward(std::span<const at::Tensor> outputs = {});
  bool searches() const { return options_.find_unused_parameters && !static_graph_; }
  // Raises as prepare_for_forward does; nothing else.
  void check_finalized() const;
  // What is done with a bucket instead of averaging it. Once, before the first backward pass; the same on all ranks.
  // Raises kUsage otherwise, or for an empty hook.
  void register_comm_hook(CommHook hook);
  // Raises kUsage after the first forward pass.
  void set_static_graph();
  // Called for each parameter that takes part, as soon as its average is there and while later buckets are still being
  // reduced; on the thread that ends backward(), in the same order on all ranks. True: the average is used up, and the
  // gradient is left undefined. `end` is called after the last one of a pass.
  using OnAverage = std::function<bool(const at::Tensor& parameter, const at::Tensor& average)>;
  void on_average(OnAverage call, std::function<void()> end) {
    on_average_ = std::move(call);
    on_averages_end_ = std::move(end);
  }
  // What sums are divided by in the passes to come, asked once per pass: the same on all ranks. Null: the group's size.
  // A communication hook divides as it sees fit.
  void divide_by(std::function<int()> count) { count_ = std::move(count); }
  // A backward pass of other ranks that this one has no part in: nothing is added to their sums, and the averages are
  // handed back here as there; what nobody used has no gradient then, as after zero_grad(). After launch_shadow the
  // operations are under way; finish_shadow blocks until they are over. Of passes in contexts of distributed autograd that this
  // rank is not in, Tensor::grad() hears nothing.
  enum class Shadow : std::uint8_t { kOfBackward, kOfAContext };
  void launch_shadow(Shadow shadow = Shadow::kOfBackward);
  void finish_shadow();
  // Static graph: takes over what rank `speaker` of the group has learnt. Collective.
  void share_learnt(int speaker);
  // The end of the next reduced backward pass waits for these as well, and fails with the first that failed.
  void await_too(std::vector<GradFuture> futures);
  // The parameters have new gradient accumulators. Graphs made before keep their hooks.
  void renew_hooks() { hooks_.renew(); }

  ReducerStats stats() const;
  const BucketIndices& buckets() const { return buckets_.plan(); }
  std::uint64_t n_reductions() const { return stats_.n_reductions; }
  StepTimer& timer() { return timer_; }

 private:
  // Of one bucket in the pass under way.
  struct Progress {
    std::size_t n_pending = 0;
    bool skipped = false;
    std::vector<Work> works{};
    GradFuture future{};  // of the communication hook
  };

  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, ReducerOptions options);
  // A gradient that stays local is kept in the parameter's own type.
  void widen(std::size_t index);
  bool is_idle(std::size_t index) const;
  void rebuild_by_arrival();
  bool learns() const { return static_graph_ && stats_.n_reductions == 0; }
  // Where the gradients of the pass under way are kept.
  GradientAccess& access() const { return context_ ? *context_ : *access_; }
  void find_context();
  void search(std::span<const at::Tensor> outputs);
  // Buckets serve one pass after the other, and gradients of a context must outlive its pass: they never lie in buckets.
  bool gives_views() const { return options_.gradient_as_bucket_view && !context_; }

  // On the thread that runs backward().
  void on_gradient(std::size_t index, const at::Tensor& incoming);
  void begin();
  bool awaited(std::size_t index) const;
  // `incoming` is what autograd gave the hook, if one runs.
  void mark_ready(std::size_t index, const at::Tensor& incoming = {});
  bool counts_down(std::size_t index);
  void add_nothing(std::size_t b);
  void settle();
  void reduce_learnt();
  void reduce_used();
  void wait_for(std::size_t b);
  void store_gradient(std::size_t index, at::Tensor& view, const at::Tensor& incoming);
  void store_large(std::size_t index, const at::Tensor& gradient, at::Tensor& piece,
                   const at::Tensor& incoming);
  void copy_into(std::size_t index, const at::Tensor& view, const at::Tensor& gradient);
  void check_gradient(std::size_t index, const at::Tensor& gradient) const;
  void start(std::size_t b, const at::Tensor& flat);
  void store_sparse(std::size_t index, GradientBucket& bucket);
  void launch_full_buckets();
  void launch(std::size_t b);
  // Of those that a hook sees in this pass.
  bool is_last(std::size_t b) const;
  void finalise();
  void hand_back(std::size_t bucket);
  void hand_back_one(std::size_t index, const at::Tensor& view);
  void let_go_of_large(std::size_t b);
  // Remembers what backward() dies of and throws it with `doing` in front. Call inside a catch block.
  [[noreturn]] void fail(const std::string& doing);

  void queue(void (Reducer::*step)());
  void note_unused();
  void check_unchanged() const;
  std::string describe(std::size_t index) const;
  [[noreturn]] void raise_marked_twice(std::size_t index) const;
  [[noreturn]] void raise_unfinished() const;

  // Constant after construction.
  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const ReducerOptions options_;
  const std::shared_ptr<GradientAccess> access_;
  GradientBuckets buckets_;
  GradientHooks hooks_;

  // The backward pass under way.
  bool reducing_ = false;
  std::vector<unsigned char> ready_;  // by parameter
  std::vector<Progress> progress_;    // by bucket
  std::size_t n_launched_ = 0;
  bool ending_ = false;                      // its callback at the end is running
  bool shadowing_ = false;                   // it is other ranks'
  std::shared_ptr<GradientAccess> context_;  // that it runs in, or null
  int divisor_ = 1;
  std::map<std::size_t, at::Tensor> kept_;  // gradients that lie in a bucket and may belong to nobody
  std::optional<Failure> failure_;
  // Synced forward passes whose backward pass may still come: two forwards may be followed by one backward of the sum
  // or by two backwards. The first forward after a backward starts counting anew.
  int n_expected_ = 0;
  bool backward_seen_ = false;
  bool any_forward_ = false;

  // Unused parameters. By parameter: met by the search from the outputs of the forward passes that are expected back;
  // gradients that came on this rank since the last reduction; on all ranks together, after it.
  std::vector<unsigned char> reached_;
  at::Tensor used_here_, used_;
  Work used_work_;
  // Static graph: how many times each hook fires in a pass, and how many of these are still to come in this one.
  bool static_graph_ = false;
  std::vector<std::uint32_t> use_counts_, to_come_;
  std::vector<unsigned char> unused_before_;  // in the last reduced pass

  CommHook hook_;
  std::function<int()> count_;
  OnAverage on_average_;
  std::function<void()> on_averages_end_;
  std::vector<GradFuture> awaited_too_;
  std::vector<std::size_t> arrival_;  // order of gradients in the first reduced backward pass
  bool warned_strides_ = false;
  ReducerStats stats_;
  StepTimer timer_;
};

}  // namespace lockstep::internal
