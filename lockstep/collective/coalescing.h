// Many small collectives as one: the calls that a CoalescingScope collects are launched as one operation, and
// the coalesced functions do the same for a list of tensors. Tensors of one type share one buffer; each
// further type adds one operation under the same Work. Errors as in collectives.h.
// Thread safety: a CoalescingScope collects the calls of the thread that created it, and must be launched and
// destroyed on that thread; the coalesced functions: as collectives.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <source_location>
#include <vector>

#include "lockstep/collective/collectives.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"

namespace lockstep {

namespace internal {
class Batch;
}

struct CoalescingOptions {
  Group group{};
  bool async_op = false;
  std::optional<Milliseconds> timeout{};
  std::source_location where = std::source_location::current();
};

// During its lifetime, calls of all_reduce, all_gather_into_tensor and reduce_scatter_tensor by this thread
// on its group are collected instead of started; they must all be of the same kind and use the same reduce
// operation (not sparse). Their Works are not usable. Any other operation on the group raises kUsage, and so
// does a second scope for the same group, and a tensor that shares memory with one collected before (unless
// both are only read).
//
//   CoalescingScope scope({.async_op = true});
//   for (auto& t : tensors) all_reduce(t);
//   Work work = scope.launch();
//
// Not copyable. Created, launched and destroyed on one thread.
class CoalescingScope {
 public:
  explicit CoalescingScope(CoalescingOptions options = {});
  // Launches the collected calls if launch() was not called; an error is logged (and breaks the group).
  // During exception unwinding the collected calls are dropped.
  ~CoalescingScope();
  CoalescingScope(const CoalescingScope&) = delete;
  CoalescingScope& operator=(const CoalescingScope&) = delete;

  // Starts the collected calls, once, and stops collecting. The Work is complete unless async_op is true, and
  // empty when nothing was collected. Its results are the output tensors in the order of the calls.
  Work launch();

 private:
  const CoalescingOptions options_;
  const int n_exceptions_;                  // in flight when the scope began
  std::unique_ptr<internal::Batch> batch_;  // null once launched
};

// all_reduce of every tensor, in one operation per type.
Work all_reduce_coalesced(std::vector<at::Tensor> tensors, AllReduceOptions options = {});
// output_lists[r][i] becomes rank r's inputs[i]; one list per rank, each with the same sizes and types as the
// inputs.
Work all_gather_coalesced(std::vector<std::vector<at::Tensor>> output_lists, std::vector<at::Tensor> inputs,
                          AllGatherOptions options = {});

}  // namespace lockstep
