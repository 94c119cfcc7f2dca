// One rank's end of a group: its operations, who drives them, how they wait, and what happens when something
// breaks.
//
// Driving. Exactly one thread at a time holds the driver flag (driven_) and advances operations: the thread
// inside run(), a thread inside wait(), or the worker of the progress service. Collectives run in the order
// posted; point-to-point operations (p2p: send and receive) run beside them, each as soon as its peer allows.
// The driver advances both. A thread that waits drives when no other thread does, so a blocking call involves
// no other thread.
//
//   run(), nothing posted before it:  take the driver flag -> finish() -> give it back -> wake the worker if something was posted
//   post():                           queue, count, engage the worker
//   wait():                           take the driver flag -> finish(); or, while another thread drives, sleep on Posted::status
//   worker (serve()):                 take the driver flag -> advance all that can advance -> give it back ->
//                                     sleep on the doorbell
//
// Locks. mutex_ guards the queues; under it no other lock is taken and no callback made. The driver flag is
// not a lock: taking it never waits. What only the driver uses is protected by it. `done` callbacks run with
// the driver flag held and no lock.
//
// Waiting. A calling thread polls for 50 us while there are cores for all ranks (ten times as long for a rank
// that it had to wake), then yields a bounded number of times, then sleeps on the rank's doorbell. The worker
// sleeps at once: it would take the core that it is meant to leave to the computation.
//
// Failure. The first one (failure_record.h) breaks the group permanently, on all ranks; only a point-to-point
// operation that no peer has matched fails alone. A driver that finds no memory breaks the group as well:
// what ends operations needs none (complete(), break_with()), and the driver flag is given back in any case.
// Thread safety: all methods, any thread, except for the destructor.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/host/internal/comm_members.h"
#include "lockstep/host/internal/message_matcher.h"
#include "lockstep/host/internal/operation.h"
#include "lockstep/host/internal/progress_service.h"

namespace lockstep::comm::internal {

// An operation that was posted. Shared by the queue and the caller's handle.
struct Posted {
  explicit Posted(const lockstep_op& op);
  const std::string where;  // op.where points here
  Operation operation;      // of a collective
  P2pOperation p2p;         // of a send or receive
  void (*const done)(void*);
  void* const done_context;
  const Deadline deadline;
  // A lockstep_status, LOCKSTEP_PENDING until it is over; a futex for threads that wait while another thread
  // drives.
  std::atomic<std::uint32_t> status{LOCKSTEP_PENDING};
  std::string error;  // written before status
};

class HostCommunicator final : private Served {
 public:
  // Collective; blocks until the deadline in `config` at most. On the progress service of `parent` when there
  // is one. Raises as HostPeers::join and CommMembers.
  HostCommunicator(const lockstep_comm_config& config, HostCommunicator* parent);
  // Leaves, if leave() was not called. No other call may be in progress.
  ~HostCommunicator();
  HostCommunicator(const HostCommunicator&) = delete;

  // Runs on the calling thread unless others are queued before it. Returns the failure, or nothing.
  std::optional<Failure> run(const lockstep_op& op);
  std::shared_ptr<Posted> post(const lockstep_op& op);
  // True when it is over; false when the deadline passed first.
  bool wait(Posted& posted, Deadline deadline);

  void abort(const std::string& reason);
  // Without a cause an orderly leave; with one the others see a lost peer. Idempotent.
  void leave(const char* cause);
  std::optional<Failure> failure();

  int rank() const { return members_->rank(); }
  int size() const { return members_->size(); }
  Arena& arena() { return members_->arena(); }

 private:
  // What the driver waits for: a collective or a point-to-point operation.
  class Task;
  class CollectiveTask;
  class P2pTask;
  enum class Outcome : std::uint8_t { kDone, kFailed, kGaveUp };

  // acquire: with the release when the last driver gave the driver flag back, so its changes to what drivers
  // own are visible.
  bool try_drive() { return !driven_.exchange(true, std::memory_order_acquire); }
  void stop_driving();
  class Driving;  // gives the driver flag back
  // Advances `task` until it is over, the group breaks or `until` passes; waits as a caller does. Pre:
  // driving.
  Outcome finish(Task& task, Deadline until, std::optional<Failure>& failure);
  // The same, except that it may raise. `armed`: the doorbell is announced.
  Outcome wait_for(Task& task, Deadline until, std::optional<Failure>& failure, bool& armed);
  std::optional<Failure> run_p2p(const lockstep_op& op);
  std::optional<Failure> run_posted(lockstep_op op);
  // True when nothing is left for the worker to do.
  bool deliver_at_once(const std::shared_ptr<Posted>& posted);
  // Advances the queue as far as it goes without waiting; returns the operation it is stuck at. Pre: driving.
  std::shared_ptr<Posted> advance_queue();
  std::optional<Failure> advance_once(Operation& operation, Progress& progress);
  // Takes in point-to-point operations posted since and advances all; true while some are under way. Pre:
  // driving.
  bool advance_p2p();
  bool advance_p2p_operations();
  using Operations = std::list<std::shared_ptr<Posted>>;
  // Pre: driving.
  void submit(Operations fresh);
  // Ends point-to-point operations whose time is up or whose peer has left; lowers `until` to the next
  // deadline. Pre: driving.
  void end_late_p2p(Deadline& until);
  // Breaks the group when an operation that waits for its turn is late; lowers `until` likewise. Pre:
  // driving.
  void end_late_queue(Deadline& until);
  std::optional<Failure> late_p2p(P2pOperation& p2p, Deadline deadline);
  // What must end a blocked operation now: a broken or closed group, or its own deadline.
  std::optional<Failure> reason_to_stop(const Operation& operation);
  std::string waited_for(const Operation& operation);
  std::string waiting_in(const Operation& operation);
  std::string waiting_in(const P2pOperation& p2p);
  // True once the peer that is waited for has left; -1: all others have. It may have done its part just
  // before it left: advance once more, and give up with left_failure only when that changes nothing.
  bool has_left(int peer);
  Failure left_failure(const Operation& operation);
  void give_up(Operation& operation) noexcept;
  std::optional<Failure> after_exception() noexcept;
  Failure mismatch(const Operation& operation, Progress progress);
  bool stopped() const;
  Failure stopped_failure() noexcept;
  Failure break_with(Failure failure) noexcept;
  std::shared_ptr<Posted> head();
  void complete(Posted& posted, const std::optional<Failure>& failure) noexcept;
  std::shared_ptr<Posted> look_again();
  std::string context(const Operation& operation) const;
  std::string context(const P2pOperation& p2p) const;

  // A child's members. When the child is not complete in time, the error says whether some of them wait in a
  // collective of this communicator that this rank has not entered, which is the usual cause.
  std::unique_ptr<CommMembers> make_child(const lockstep_comm_config& config, const std::string& key);
  bool members_are_ahead(const lockstep_comm_config& config);

  // Served.
  State serve(bool last_look, Deadline& until) override;
  bool busy() const override { return queued_.load() + n_p2p_.load() != 0; }
  void lost(int host_rank, const std::string& cause) override;
  bool needs(int host_rank) override;
  std::string cause_of_loss(int host_rank) override;

  // Constant after construction.
  const std::string name_;
  const std::string key_;  // unique among the communicators of the progress service; "" for the first
  const lockstep_host* const host_;
  const std::shared_ptr<ProgressService> service_;
  std::unique_ptr<CommMembers> members_;
  std::int64_t spin_ns_ = 0;
  int yields_ = 0;

  // Synchronised by themselves.
  std::atomic<bool> driven_{false};
  std::atomic<bool> closed_{false};
  std::atomic<std::uint32_t> queued_{0};  // collectives posted and not over
  std::atomic<std::uint32_t> n_p2p_{0};   // point-to-point operations posted and not over

  // Owned by the driver.
  std::uint64_t sequence_ = 0;
  Workspace workspace_;
  MessageMatcher matcher_;
  Operations p2p_operations_;  // in the matcher

  base::Mutex mutex_;
  std::deque<std::shared_ptr<Posted>> queue_ LOCKSTEP_GUARDED_BY(mutex_);
  Operations new_p2p_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::comm::internal
