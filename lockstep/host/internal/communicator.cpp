#include "lockstep/host/internal/communicator.h"

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

// Looks between two readings of the clock: about a microsecond.
constexpr int kLooks = 32;
// How much longer a rank looks for one that it had to wake. Waking an idle core of a virtual machine takes up to 200 us.
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

std::uint64_t letter_bytes(const lockstep_op& op) {
  return op.count * size_of(op.dtype);
}

bool is_letter(lockstep_op_kind kind) {
  return kind == LOCKSTEP_SEND || kind == LOCKSTEP_RECV;
}

// How many cores the ranks have together. A rank that is bound to one has no fewer than it needs.
int cores_of_all(Fabric& fabric) {
  int n_cores = 0;
  for (std::size_t word = 0; word < std::size(fabric.own().cores); ++word) {
    std::uint64_t all = 0;
    for (int r = 0; r < fabric.size(); ++r) all |= fabric.peer(r).station->cores[word];
    n_cores += std::popcount(all);
  }
  return n_cores;
}

}  // namespace

Posted::Posted(const lockstep_op& op)
    : where(op.where != nullptr ? op.where : ""),
      operation(with_where(op, where)),
      letter(with_where(op, where), letter_bytes(op)),
      done(op.done),
      done_context(op.done_context),
      deadline(Deadline::from_monotonic_ns(op.deadline_ns)) {}

class Communicator::Task {
 public:
  explicit Task(Communicator& owner) : owner_(owner) {}
  // True when over; then `failure` says how.
  virtual bool advance(std::optional<Failure>& failure) = 0;
  virtual std::uint64_t mark() const = 0;
  // The rank it waits for; -1 for any.
  virtual int peer() const = 0;
  // Its time is up, or its peer has left: ends it with a failure, or nothing when it may go on.
  virtual std::optional<Failure> late() = 0;
  virtual std::optional<Failure> left() = 0;
  // It stands beside the queue of collectives, which must go on meanwhile.
  virtual bool beside_queue() const = 0;
  virtual Deadline deadline() const = 0;
  // Who waits for whom, in words.
  virtual std::string waiting() = 0;

 protected:
  ~Task() = default;
  Communicator& owner_;
};

class Communicator::CollectiveTask final : public Task {
 public:
  CollectiveTask(Communicator& owner, Operation& operation) : Task(owner), operation_(operation) {}
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

class Communicator::LetterTask final : public Task {
 public:
  LetterTask(Communicator& owner, Letter& letter) : Task(owner), letter_(letter) {}
  bool advance(std::optional<Failure>& failure) override {
    if (!letter_.over && owner_.stopped()) return false;  // the other side may have taken its buffer back
    try {
      if (!letter_.over) owner_.mailroom_.advance();
    } catch (...) {
      failure = owner_.after_exception();
      return failure.has_value();
    }
    if (letter_.over) failure = letter_.failure;
    return letter_.over;
  }
  std::uint64_t mark() const override { return letter_.mark; }
  int peer() const override { return letter_.peer; }
  std::optional<Failure> late() override { return owner_.late_letter(letter_, deadline()); }
  std::optional<Failure> left() override { return owner_.late_letter(letter_, Deadline::never()); }
  bool beside_queue() const override { return true; }
  Deadline deadline() const override { return Deadline::from_monotonic_ns(letter_.op.deadline_ns); }
  std::string waiting() override { return owner_.waiting_in(letter_); }

 private:
  Letter& letter_;
};

Communicator::Communicator(const lockstep_comm_config& config, Communicator* parent)
    : name_(config.name != nullptr ? config.name : ""),
      key_(parent != nullptr ? split_key(config, parent->key_) : std::string()),
      host_(config.host),
      hub_(parent != nullptr ? parent->hub_ : Hub::join(config)),
      circle_(parent != nullptr ? parent->make_child(config, key_)
                                : std::make_unique<Circle>(hub_->fabric())),
      workspace_(config.size),
      mailroom_(*circle_) {
  // With more ranks than cores looking only delays the others.
  const bool cores_for_all = hub_->fabric().size() <= cores_of_all(hub_->fabric());
  spin_ns_ = cores_for_all ? 50'000 : 0;
  yields_ = cores_for_all ? 20 : 200;
  hub_->add(*this);
}

Communicator::~Communicator() {
  if (!closed_.load()) leave(nullptr);
  hub_->remove(*this);
  const Failure destroyed{
      .kind = ErrorKind::kAborted, .message = "the group was destroyed", .family = ErrorFamily::kBackend};
  while (const auto posted = head()) complete(*posted, destroyed);
  mailroom_.clear();
  new_letters_.swap(queue_);
  letters_.insert(letters_.end(), queue_.begin(), queue_.end());
  queue_.clear();
  for (const auto& posted : letters_) complete(*posted, destroyed);
  hub_->retire(std::move(circle_));
}

std::optional<Failure> Communicator::run(const lockstep_op& op) {
  if (is_letter(op.kind)) return run_letter(op);
  if (queued_.load(std::memory_order_acquire) == 0 && try_drive()) {
    // Nothing can get ahead of us any more: the worker and waiters need the token.
    if (queued_.load(std::memory_order_acquire) == 0) {
      Operation operation(op);
      if (is_uneven(op.kind)) operation.take_counts(circle_->rank(), circle_->size());
      std::optional<Failure> failure;
      CollectiveTask task(*this, operation);
      finish(task, Deadline::never(), failure);  // the task knows its own
      if (failure) give_up(operation);
      stop_driving();
      return failure;
    }
    stop_driving();
  }
  return run_posted(op);
}

std::optional<Failure> Communicator::run_posted(lockstep_op op) {
  op.done = nullptr;
  const auto posted = post(op);
  wait(*posted, Deadline::never());
  const auto status = static_cast<lockstep_status>(posted->status.load(std::memory_order_acquire));
  if (status == LOCKSTEP_OK) return std::nullopt;
  return Failure{.kind = kind_of(status), .message = posted->error, .family = ErrorFamily::kBackend};
}

std::optional<Failure> Communicator::run_letter(const lockstep_op& op) {
  if (mailing_.load(std::memory_order_acquire) == 0 && try_drive()) {
    std::optional<Failure> failure;
    if (mailing_.load(std::memory_order_acquire) == 0) {
      Letter letter(op, letter_bytes(op));
      if (stopped()) {
        failure = stopped_failure();
      } else {
        LetterTask task(*this, letter);
        mailroom_.submit(letter);
        finish(task, Deadline::never(), failure);
        // Broken or closed: nobody will move its bytes any more.
        if (!letter.over && !mailroom_.withdraw(letter)) mailroom_.forget(letter);
      }
      stop_driving();
      return failure;
    }
    stop_driving();
  }
  return run_posted(op);
}

std::shared_ptr<Posted> Communicator::post(const lockstep_op& op) {
  auto posted = std::make_shared<Posted>(op);
  if (is_uneven(op.kind)) posted->operation.take_counts(circle_->rank(), circle_->size());
  hub_->start();  // may fail; nothing is posted yet
  {
    const std::lock_guard lock(mutex_);
    const bool letter = is_letter(op.kind);
    (letter ? new_letters_ : queue_).push_back(posted);
    (letter ? mailing_ : queued_).fetch_add(1, std::memory_order_seq_cst);
  }
  if (!is_letter(op.kind) || !deliver_at_once(*posted)) hub_->engage(*this);
  return posted;
}

// A short message needs no other thread: a send that finds a free slot, a receive of what is there already. Only while
// it is the only letter and nobody is to be called, since the caller of post may hold locks.
bool Communicator::deliver_at_once(const Posted& posted) {
  if (posted.done != nullptr || mailing_.load(std::memory_order_acquire) != 1 || !try_drive()) return false;
  if (mailing_.load(std::memory_order_acquire) == 1) advance_letters();
  driven_.store(false, std::memory_order_seq_cst);
  return !busy();
}

bool Communicator::wait(Posted& posted, Deadline deadline) {
  const auto over = [&] { return posted.status.load(std::memory_order_acquire) != LOCKSTEP_PENDING; };
  while (!over()) {
    if (deadline.expired()) return false;
    if (!try_drive()) {
      // The worker looks and goes, often on this very core; a thread that waits holds the token for longer.
      for (int turns = 20; turns > 0 && driven_.load(std::memory_order_relaxed) && !over(); --turns)
        ::sched_yield();
      if (!try_drive()) {
        if (!over()) local::futex_sleep(posted.status, LOCKSTEP_PENDING, deadline);
        continue;
      }
    }
    advance_letters();
    const auto first = over() ? nullptr : advance_queue();
    std::optional<Failure> failure;
    if (!over() && is_letter(posted.letter.op.kind)) {
      LetterTask task(*this, posted.letter);
      // advance_letters() completes it once it is over; here it is only waited for.
      const Outcome outcome = finish(task, std::min(deadline, posted.deadline), failure);
      if (outcome == Outcome::kFailed && !posted.letter.over) {
        if (!mailroom_.withdraw(posted.letter)) mailroom_.forget(posted.letter);
        posted.letter.over = true;
        posted.letter.failure = std::move(failure);
      }
      advance_letters();
    } else if (first && !over()) {
      CollectiveTask task(*this, first->operation);
      const Outcome outcome = finish(task, std::min(deadline, first->deadline), failure);
      if (outcome != Outcome::kGaveUp) complete(*first, std::move(failure));
    }
    stop_driving();
  }
  return true;
}

void Communicator::stop_driving() {
  driven_.store(false, std::memory_order_seq_cst);
  perturb();
  if (busy()) hub_->wake();
}

std::shared_ptr<Posted> Communicator::head() {
  const std::lock_guard lock(mutex_);
  return queue_.empty() ? nullptr : queue_.front();
}

void Communicator::complete(Posted& posted, std::optional<Failure> failure) {
  if (is_letter(posted.letter.op.kind)) {
    mailing_.fetch_sub(1, std::memory_order_release);
  } else {
    if (failure) give_up(posted.operation);
    const std::lock_guard lock(mutex_);
    if (!queue_.empty() && queue_.front().get() == &posted) {
      queue_.pop_front();
      queued_.fetch_sub(1, std::memory_order_release);
    }
  }
  if (failure) posted.error = std::move(failure->message);
  perturb();
  posted.status.store(failure ? status_of(failure->kind) : LOCKSTEP_OK, std::memory_order_release);
  local::futex_wake_all(posted.status);
  if (posted.done != nullptr) posted.done(posted.done_context);
}

std::optional<Failure> Communicator::advance_once(Operation& operation, Progress& progress) {
  if (!operation.started()) {
    if (stopped()) return stopped_failure();
    operation.start(*circle_, ++sequence_);
  }
  try {
    progress = operation.advance(*circle_, workspace_);
  } catch (...) {
    progress = Progress::kBlocked;
    return after_exception();
  }
  if (progress == Progress::kDone || progress == Progress::kBlocked) return std::nullopt;
  return break_with(mismatch(operation, progress));
}

Communicator::Outcome Communicator::finish(Task& task, Deadline until, std::optional<Failure>& failure) {
  constexpr int kNobody = -2;
  int spins = kLooks, yields = yields_, leaver = kNobody;
  std::int64_t spin_ns = spin_ns_, spin_until = 0;  // since the last progress; 0: the clock was not read yet
  std::uint64_t mark = task.mark();
  local::Doorbell& door = circle_->doorbell(circle_->rank());
  const bool beside = task.beside_queue();
  bool armed = false;
  std::uint32_t ticket = 0;
  std::optional<base::SlowWait> slow;  // from the first sleep on
  const auto end = [&](Outcome outcome) {
    if (armed) local::retract(door);
    return outcome;
  };
  for (;;) {
    if (task.advance(failure)) return end(failure ? Outcome::kFailed : Outcome::kDone);
    if (mailing_.load(std::memory_order_relaxed) != 0) advance_letters();
    if (beside && queued_.load(std::memory_order_relaxed) != 0) advance_queue();
    if (mark != task.mark()) {
      mark = task.mark(), spins = kLooks, yields = yields_, leaver = kNobody;
      spin_ns = spin_ns_, spin_until = 0;
      if (until.expired()) return end(Outcome::kGaveUp);
    }
    // A peer that had to be woken answers later than a usual wait lasts. To sleep meanwhile would make it wake this rank
    // in turn, and so on: two ranks that put each other to sleep at every step.
    if (circle_->woke_someone()) spins = kLooks, spin_ns = spin_ns_ * kWakeFactor, spin_until = 0;
    if (stopped()) {
      failure = stopped_failure();
      return end(Outcome::kFailed);
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
      armed = true;  // announced: look once more before sleeping
      ticket = local::announce(door);
    } else if (has_left(task.peer()) && leaver != task.peer()) {
      leaver = task.peer();
    } else {
      const bool left = leaver == task.peer();
      failure = left ? task.left() : task.late();
      if (failure) return end(Outcome::kFailed);
      if (left) continue;  // it had done its part
      if (until.expired()) return end(Outcome::kGaveUp);
      if (!slow) slow.emplace(task.deadline());
      slow->say_if_due([&] { return task.waiting(); });
      Deadline next = std::min(until, slow->next());
      end_late_letters(next);
      if (beside) look_again();
      end_late_queue(next);
      local::sleep(door, ticket, next);
      local::retract(door);
      armed = false;
    }
  }
}

bool Communicator::advance_letters() {
  std::deque<std::shared_ptr<Posted>> fresh;
  {
    const std::lock_guard lock(mutex_);
    fresh.swap(new_letters_);
  }
  for (auto& posted : fresh) {
    letters_.push_back(posted);
    mailroom_.submit(posted->letter);
  }
  std::optional<Failure> failure;
  try {
    if (!stopped()) mailroom_.advance();
  } catch (...) {
    after_exception();
  }
  if (stopped()) {
    failure = stopped_failure();
    mailroom_.clear();
  }
  for (auto it = letters_.begin(); it != letters_.end();) {
    const std::shared_ptr<Posted> posted = *it;
    if (!posted->letter.over && !failure) {
      ++it;
      continue;
    }
    it = letters_.erase(it);
    complete(*posted, posted->letter.over ? posted->letter.failure : failure);
  }
  return !letters_.empty();
}

std::shared_ptr<Posted> Communicator::advance_queue() {
  while (auto posted = head()) {
    Progress progress{};
    auto failure = advance_once(posted->operation, progress);
    if (!failure && progress != Progress::kDone) {
      if (!stopped()) return posted;
      failure = stopped_failure();
    }
    complete(*posted, std::move(failure));
  }
  return nullptr;
}

// The last look before the worker sleeps; the doorbell is armed. Returns what it is stuck at.
std::shared_ptr<Posted> Communicator::look_again() {
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
    complete(*stuck, std::move(failure));
    stuck = advance_queue();
  }
  return nullptr;
}

Served::State Communicator::serve(bool last_look, Deadline& until) {
  if (!busy()) return State::kIdle;
  if (!try_drive()) return State::kElsewhere;
  bool stuck = advance_letters();
  if (last_look) {
    if (stuck) end_late_letters(until);
    stuck = !letters_.empty();
    stuck = look_again() != nullptr || stuck;
    end_late_queue(until);
  } else {
    stuck = advance_queue() != nullptr || stuck;
  }
  driven_.store(false, std::memory_order_seq_cst);
  return stuck ? State::kStuck : State::kIdle;
}

}  // namespace lockstep::comm::internal
