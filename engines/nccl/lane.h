// One NCCL communicator and the stream its operations run on: the operations of a lane run in the order in which they were
// queued, and those of different lanes never wait for each other. A lockstep communicator has a lane for its collectives,
// and one for each direction between two ranks that exchange messages.
//
//   kIdle --connect()--> kGathering (first rank of the lane: all GPUs)  --> kInitialising --> kReady --> kClosed
//                   '--> kAwaitingId (the others: the unique id)        --'
//
// Always made from a unique id of its own, never by ncclCommSplit: a split is collective over the parent's ranks, while only
// its members create a sub-group, at a point in the parent's order that nothing fixes.
//
// Threads. queue(), issue_queued() and ready(): any. try_issue(): any thread that wants its operation in its own stream. pump(), revoke() and
// close(): the communicator's progress thread. Two locks, of which queue_mutex_ is the inner: issue_mutex_ is held while
// NCCL is called, which takes long when a kernel is loaded, and post must not wait for it.
// Nothing here blocks: not NCCL, whose communicators are made with blocking = 0, and not the device, since at most
// kMaxInFlight operations are enqueued at a time (a stream that waits takes a thousand before a launch blocks).
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engines/nccl/nccl_api.h"
#include "engines/nccl/operation.h"
#include "engines/nccl/options.h"
#include "engines/nccl/peers.h"
#include "lockstep/base/detail/thread.h"

namespace lockstep::nccl_plugin {

// What the lanes of a communicator share. Outlives them.
struct LaneContext {
  const Library& nccl;
  const cuda::PrimaryContext& gpu;
  const std::shared_ptr<EventPool> events;
  const Options& options;
  const Peers& peers;
  const std::atomic<bool>& stopped;  // the communicator is broken or left: nothing more is issued
};

class Lane {
 public:
  // ranks: of the communicator, in the lane's order; this rank is among them.
  Lane(const LaneContext& context, std::string name, std::vector<int> ranks);
  // Pre: closed, or never connected.
  ~Lane();
  Lane(const Lane&) = delete;

  // The operation is issued after those queued before. With LOCKSTEP_OP_MORE_FOLLOW together with the next one.
  void queue(OperationPtr operation);
  // Makes pump() connect, also while nothing is queued.
  void connect() { wanted_ = true; }
  bool ready() const { return ready_.load(std::memory_order_acquire); }
  // Something is to do for pump() even if no operation is pending.
  bool connecting() const { return wanted_ && !ready(); }

  // Connects, settles, issues and collects, as far as it goes without waiting. Appends what has completed; returns whether
  // anything changed. Raises what NCCL or the driver reported.
  bool pump(std::vector<OperationPtr>& completed);
  // The part of pump() that issues; any thread. Leaves it to another thread that issues already.
  bool issue_queued();

  // Issues the operation in its own stream, on this thread: what comes after it in that stream is ordered without events.
  // False: not now (not connected, others are queued or being issued); nothing was done. Waits while NCCL connects to
  // peers or too much is in flight, until the operation's deadline; raises kTimeout then, what NCCL reported, or kAborted once stopped.
  // captured: the stream is being captured, and the operation is part of a graph rather than in flight.
  bool try_issue(const OperationPtr& operation, bool captured);

  // Ends what is in flight; the stream is quiet within milliseconds. Idempotent. Pre: stopped.
  void revoke() noexcept;
  // Nothing of this lane runs on the device any more.
  bool quiet() noexcept;
  // Frees NCCL's communicator. orderly: nothing was in flight, and the others do the same. May take a second.
  void close(bool orderly) noexcept;

  const std::string& name() const { return name_; }

 private:
  enum class State : std::uint8_t { kIdle, kGathering, kAwaitingId, kInitialising, kReady, kClosed };
  static constexpr std::size_t kMaxInFlight = 256;

  bool step_connect();
  void announce_gpu();
  bool gather_gpus();
  bool await_id();
  void begin_init(const UniqueId& id);
  bool end_init();
  std::string key(const char* what, std::size_t index) const;

  // Another thread that has the lock needs it for a moment, or waits for a peer: that is not waited for.
  bool lock_to_issue() LOCKSTEP_TRY_ACQUIRE(true, issue_mutex_);
  std::vector<OperationPtr> next_group();
  void issue(std::vector<OperationPtr> group, cuda::Stream stream, bool captured)
      LOCKSTEP_REQUIRES(issue_mutex_);
  Result enqueue_all(std::span<const OperationPtr> group, cuda::Stream stream)
      LOCKSTEP_REQUIRES(issue_mutex_);
  bool issue_next() LOCKSTEP_REQUIRES(issue_mutex_);
  // False while NCCL is still connecting.
  bool settle() LOCKSTEP_REQUIRES(issue_mutex_);
  void await_settled(const Operation& operation) LOCKSTEP_REQUIRES(issue_mutex_);
  void mark_issued() LOCKSTEP_REQUIRES(issue_mutex_);
  // Moves what the device has completed to completed_, for pump().
  void collect() LOCKSTEP_REQUIRES(issue_mutex_);
  // Until fewer than kMaxInFlight are in flight. Raises as try_issue().
  void await_room(const Operation& operation) LOCKSTEP_REQUIRES(issue_mutex_);
  // A wait of the caller's thread between two looks.
  void pause(const Operation& operation, std::chrono::microseconds& length, const char* late) const;
  void check_async() LOCKSTEP_REQUIRES(issue_mutex_);
  void check(Result result, const char* call) const;

  const LaneContext& context_;
  const std::string name_;
  const std::vector<int> ranks_;
  const int own_;  // this rank's place among them
  std::atomic<bool> wanted_{false};
  std::atomic<bool> ready_{false};

  // Of the progress thread; comm_ is set before ready_.
  State state_ = State::kIdle;
  std::vector<std::string> gpus_;
  Comm comm_ = nullptr;
  cuda::OwnedStream stream_;
  bool revoked_ = false;
  std::atomic<bool> aborted_{false};
  base::Thread aborter_;  // "ls-nccl-abort": where NCCL cannot revoke; joined by close()

  base::Mutex issue_mutex_;
  std::vector<OperationPtr> settling_
      LOCKSTEP_GUARDED_BY(issue_mutex_);  // given to NCCL, which has not launched them yet
  cuda::Stream settling_stream_ LOCKSTEP_GUARDED_BY(issue_mutex_) = nullptr;
  bool settling_captured_ LOCKSTEP_GUARDED_BY(issue_mutex_) = false;
  std::deque<OperationPtr> in_flight_ LOCKSTEP_GUARDED_BY(issue_mutex_);
  std::vector<OperationPtr> completed_ LOCKSTEP_GUARDED_BY(issue_mutex_);
  OperationPtr last_ LOCKSTEP_GUARDED_BY(issue_mutex_);  // issued last; keeps its done event
  cuda::Stream last_stream_ LOCKSTEP_GUARDED_BY(issue_mutex_) = nullptr;

  base::Mutex queue_mutex_;
  std::deque<OperationPtr> queue_ LOCKSTEP_GUARDED_BY(queue_mutex_);
};

// ---- calls.cpp

// Gives one operation to NCCL, and copies the part of it that stays on this rank. `rank`, `size`: in the lane. Inside a group when
// needs_group(). Raises cuda::Error.
Result enqueue(const LaneContext& context, const Operation& operation, Comm comm, int rank, int size,
               cuda::Stream stream);
// It is several calls of NCCL's.
bool needs_group(const lockstep_op& op);
bool can_reduce(lockstep_dtype dtype, lockstep_reduce_op op);

}  // namespace lockstep::nccl_plugin
