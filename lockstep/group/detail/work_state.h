// The shared state behind a Work: one or more engine operations and what is to be done when the last is over. Whichever
// thread first sees that finishes it: copies temporaries back, records the error, lets the buffers go; exactly once,
// under the mutex. Futures are resolved outside it, on the completion thread or by whoever asks for one too late.
//
// The engine's `done` may run before post returns and after the last Work has gone, so the state holds itself until the
// last call (self_). Thread safety: every method may be called from any thread, but those that start it.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
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
  // One that ended well.
  State(const Ended& ended, std::vector<at::Tensor> results);
  // One that may not be used; `why` is raised as kUsage by every method of Work but op_type and sequence_number.
  State(OpType type, std::string why);

  // Starting, on one thread: arm each op, post it, then add its handle or say that it failed; launched() last.
  void arm(lockstep_op& op);
  void add(comm::OpHandle handle) { handles_.push_back(std::move(handle)); }
  void post_failed(lockstep_status status, std::string_view words);
  void launched();

  void check_usable() const;
  // True when over. Never waits for the engine.
  bool poll();
  // True when over by the deadline. Raises nothing.
  bool settle(Deadline deadline);
  // Raises the operation's error, or kTimeout when it is not over by then.
  void wait(std::optional<Milliseconds> timeout);

  std::optional<Failure> failure();
  std::vector<at::Tensor> results();
  // A copy; source and duration are set when over.
  Ended ended();
  bool is_message() const { return type_ == OpType::kSend || is_receive(); }
  bool is_receive() const { return type_ == OpType::kRecv || type_ == OpType::kRecvAnySource; }
  OpType type() const { return type_; }
  std::uint64_t sequence_number() const { return sequence_; }

  FuturePtr future();
  FuturePtr future_of_result();
  // Gives the futures their values. Only when over; never under the mutex.
  void resolve();
  // For the completion thread, when the engine is through: finishes it, and resolves the futures as the caller would: in its modes,
  // for its rank.
  void complete();

 private:
  static void on_done(void* context);
  void count_down();
  void call_me_when_over();
  using OwnerPtr = std::shared_ptr<internal::GroupState>;
  // The part at n_over_ ended so. Returns the owner, to announce() to, when it was the last. mutex_ held.
  OwnerPtr advance(lockstep_status status);
  OwnerPtr finish();
  // Tells the group's hook that it is over, once. Not under the mutex.
  void announce(const OwnerPtr& owner);
  std::string describe() const;

  // Constant after construction.
  const OpType type_;
  const char* const name_;
  const std::source_location where_;
  const std::uint64_t sequence_;
  const std::int64_t started_ns_ = 0;
  const std::string unusable_;
  const bool calls_back_ = false;
  const std::shared_ptr<internal::RankUse> rank_;

  // done and get_future meet here: kDone is set by the last call, kWanted by the first future.
  static constexpr unsigned kDone = 1, kWanted = 2;
  std::atomic<unsigned> flags_{0};
  std::atomic<int> n_calls_{1};  // calls of done to come; one for the thread that starts
  std::atomic<std::int64_t> ended_ns_{0};
  std::shared_ptr<State> self_;  // while calls are to come; the last one takes it
  std::int32_t source_ = -1;     // written by the engine before the operation is over

  std::mutex mutex_;
  std::condition_variable changed_;
  // All below guarded by mutex_, but that handles_[n_over_] belongs to the waiting thread while waiting_ is set.
  bool over_ = false;
  bool waiting_ = false;
  std::size_t n_over_ = 0;                       // handles_ before it are over
  std::shared_ptr<internal::GroupState> owner_;  // null when over
  c10::SmallVector<comm::OpHandle, 1> handles_;
  internal::HeldTensors held_;
  // The caller's modes (InferenceMode and the like), where something is done later on another thread: copies back, callbacks.
  std::optional<at::ThreadLocalState> modes_;
  std::optional<Failure> failure_;
  Ended ended_;
  FuturePtr future_, result_future_;
  bool future_resolved_ = false, result_resolved_ = false;
};

}  // namespace lockstep
