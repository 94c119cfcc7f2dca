// One rank's end of a group: the queue of its operations, who drives them, how they wait, and what happens when
// something breaks.
//
// Driving. Exactly one thread at a time holds the driver's token and calls Operation::advance: the thread inside
// run(), a thread inside wait(), or the worker "ls-comm", which exists once something was posted. Operations run in
// the order posted. A thread that waits drives when nobody else does, so a blocking call involves no other thread.
//
// Waiting. A calling thread looks again 1,500 times while there are cores for all ranks, then yields a bounded number
// of times, then sleeps on the rank's doorbell. The worker goes to sleep at once: it would steal the core it
// is meant to leave to the computation.
//
// Failure. The first one (ledger.h) breaks the group for good, on all ranks. Thread safety: all methods, any thread,
// but for the destructor.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/thread.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/host/internal/fabric.h"
#include "lockstep/host/internal/operation.h"
#include "lockstep/host/internal/watch.h"

namespace lockstep::comm::internal {

// An operation that was posted. Shared by the queue and the caller's handle.
struct Posted {
  explicit Posted(const lockstep_op& op);
  const std::string where;  // op.where points here
  Operation operation;
  void (*const done)(void*);
  void* const done_context;
  const Deadline deadline;
  // A lockstep_status, LOCKSTEP_PENDING until over; a futex for those that wait while another thread drives.
  std::atomic<std::uint32_t> status{LOCKSTEP_PENDING};
  std::string error;  // written before status
};

class Communicator {
 public:
  // Collective; blocks until the deadline in `config` at most. Raises as Fabric::join.
  explicit Communicator(const lockstep_comm_config& config);
  // Leaves, if leave() was not called, and joins the threads. No other call may be under way.
  ~Communicator();
  Communicator(const Communicator&) = delete;

  // Runs on the calling thread unless others are queued before it. Returns the failure, or nothing.
  std::optional<Failure> run(const lockstep_op& op);
  std::shared_ptr<Posted> post(const lockstep_op& op);
  // True when it is over; false when the deadline passed first.
  bool wait(Posted& posted, Deadline deadline);

  void abort(const std::string& reason);
  // Without a cause an orderly leave; with one the others see a lost peer.
  void leave(const char* cause);
  std::optional<Failure> failure();

  Arena& arena() { return fabric_->arena(); }

 private:
  bool try_drive() { return !driven_.exchange(true, std::memory_order_acquire); }
  void stop_driving();
  // Advances `operation` until it is over, the group breaks or `until` passes; waits as a caller does. Pre: driving.
  enum class Outcome : std::uint8_t { kDone, kFailed, kGaveUp };
  Outcome finish(Operation& operation, Deadline until, std::optional<Failure>& failure);
  // Advances the queue as far as it goes without waiting; returns the operation it is stuck at. Pre: driving.
  std::shared_ptr<Posted> advance_queue();
  std::optional<Failure> advance_once(Operation& operation, Progress& progress);
  // What must end a blocked operation now: a broken or closed group, or its own deadline.
  std::optional<Failure> reason_to_stop(const Operation& operation);
  // True once the peer that `operation` is blocked on has left. It may have done its part just before: look again,
  // and give up with left_failure only when that changes nothing.
  bool blocked_on_leaver(const Operation& operation);
  Failure left_failure(const Operation& operation);
  bool stopped() const;
  Failure stopped_failure();
  Failure break_with(Failure failure);
  std::shared_ptr<Posted> head();
  void complete(Posted& posted, std::optional<Failure> failure);
  std::shared_ptr<Posted> look_again();
  void work();
  void peer_lost(int rank);
  std::string cause_of_loss(int rank);
  void wake_worker();
  std::string context(const Operation& operation) const;

  // Constant after construction.
  const std::string name_;
  const lockstep_host* const host_;
  std::unique_ptr<Fabric> fabric_;
  int spins_ = 0, yields_ = 0;

  // Synchronised by themselves.
  std::atomic<bool> driven_{false};
  std::atomic<bool> closed_{false};
  std::atomic<std::uint32_t> queued_{0};
  std::atomic<std::uint32_t> attention_{0};  // futex of the idle worker

  // Owned by whoever drives.
  std::uint64_t sequence_ = 0;
  Workspace workspace_;

  std::mutex mutex_;  // guards what follows
  std::deque<std::shared_ptr<Posted>> queue_;
  Thread worker_;

  std::unique_ptr<Watch> watch_;
};

}  // namespace lockstep::comm::internal
