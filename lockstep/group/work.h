// An operation, in flight or completed. A small value: copies share the operation, and the last copy releases
// it. The operation keeps its tensors alive; dropping a Work does not cancel it.
// Thread safety: every method may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"

namespace c10::ivalue {
struct Future;  // include <ATen/core/ivalue.h> to use one
}

namespace lockstep {

// The kind of operation. The numbers of torch's c10d::OpType.
enum class OpType : std::uint8_t {
  kBroadcast = 0,
  kAllReduce = 1,
  kAllReduceCoalesced = 2,
  kReduce = 3,
  kAllGather = 4,
  kAllGatherIntoTensor = 5,
  kAllGatherCoalesced = 6,
  kGather = 7,
  kScatter = 8,
  kReduceScatter = 9,
  kAllToAllSingle = 10,
  kAllToAll = 11,
  kSend = 12,
  kRecv = 13,
  kRecvAnySource = 14,
  kBarrier = 15,
  kReduceScatterTensor = 16,
  kCoalesced = 17,
  kAllReduceSparse = 18,
  kUnknown = 100,
};
// "all_reduce", "send", ...
const char* name_of(OpType type) noexcept;

class Work {
 public:
  // An empty, completed Work: what non-members get.
  Work();

  // Blocks until the operation has completed; raises its error, otherwise returns true. Without a timeout it
  // waits as long as the operation's own deadline allows; with one, raises kTimeout when it expires first
  // (the operation continues), kUsage when it is not positive.
  // On device memory and without a timeout it makes this thread's current stream wait, not this thread: what is
  // enqueued there afterwards sees the results. An error that is not known by then is raised by the next
  // operation of the group. With a timeout it blocks this thread until the operation has completed on the device.
  bool wait(std::optional<Milliseconds> timeout = {}) const;
  // Makes the results usable by this thread: wait().
  void synchronize() const;
  // Makes the current device stream wait, not this thread, and raises nothing: no effect on the CPU.
  void block_current_stream() const;

  // True when the operation has completed. Never blocks; neither does any method below.
  bool done() const;
  // Completed without an error.
  bool is_success() const;
  // The error, or null while running and after success.
  std::exception_ptr error() const;
  // Output tensors. Raises kUsage before completion (on device memory: before wait() or completion), the
  // operation's error after a failure.
  std::vector<at::Tensor> result() const;
  // Calls fn(this Work) once, when the operation has completed, with or without an error: on a thread
  // "ls-completion" (see get_future) or, when it has already completed, immediately on this thread. What fn
  // throws is logged. For a value computed from the result, get_future() has then().
  void on_done(std::function<void(const Work&)> fn) const;
  // The sender of a receive, as its rank in the world (get_group_rank() converts it). kUsage before
  // completion.
  int source_rank() const;

  // Resolves to the list of output tensors, or to the operation's error. Callbacks (then, addCallback) run on
  // a thread "ls-completion" once the operation has completed, even when no thread waits and the Work has
  // been destroyed, or immediately on the caller when it has already completed. On "ls-completion" they run
  // in the caller's modes (InferenceMode and the like) and, inside run_threads, on behalf of its rank; they
  // run one after the other, but one that blocks, for example on another operation's future, does not delay
  // the others. Raises kUsage for sends and receives.
  c10::intrusive_ptr<c10::ivalue::Future> get_future() const;
  // Resolves, never to an error, to the outcome: 0 success, 1 timeout, 2 a communication error (a lost peer,
  // an abort, the network), 100 anything else.
  c10::intrusive_ptr<c10::ivalue::Future> get_future_result() const;

  // Milliseconds from start to completion. Raises kUsage before completion, and for blocking operations of a
  // group whose timing is disabled (ProcessGroup::enable_collectives_timing).
  double duration() const;
  OpType op_type() const;
  // Sequence number among the collectives, or the messages, of its group, from 1; 0 for an empty Work.
  std::uint64_t sequence_number() const;

  // Private to group/ from here on.
  class State;
  // What is known of an operation that succeeded: all that the fast path of blocking calls needs.
  struct Ended {
    OpType type = OpType::kUnknown;
    int source_rank = -1;
    double duration_ms = -1;  // negative: not measured
    std::uint64_t sequence_number = 0;
  };
  explicit Work(std::shared_ptr<State> state);
  // Needs no shared state; at most one output.
  Work(at::Tensor result, const Ended& ended);

 private:
  std::shared_ptr<State> state_;  // null when completed from the start; then the two below
  at::Tensor result_;
  Ended ended_;
};

}  // namespace lockstep
