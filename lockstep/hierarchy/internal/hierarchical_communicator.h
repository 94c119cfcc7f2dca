// One rank's end of a hierarchical group: the queue of collectives, the steps of each on the
// sub-communicators, and failure.
//
// Driving. No thread of its own: the engines call back when a step is over, and the thread of that callback
// posts the steps that have become possible (one thread at a time per operation). A thread inside wait() also
// waits for a step, which makes the local engine run it there. Collectives run one after the other, messages
// beside them.
//
//   posted --its turn--> started --step over: post the steps that needed it--> all steps over --> over, done called
//                           '--failure of any step or sub-communicator: no more steps are posted, those in progress end--^
//
// Failure. The first one of any sub-communicator goes to all of them as the reason of an abort; the flat
// sub-communicator, which all ranks are in, decides which is the first. A sub-communicator knows only its own
// ranks, and the one it waits for may itself be waiting in another; so a rank that is stuck in a collective
// for some 40 ms writes the collective's number into the group's store, and a timeout names the ranks that
// have not reached it. Every 20 ms the ticker (ticker.h) checks the sub-communicators of communicators with
// operations in progress, so that a rank that waits in one is notified of a failure in another.
//
// Locks. A communicator's mutex_ and an operation's mutex are never held together, and neither while an
// engine posts, waits or aborts, or a callback runs. Lock order: the ticker's, then the communicator's.
// Thread safety: all methods, any thread, except for the destructor.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/engine/engine.h"
#include "lockstep/hierarchy/internal/schedule.h"
#include "lockstep/hierarchy/internal/sub_communicator.h"
#include "lockstep/hierarchy/internal/ticker.h"
#include "lockstep/hierarchy/internal/topology.h"

namespace lockstep::comm::hierarchy {

class HierarchicalCommunicator;

// An operation that was posted. Shared by the caller's handle, the queue and the steps under way.
struct Operation {
  Operation(HierarchicalCommunicator& communicator, const lockstep_op& call, int size);

  HierarchicalCommunicator& owner;
  const std::string where;                                    // op.where points here
  const std::vector<std::uint64_t> send_counts, recv_counts;  // likewise
  lockstep_op op;
  std::uint64_t number = 0;  // of a collective, from 1 in the order posted

  // Used by one thread at a time, whoever made `calls` more than zero.
  struct Running {
    std::shared_ptr<lockstep_handle> handle;
    std::atomic<bool> over{false};
    bool posted = false, counted = false;
  };
  std::atomic<std::uint32_t> calls{0};
  bool started = false;
  Schedule schedule;
  std::deque<Running> running;  // by step
  std::array<std::size_t, kSubCommunicators> cursor{};
  std::size_t n_posted = 0, n_over = 0;
  std::optional<Failure> failure;

  base::Mutex mutex;  // also held while `running` and its handles, and `schedule`, are assigned
  base::ConditionVariable changed;
  std::uint64_t version LOCKSTEP_GUARDED_BY(mutex) = 0;
  lockstep_status status LOCKSTEP_GUARDED_BY(mutex) = LOCKSTEP_PENDING;
  std::string error LOCKSTEP_GUARDED_BY(mutex);
  std::atomic<bool> over{false};
};

// While one exists on this thread, a caller is inside post, abort or leave, and may hold locks that its
// `done` takes: `done` is then called from another thread.
class CallerInside {
 public:
  CallerInside();
  ~CallerInside();
  CallerInside(const CallerInside&) = delete;
};

// What communicators of one engine share.
struct Setup {
  const Engine& local;
  const Engine& across;
  lockstep_capabilities capabilities;
  std::function<std::string()> identity;
  Ticker ticker;
};

class HierarchicalCommunicator final : public Ticking {
 public:
  // Collective. Raises what the engines raise, and kTimeout naming a rank that did not publish its host.
  HierarchicalCommunicator(Setup& setup, const lockstep_comm_config& config,
                           const HierarchicalCommunicator* parent);
  // Leaves, if leave() was not called, and waits for what is in progress to end.
  ~HierarchicalCommunicator();
  HierarchicalCommunicator(const HierarchicalCommunicator&) = delete;

  // Where everything happens, when one sub-communicator is enough; null otherwise.
  SubCommunicator* sole() const { return sole_; }
  // Memory for users comes from here; null when the local engine has none or this rank is alone on its host.
  SubCommunicator* memory() const {
    return local_ && local_->table().alloc != nullptr ? local_.get() : nullptr;
  }

  // Pre: sole() is null, the call was checked.
  std::shared_ptr<Operation> post(const lockstep_op& op);
  // True when it is over; false when the deadline passed first. A long wait logs once which ranks are
  // missing; the sub-communicators, which know their own ranks only, log nothing.
  bool wait(const std::shared_ptr<Operation>& operation, Deadline deadline);

  void abort(const std::string& reason);
  void leave(const char* cause);
  std::optional<Failure> failure();

  int rank() const { return topology_.rank; }
  int size() const { return topology_.size; }
  const lockstep_capabilities& capabilities() const { return setup_.capabilities; }

  // Ticking.
  void tick() override;
  bool enter() override;
  void exit() override;

 private:
  // ---- joining
  Topology meet(const lockstep_comm_config& config, const HierarchicalCommunicator* parent);
  void make_sub_communicators(const lockstep_comm_config& config, const HierarchicalCommunicator* parent);
  SubCommunicator::Parent parent_of(const std::vector<int>& members, const lockstep_comm_config& config,
                                    const SubCommunicator* sub) const;
  SubCommunicator& sub_communicator(Where where) const;

  // ---- operations (hierarchical_communicator_operations.cpp)
  void advance(const std::shared_ptr<Operation>& operation);
  void advance_once(const std::shared_ptr<Operation>& operation);
  void collect(Operation& operation);
  void post_steps(const std::shared_ptr<Operation>& operation);
  bool ready(const Operation& operation, const Step& step) const;
  void finish(const std::shared_ptr<Operation>& operation);
  void drive_queue();
  static void step_over(void* context);

  // ---- failure
  Failure break_with(Failure failure);
  // Writes into the store which collective this rank is stuck in. Called at every tick.
  void announce();
  // Rewrites a sub-communicator's message for a timeout in the collective at the head, when the store knows
  // which ranks are missing.
  void name_missing(Failure& failure);
  // "rank 1, rank 3": the ranks that, by the store, have not entered collective `number`; "" when it does not
  // answer.
  std::string missing_in(std::uint64_t number);
  base::Awaited awaited(const Operation& operation);
  void drive_stopped();
  std::optional<Failure> stopped();
  std::shared_ptr<void> scratch(std::size_t n_bytes);

  // Constant after construction.
  Setup& setup_;
  const lockstep_host* const host_;
  const std::string name_;  // of the group
  Topology topology_;
  std::unique_ptr<SubCommunicator> local_, lane_, flat_;
  SubCommunicator* sole_ = nullptr;

  std::atomic<std::uint32_t> drives_{0};
  base::Mutex mutex_;
  base::ConditionVariable idle_;
  std::deque<std::shared_ptr<Operation>> queue_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Operation>> messages_ LOCKSTEP_GUARDED_BY(mutex_);
  std::optional<Failure> first_ LOCKSTEP_GUARDED_BY(mutex_);
  bool closed_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::uint64_t n_collectives_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // posted
  // Numbers: at the head at the last tick, last said in the store.
  std::uint64_t seen_ahead_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::uint64_t announced_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::vector<std::pair<std::size_t, void*>> blocks_ LOCKSTEP_GUARDED_BY(mutex_);  // spare scratch
  std::size_t users_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // threads inside, from callbacks and the ticker
};

}  // namespace lockstep::comm::hierarchy
