// How a caller's thread ends an operation: inside run() and wait() it drives, and waits in between.
#include <sched.h>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine.h"
#include "lockstep/host/internal/host_communicator.h"
#include "lockstep/local/wake.h"

namespace lockstep::comm::internal {
namespace {

// Polls between two readings of the clock: about a microsecond.
constexpr int kLooks = 32;
// How much longer a rank polls for one that it had to wake. Waking an idle core of a virtual machine takes up
// to 200 us.
constexpr int kWakeFactor = 10;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

class HostCommunicator::Driving {
 public:
  explicit Driving(HostCommunicator& owner) : owner_(owner) {}
  ~Driving() { owner_.stop_driving(); }
  Driving(const Driving&) = delete;

 private:
  HostCommunicator& owner_;
};

// finish() waits for collectives and for point-to-point operations in the same way; what differs is behind
// this interface. Tasks are on the stack of the driver and refer to an operation that outlives them.
class HostCommunicator::Task {
 public:
  explicit Task(HostCommunicator& owner) : owner_(owner) {}
  // True when over; then `failure` says how.
  virtual bool advance(std::optional<Failure>& failure) = 0;
  virtual std::uint64_t mark() const = 0;
  // The rank it waits for; -1 for any.
  virtual int peer() const = 0;
  // Called when its time is up, or its peer has left: ends it and returns the failure; nothing when it may
  // continue.
  virtual std::optional<Failure> late() = 0;
  virtual std::optional<Failure> left() = 0;
  // It is not part of the queue of collectives, which must be advanced meanwhile.
  virtual bool beside_queue() const = 0;
  virtual Deadline deadline() const = 0;
  // Who waits for whom, as text.
  virtual std::string waiting() = 0;

 protected:
  ~Task() = default;
  HostCommunicator& owner_;
};

class HostCommunicator::CollectiveTask final : public Task {
 public:
  CollectiveTask(HostCommunicator& owner, Operation& operation) : Task(owner), operation_(operation) {}
  bool advance(std::optional<Failure>& failure) override {
    Progress progress{};
    failure = owner_.advance_once(operation_, progress);
    return failure || progress == Progress::kDone;
  }
  std::uint64_t mark() const override { return operation_.mark(); }
  int peer() const override { return operation_.peer(); }
  std::optional<Failure> late() override { return owner_.reason_to_stop(operation_); }
  std::optional<Failure> left() override { return owner_.left_failure(operation_); }
  bool beside_queue() const override { return false; }
  Deadline deadline() const override { return Deadline::from_monotonic_ns(operation_.call().deadline_ns); }
  std::string waiting() override { return owner_.waiting_in(operation_); }

 private:
  Operation& operation_;
};

class HostCommunicator::P2pTask final : public Task {
 public:
  P2pTask(HostCommunicator& owner, P2pOperation& p2p) : Task(owner), p2p_(p2p) {}
  bool advance(std::optional<Failure>& failure) override {
    if (!p2p_.over && owner_.stopped()) return false;  // the other side may have taken its buffer back
    try {
      if (!p2p_.over) owner_.matcher_.advance();
    } catch (...) {
      failure = owner_.after_exception();
      return failure.has_value();
    }
    if (p2p_.over) failure = p2p_.failure;
    return p2p_.over;
  }
  std::uint64_t mark() const override { return p2p_.mark; }
  int peer() const override { return p2p_.peer; }
  std::optional<Failure> late() override { return owner_.late_p2p(p2p_, deadline()); }
  std::optional<Failure> left() override { return owner_.late_p2p(p2p_, Deadline::never()); }
  bool beside_queue() const override { return true; }
  Deadline deadline() const override { return Deadline::from_monotonic_ns(p2p_.op.deadline_ns); }
  std::string waiting() override { return owner_.waiting_in(p2p_); }

 private:
  P2pOperation& p2p_;
};

std::optional<Failure> HostCommunicator::run(const lockstep_op& op) {
  if (is_p2p(op.kind)) return run_p2p(op);
  if (queued_.load(std::memory_order_acquire) == 0 && try_drive()) {
    const Driving driving(*this);
    // Checked again with the driver flag: what is posted from now on runs after this operation, since the
    // worker and threads in wait() need the driver flag.
    if (queued_.load(std::memory_order_acquire) == 0) {
      Operation operation(op);
      if (is_uneven(op.kind)) operation.take_counts(members_->rank(), members_->size());
      std::optional<Failure> failure;
      CollectiveTask task(*this, operation);
      finish(task, Deadline::never(), failure);  // the task has its own deadline
      if (failure) give_up(operation);
      return failure;
    }
  }
  return run_posted(op);
}

// A blocking call while others are queued or driven elsewhere: as a posted one, in its turn. It needs no
// callback, since its caller waits.
std::optional<Failure> HostCommunicator::run_posted(lockstep_op op) {
  op.done = nullptr;
  const auto posted = post(op);
  wait(*posted, Deadline::never());
  const auto status = static_cast<lockstep_status>(posted->status.load(std::memory_order_acquire));
  if (status == LOCKSTEP_OK) return std::nullopt;
  return Failure{.kind = kind_of(status), .message = posted->error, .family = ErrorFamily::kBackend};
}

// As run(): with no other p2p operation posted there is none that this one could overtake, and matching keeps
// the order in which operations were submitted.
std::optional<Failure> HostCommunicator::run_p2p(const lockstep_op& op) {
  if (n_p2p_.load(std::memory_order_acquire) == 0 && try_drive()) {
    const Driving driving(*this);
    if (n_p2p_.load(std::memory_order_acquire) == 0) {
      if (stopped()) return stopped_failure();
      P2pOperation p2p(op, p2p_bytes(op));
      P2pTask task(*this, p2p);
      matcher_.submit(p2p);
      std::optional<Failure> failure;
      finish(task, Deadline::never(), failure);
      // Broken or closed: no thread will move its bytes any more.
      if (!p2p.over) matcher_.forget(p2p);
      return failure;
    }
  }
  return run_posted(op);
}

// A thread that waits is the cheapest driver, since it needs no wake-up. But it must complete whatever it
// comes across, also operations that other threads wait for: those sleep on the status of theirs, which
// complete() wakes.
bool HostCommunicator::wait(Posted& posted, Deadline deadline) {
  const auto over = [&] { return posted.status.load(std::memory_order_acquire) != LOCKSTEP_PENDING; };
  while (!over()) {
    if (deadline.expired()) return false;
    if (!try_drive()) {
      // The worker holds the driver flag briefly, often on this very core; a thread that waits holds it for
      // longer.
      for (int turns = 20; turns > 0 && driven_.load(std::memory_order_relaxed) && !over(); --turns)
        ::sched_yield();
      if (!try_drive()) {
        if (!over()) local::futex_sleep(posted.status, LOCKSTEP_PENDING, deadline);
        continue;
      }
    }
    const Driving driving(*this);
    // Collectives run in order: for one behind others, finish() waits for the head of the queue, and the loop
    // runs again.
    advance_p2p();
    const auto first = over() ? nullptr : advance_queue();
    std::optional<Failure> failure;
    if (!over() && is_p2p(posted.p2p.op.kind)) {
      P2pTask task(*this, posted.p2p);
      // advance_p2p() completes it once it is over; here it is only waited for.
      const Outcome outcome = finish(task, std::min(deadline, posted.deadline), failure);
      if (outcome == Outcome::kFailed && !posted.p2p.over) {
        matcher_.forget(posted.p2p);
        posted.p2p.over = true;
        posted.p2p.failure = std::move(failure);
      }
      advance_p2p();
    } else if (first && !over()) {
      CollectiveTask task(*this, first->operation);
      const Outcome outcome = finish(task, std::min(deadline, first->deadline), failure);
      if (outcome != Outcome::kGaveUp) complete(*first, failure);
    }
  }
  return true;
}

// One wait, from the cheapest way to the most patient:
//
//   poll for spin_ns --> yield yields_ times --> announce --> advance once more --> checks --> sleep --> announce ...
//     ^                                                                               |
//     '----------------------- any progress (mark changes) ---------------------------+--> peer has left, deadline passed, group
//                                                                                          broken: fail
//
// Between announce() and sleep() everything that another rank could have changed is looked at once more; a
// change after that rings the doorbell, and the ticket makes sleep() return at once. `armed` is true between
// announce() and retract(). Pre: driving. The driver flag is held throughout: nobody else can complete what
// this thread waits for.
HostCommunicator::Outcome HostCommunicator::wait_for(Task& task, Deadline until,
                                                     std::optional<Failure>& failure, bool& armed) {
  constexpr int kNobody = -2;
  int spins = kLooks, yields = yields_, leaver = kNobody;
  std::int64_t spin_ns = spin_ns_, spin_until = 0;  // since the last progress; 0: the clock was not read yet
  std::uint64_t mark = task.mark();
  local::Doorbell& door = members_->doorbell(members_->rank());
  const bool beside = task.beside_queue();
  std::uint32_t ticket = 0;
  std::optional<base::SlowWait> slow;  // from the first sleep on
  for (;;) {
    if (task.advance(failure)) return failure ? Outcome::kFailed : Outcome::kDone;
    if (n_p2p_.load(std::memory_order_relaxed) != 0) advance_p2p();
    if (beside && queued_.load(std::memory_order_relaxed) != 0) advance_queue();
    if (mark != task.mark()) {
      mark = task.mark(), spins = kLooks, yields = yields_, leaver = kNobody;
      spin_ns = spin_ns_, spin_until = 0;
      if (until.expired()) return Outcome::kGaveUp;
    }
    // A peer that had to be woken answers later than a usual wait lasts. If this rank slept meanwhile, the
    // peer would have to wake it in turn, and so on: two ranks that send each other to sleep at every step.
    if (members_->woke_someone()) spins = kLooks, spin_ns = spin_ns_ * kWakeFactor, spin_until = 0;
    if (stopped()) {
      failure = stopped_failure();
      return Outcome::kFailed;
    }
    if (spins > 0) {
      relax();
      if (--spins > 0) continue;
      const std::int64_t now = Deadline::now().monotonic_ns();
      if (spin_until == 0) spin_until = now + spin_ns;
      if (now < spin_until) spins = kLooks;
    } else if (yields > 0) {
      --yields;
      ::sched_yield();
    } else if (!armed) {
      armed = true;  // announced: advance once more before sleeping
      ticket = local::announce(door);
    } else if (has_left(task.peer()) && leaver != task.peer()) {
      leaver = task.peer();
    } else {
      const bool left = leaver == task.peer();
      failure = left ? task.left() : task.late();
      if (failure) return Outcome::kFailed;
      if (left) continue;  // it had done its part before it left
      if (until.expired()) return Outcome::kGaveUp;
      if (!slow) slow.emplace(task.deadline());
      slow->say_if_due([&] { return task.waiting(); });
      Deadline next = std::min(until, slow->next());
      end_late_p2p(next);
      if (beside) look_again();
      end_late_queue(next);
      local::sleep(door, ticket, next);
      local::retract(door);
      armed = false;
    }
  }
}

HostCommunicator::Outcome HostCommunicator::finish(Task& task, Deadline until,
                                                   std::optional<Failure>& failure) {
  bool armed = false;
  Outcome outcome = Outcome::kFailed;
  try {
    outcome = wait_for(task, until, failure, armed);
  } catch (...) {
    failure = break_with(base::current_failure());
  }
  if (armed) local::retract(members_->doorbell(members_->rank()));
  return outcome;
}

}  // namespace lockstep::comm::internal
