// How a full bucket is reduced over the ranks: by asynchronous all_reduces, one for the flat tensor and one
// for each gradient that is reduced in place, or by the communication hook.
//
//   idle --start(b)--> under way --wait(b)--> idle      per bucket; all ranks start buckets in the same order
//
// After wait(b) the bucket holds averages (sums over the ranks for sparse ones, which were divided before),
// or the hook's result.
// On a GPU start() orders the reduction after this thread's current stream, which filled the bucket, and wait() the
// then current stream after the reduction; only a hook's future is awaited by the thread.
// Thread safety: none; on the thread that runs backward(). The hook is called there too.
// Ownership: keeps the group; refers to buckets and timer, which must outlive it.
#pragma once

#include <cstddef>
#include <source_location>
#include <vector>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/internal/gradient_buckets.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/ddp/internal/step_timer.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"

namespace lockstep::internal {

class BucketExchange final {
 public:
  BucketExchange(GradientBuckets& buckets, StepTimer& timer, Group group, std::source_location where)
      : buckets_(buckets), timer_(timer), group_(std::move(group)), where_(where) {}

  // Between passes. The buckets must have given up their pool: a hook sees each as one contiguous buffer.
  void set_hook(CommHook hook) { hook_ = std::move(hook); }
  const CommHook& hook() const { return hook_; }

  // Starts reducing bucket b; no-op if it has no elements. Sums are divided by `divisor`; a hook divides by
  // itself. `is_last`: no later bucket of this pass is passed to the hook. Raises the error of starting it,
  // kUsage for a hook that returns no future.
  void start(std::size_t b, int divisor, bool is_last);
  // Blocks until bucket b is reduced, if it was started. Raises the error of the reduction or the hook.
  void wait(std::size_t b);

 private:
  struct UnderWay {
    std::vector<Work> works{};
    GradFuture future{};  // of the hook
  };
  void all_reduce_part(std::size_t b, const at::Tensor& flat, int divisor);
  void run_hook(std::size_t b, bool is_last);

  GradientBuckets& buckets_;
  StepTimer& timer_;
  const Group group_;
  const std::source_location where_;
  CommHook hook_;
  std::vector<UnderWay> under_way_;  // by bucket
};

}  // namespace lockstep::internal
