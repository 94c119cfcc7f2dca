// The shared state behind a Work: one or more engine operations and what to do when the last has completed.
// The first thread that sees the completion finalizes it: copies temporaries back, records the error,
// releases the buffers; exactly once, under the mutex. Futures are resolved outside it, on the completion
// thread or by the thread that requests one after completion.
//
// An operation on device memory has two ends. wait() without a timeout orders the caller's stream after it and
// returns (order_stream); the operation completes later, which poll() finds or a host wait awaits (settle).
//
//   posted --wait() in stream S--> S ordered; copies back enqueued in S --completed on the device--> over
//      |                                                                                              ^
//      +--nobody waited: completed on the device, copies back enqueued in the stream of the post -----+
//
// Copies back are enqueued exactly once, by whoever comes first; others wait for the event behind them.
//
// The engine's `done` may run before post returns and after the last Work has been destroyed, so the state
// holds itself until the last call (self_).
// Thread safety: every method may be called from any thread, except those that start it.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/detail/group_state.h"
#include "lockstep/group/detail/rank_use.h"
#include "lockstep/group/work.h"

namespace lockstep {

class Work::State final : public std::enable_shared_from_this<Work::State> {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // An operation about to be posted.
  State(std::shared_ptr<internal::GroupState> owner, const internal::OperationRequest& request,
        internal::HeldTensors held);
  // One that succeeded; on device memory: that was enqueued in the stream.
  State(const Ended& ended, std::vector<at::Tensor> results, std::optional<c10::Stream> stream = {});
  // One that may not be used; `why` is raised as kUsage by every method of Work except op_type and
  // sequence_number.
  State(OpType type, std::string why);

  // Starting, on one thread: arm each op, post it, then add its handle or report that it failed; launched()
  // last.
  void arm(lockstep_op& op);
  void add(comm::OpHandle handle) { handles_.push_back(std::move(handle)); }
  void post_failed(lockstep_status status, std::string_view message);
  void launched();

  void check_usable() const;
  // True when completed. Never waits for the engine.
  bool poll();
  // True when completed by the deadline. Raises nothing.
  bool settle(Deadline deadline);
  // Raises the operation's error, or kTimeout when it has not completed by then. The timeout is
  // positive. On device memory without a timeout: order_stream, and raises the error that is known by then.
  void wait(std::optional<Milliseconds> timeout);
  // Device memory: what this thread enqueues in its current stream from now on runs after the operation.
  void order_stream();
  bool on_device() const { return stream_.has_value(); }

  std::optional<Failure> failure();
  std::vector<at::Tensor> results();
  // A copy; source and duration are set once completed.
  Ended ended();
  bool is_message() const { return type_ == OpType::kSend || is_receive(); }
  bool is_receive() const { return type_ == OpType::kRecv || type_ == OpType::kRecvAnySource; }
  OpType type() const { return type_; }
  std::uint64_t sequence_number() const { return sequence_; }

  FuturePtr future();
  FuturePtr future_of_result();
  // Gives the futures their values. Only once completed; never under the mutex.
  void resolve();
  // For the completion thread, when the engine has completed it: finalizes it, and resolves the futures as
  // the caller would: in its modes, for its rank.
  void complete();

 private:
  static void on_done(void* context);
  void count_down();
  void call_me_when_over();
  using OwnerPtr = std::shared_ptr<internal::GroupState>;
  // The part at n_over_ completed with `status`. Returns the owner, to announce() to, when it was the last.
  // mutex_ held.
  OwnerPtr advance(lockstep_status status);
  OwnerPtr finish();
  // Enqueues the copies back in the stream. mutex_ held.
  void copy_back_in(const c10::Stream& stream);
  // The copies back have completed, too. mutex_ held.
  bool copies_done() const { return !copied_ || copied_->query(); }
  // Calls the group's hook with the completion, once. Not under the mutex.
  void announce(const OwnerPtr& owner);
  std::string describe() const;
  // Prepends describe() to the failure's message, once. mutex_ held, before the owner is gone.
  void describe_failure();

  // Constant after construction.
  const OpType type_;
  const char* const name_;
  const std::source_location where_;
  const std::uint64_t sequence_;
  const std::int64_t started_ns_ = 0;
  const std::string unusable_;
  const bool calls_back_ = false;
  const std::shared_ptr<internal::RankUse> rank_;
  const std::optional<c10::Stream> stream_;  // of the post; unset: host memory

  // Synchronises done and get_future: kDone is set by the last call, kWanted by the first future.
  static constexpr unsigned kDone = 1, kWanted = 2;
  std::atomic<unsigned> flags_{0};
  std::atomic<int> n_calls_{1};  // outstanding calls of done; one for the thread that starts
  std::atomic<std::int64_t> ended_ns_{0};
  std::shared_ptr<State> self_;  // while calls are outstanding; the last one takes it
  std::int32_t source_ = -1;     // written by the engine before the operation completes

  std::mutex mutex_;
  std::condition_variable changed_;
  // All below guarded by mutex_, except that handles_[n_over_] belongs to the waiting thread while waiting_
  // is set.
  bool over_ = false;
  bool waiting_ = false;
  bool ordered_ = false;              // some stream is ordered after it: its results may be used there
  bool copy_pending_ = false;         // temporaries are still to be copied back
  std::optional<c10::Event> copied_;  // behind the copies back, once they are enqueued on a device
  std::size_t n_over_ = 0;            // handles_ before it have completed
  std::shared_ptr<internal::GroupState> owner_;  // null when completed
  c10::SmallVector<comm::OpHandle, 1> handles_;
  internal::HeldTensors held_;
  // The caller's modes (InferenceMode and the like), for work done later on another thread: copies back,
  // callbacks.
  std::optional<at::ThreadLocalState> modes_;
  std::optional<Failure> failure_;
  bool described_ = false;  // failure_ names the operation
  Ended ended_;
  FuturePtr future_, result_future_;
  bool future_resolved_ = false, result_resolved_ = false;
};

}  // namespace lockstep
