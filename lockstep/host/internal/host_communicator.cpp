#include "lockstep/host/internal/host_communicator.h"

#include <sched.h>

#include <bit>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/internal/split.h"
#include "lockstep/host/kernels.h"
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

lockstep_op with_where(lockstep_op op, const std::string& where) {
  op.where = where.c_str();
  return op;
}

std::uint64_t p2p_bytes(const lockstep_op& op) {
  return op.count * size_of(op.dtype);
}

bool is_p2p(lockstep_op_kind kind) {
  return kind == LOCKSTEP_SEND || kind == LOCKSTEP_RECV;
}

// How many cores the ranks may use together. A rank that is bound to one core has all that it needs.
int cores_of_all(HostPeers& host_peers) {
  int n_cores = 0;
  for (std::size_t word = 0; word < std::size(host_peers.own().cores); ++word) {
    std::uint64_t all = 0;
    for (int r = 0; r < host_peers.size(); ++r) all |= host_peers.peer(r).header->cores[word];
    n_cores += std::popcount(all);
  }
  return n_cores;
}

}  // namespace

Posted::Posted(const lockstep_op& op)
    : where(op.where != nullptr ? op.where : ""),
      operation(with_where(op, where)),
      p2p(with_where(op, where), p2p_bytes(op)),
      done(op.done),
      done_context(op.done_context),
      deadline(Deadline::from_monotonic_ns(op.deadline_ns)) {}

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

HostCommunicator::HostCommunicator(const lockstep_comm_config& config, HostCommunicator* parent)
    : name_(config.name != nullptr ? config.name : ""),
      key_(parent != nullptr ? split_key(config, parent->key_) : std::string()),
      host_(config.host),
      service_(parent != nullptr ? parent->service_ : ProgressService::join(config)),
      members_(parent != nullptr ? parent->make_child(config, key_)
                                 : std::make_unique<CommMembers>(service_->host_peers())),
      workspace_(config.size),
      matcher_(*members_) {
  // With more ranks than cores, polling only delays the others.
  const bool cores_for_all = service_->host_peers().size() <= cores_of_all(service_->host_peers());
  spin_ns_ = cores_for_all ? 50'000 : 0;
  yields_ = cores_for_all ? 20 : 200;
  service_->add(*this);
}

// Order: leave, so that the others stop counting on this rank; remove, after which no thread of the service
// is inside this object; then complete what is left, which runs its callbacks here; then hand the blocks to
// the service, since others may still read them. Nothing is locked: no other thread may be in a call.
HostCommunicator::~HostCommunicator() {
  if (!closed_.load()) leave(nullptr);
  service_->remove(*this);
  const std::optional<Failure> destroyed{
      {.kind = ErrorKind::kAborted, .message = "the group was destroyed", .family = ErrorFamily::kBackend}};
  while (const auto posted = head()) complete(*posted, destroyed);
  matcher_.clear();
  p2p_operations_.splice(p2p_operations_.end(), new_p2p_);
  for (const auto& posted : p2p_operations_) complete(*posted, destroyed);
  service_->retire(std::move(members_));
}

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

std::shared_ptr<Posted> HostCommunicator::post(const lockstep_op& op) {
  auto posted = std::make_shared<Posted>(op);
  if (is_uneven(op.kind)) posted->operation.take_counts(members_->rank(), members_->size());
  service_->start();  // may fail; nothing is posted yet
  {
    const base::MutexLock lock(mutex_);
    const bool p2p = is_p2p(op.kind);
    p2p ? new_p2p_.push_back(posted) : queue_.push_back(posted);
    // seq_cst: before this thread, or the worker it engages, tries to take the driver flag; see
    // stop_driving().
    (p2p ? n_p2p_ : queued_).fetch_add(1, std::memory_order_seq_cst);
  }
  if (!is_p2p(op.kind) || !deliver_at_once(posted)) service_->engage(*this);
  return posted;
}

// A short message needs no other thread: a send that finds a free slot, a receive of what has already
// arrived. Only this operation is taken, and only while no other point-to-point operation is under way:
// whatever another thread posts meanwhile stays for the worker. And only one without a callback. So a post
// runs no callback, neither its own nor another's: its caller may hold locks that the callback takes.
bool HostCommunicator::deliver_at_once(const std::shared_ptr<Posted>& posted) {
  if (posted->done != nullptr || n_p2p_.load(std::memory_order_acquire) != 1 || !try_drive()) return false;
  perturb();
  Operations own;
  if (p2p_operations_.empty()) {
    const base::MutexLock lock(mutex_);
    // Not first: another was posted before it, or a driver that has given up the flag since has taken it.
    if (!new_p2p_.empty() && new_p2p_.front() == posted) own.splice(own.end(), new_p2p_, new_p2p_.begin());
  }
  if (!own.empty()) {
    submit(std::move(own));
    advance_p2p_operations();
  }
  driven_.store(false, std::memory_order_seq_cst);
  return !busy();
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

// Gives the driver flag back, which releases what the driver changed. A thread that posts counts its
// operation before it, or the worker it wakes, tries to take the driver flag; here it is given back before
// the counts are checked (seq_cst). So either they get the driver flag, or the operation is seen here and the
// worker is woken.
void HostCommunicator::stop_driving() {
  driven_.store(false, std::memory_order_seq_cst);
  perturb();
  if (busy()) service_->wake();
}

std::shared_ptr<Posted> HostCommunicator::head() {
  const base::MutexLock lock(mutex_);
  return queue_.empty() ? nullptr : queue_.front();
}

// Ends an operation, with the driver flag held. Order matters: the other ranks are out of its buffers before
// the status says that it is over; the error text is written before the status (release), which the owner of
// the handle loads with acquire; the callback is last and runs under no lock. The caller's shared_ptr keeps
// `posted` alive.
void HostCommunicator::complete(Posted& posted, const std::optional<Failure>& failure) noexcept {
  if (is_p2p(posted.p2p.op.kind)) {
    n_p2p_.fetch_sub(1, std::memory_order_release);
  } else {
    if (failure) give_up(posted.operation);
    const base::MutexLock lock(mutex_);
    if (!queue_.empty() && queue_.front().get() == &posted) {
      queue_.pop_front();
      queued_.fetch_sub(1, std::memory_order_release);
    }
  }
  try {
    if (failure) posted.error = failure->message;
  } catch (const std::bad_alloc&) {
    posted.error = "no memory";  // short enough to need none
  }
  perturb();
  posted.status.store(failure ? status_of(failure->kind) : LOCKSTEP_OK, std::memory_order_release);
  local::futex_wake_all(posted.status);
  if (posted.done != nullptr) posted.done(posted.done_context);
}

// The sequence number is taken when an operation starts, not when it is posted: one that fails before
// (stopped()) has published nothing, and the numbers of the ranks stay in step.
std::optional<Failure> HostCommunicator::advance_once(Operation& operation, Progress& progress) {
  if (!operation.started() && stopped()) return stopped_failure();
  // Starting may take memory for a packed copy: without it the group is broken, and nobody waits for this
  // rank.
  try {
    if (!operation.started()) operation.start(*members_, ++sequence_);
    progress = operation.advance(*members_, workspace_);
    if (progress == Progress::kDone || progress == Progress::kBlocked) return std::nullopt;
    return break_with(mismatch(operation, progress));
  } catch (...) {
    progress = Progress::kBlocked;
    return after_exception();
  }
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

bool HostCommunicator::advance_p2p() {
  Operations fresh;
  {
    const base::MutexLock lock(mutex_);
    fresh.swap(new_p2p_);
  }
  submit(std::move(fresh));
  return advance_p2p_operations();
}

// One that the matcher has no memory for fails alone: nobody has seen it.
void HostCommunicator::submit(Operations fresh) {
  for (const auto& posted : fresh) {
    try {
      matcher_.submit(posted->p2p);
    } catch (...) {
      posted->p2p.over = true;
      posted->p2p.failure = base::current_failure();
    }
  }
  p2p_operations_.splice(p2p_operations_.end(), fresh);
}

// A callback may post again: it adds to new_p2p_ and cannot drive, since the driver flag is taken. So the
// list changes only here and in submit(), and an entry is erased before its callback runs.
bool HostCommunicator::advance_p2p_operations() {
  std::optional<Failure> failure;
  try {
    if (!stopped()) matcher_.advance();
  } catch (...) {
    after_exception();
  }
  if (stopped()) {
    failure = stopped_failure();
    matcher_.clear();
  }
  for (auto it = p2p_operations_.begin(); it != p2p_operations_.end();) {
    const std::shared_ptr<Posted> posted = *it;
    if (!posted->p2p.over && !failure) {
      ++it;
      continue;
    }
    it = p2p_operations_.erase(it);
    complete(*posted, posted->p2p.over ? posted->p2p.failure : failure);
  }
  return !p2p_operations_.empty();
}

// The shared_ptr from head() keeps an operation alive that its owner releases while it is completed.
std::shared_ptr<Posted> HostCommunicator::advance_queue() {
  while (auto posted = head()) {
    Progress progress{};
    auto failure = advance_once(posted->operation, progress);
    if (!failure && progress != Progress::kDone) {
      if (!stopped()) return posted;
      failure = stopped_failure();
    }
    complete(*posted, failure);
  }
  return nullptr;
}

// The last advance before this thread sleeps; the doorbell is announced. Also ends what is late or whose peer
// has left. Returns the operation it is blocked at.
std::shared_ptr<Posted> HostCommunicator::look_again() {
  auto stuck = advance_queue();
  while (stuck) {
    std::optional<Failure> failure = reason_to_stop(stuck->operation);
    if (!failure && has_left(stuck->operation.peer())) {
      const int leaver = stuck->operation.peer();
      const auto before = stuck;
      stuck = advance_queue();
      if (stuck != before || stuck->operation.peer() != leaver) continue;
      failure = left_failure(stuck->operation);
    }
    if (!failure) return stuck;
    complete(*stuck, failure);
    stuck = advance_queue();
  }
  return nullptr;
}

// The worker never waits here: what is blocked makes it sleep on the doorbell, together with the other
// communicators. The driver flag is not given back by stop_driving(), which would wake the worker, this
// thread, for operations that are merely blocked; what is posted meanwhile rings the doorbell itself
// (engage). Where there is no memory for a text, the group is broken, which rings: it is looked at again at
// once.
Served::State HostCommunicator::serve(bool last_look, Deadline& until) {
  if (!busy()) return State::kIdle;
  if (!try_drive()) return State::kElsewhere;
  bool stuck = true;
  try {
    stuck = advance_p2p();
    if (last_look) {
      if (stuck) end_late_p2p(until);
      stuck = !p2p_operations_.empty();
      stuck = look_again() != nullptr || stuck;
      end_late_queue(until);
    } else {
      stuck = advance_queue() != nullptr || stuck;
    }
  } catch (...) {
    break_with(base::current_failure());
    stuck = true;
  }
  driven_.store(false, std::memory_order_seq_cst);
  return stuck ? State::kStuck : State::kIdle;
}

}  // namespace lockstep::comm::internal
