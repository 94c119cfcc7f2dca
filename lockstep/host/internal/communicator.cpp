#include "lockstep/host/internal/communicator.h"

#include <fmt/core.h>
#include <sched.h>

#include "lockstep/base/base.h"
#include "lockstep/engine/engine.h"
#include "lockstep/host/internal/describe.h"
#include "lockstep/host/internal/doorbell.h"
#include "lockstep/host/internal/ledger.h"

namespace lockstep::comm::internal {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

lockstep_op with_where(lockstep_op op, const std::string& where) {
  op.where = where.c_str();
  return op;
}

}  // namespace

Posted::Posted(const lockstep_op& op)
    : where(op.where != nullptr ? op.where : ""),
      operation(with_where(op, where)),
      done(op.done),
      done_context(op.done_context),
      deadline(Deadline::from_monotonic_ns(op.deadline_ns)) {}

Communicator::Communicator(const lockstep_comm_config& config)
    : name_(config.name != nullptr ? config.name : ""),
      host_(config.host),
      fabric_(Fabric::join(config)),
      workspace_(config.size) {
  // About 50 us of looking while every rank has a core; with more ranks than cores looking only delays the others.
  const bool cores_for_all = fabric_->size() <= available_cores();
  spins_ = cores_for_all ? 1500 : 30;
  yields_ = cores_for_all ? 20 : 200;
  watch_ = std::make_unique<Watch>(*fabric_, [this](int rank) { peer_lost(rank); });
}

Communicator::~Communicator() {
  if (!closed_.load()) leave(nullptr);
  wake_worker();
  worker_.join();
  watch_.reset();
  for (const auto& posted : queue_) {
    complete(*posted, Failure{.kind = ErrorKind::kAborted,
                              .message = "the group was destroyed",
                              .family = ErrorFamily::kBackend});
  }
}

std::optional<Failure> Communicator::run(const lockstep_op& op) {
  if (queued_.load(std::memory_order_acquire) == 0 && try_drive()) {
    // Nothing can get ahead of us any more: the worker and waiters need the token.
    if (queued_.load(std::memory_order_acquire) == 0) {
      Operation operation(op);
      if (is_uneven(op.kind)) operation.take_counts(fabric_->rank(), fabric_->size());
      std::optional<Failure> failure;
      finish(operation, Deadline::from_monotonic_ns(op.deadline_ns), failure);
      stop_driving();
      return failure;
    }
    stop_driving();
  }
  lockstep_op quiet = op;
  quiet.done = nullptr;
  const auto posted = post(quiet);
  wait(*posted, Deadline::never());
  const auto status = static_cast<lockstep_status>(posted->status.load(std::memory_order_acquire));
  if (status == LOCKSTEP_OK) return std::nullopt;
  return Failure{.kind = kind_of(status), .message = posted->error, .family = ErrorFamily::kBackend};
}

std::shared_ptr<Posted> Communicator::post(const lockstep_op& op) {
  auto posted = std::make_shared<Posted>(op);
  if (is_uneven(op.kind)) posted->operation.take_counts(fabric_->rank(), fabric_->size());
  {
    const std::lock_guard lock(mutex_);
    if (!worker_.joinable() && !closed_.load()) worker_ = Thread("ls-comm", [this] { work(); });
    queue_.push_back(posted);
    queued_.fetch_add(1, std::memory_order_seq_cst);
  }
  wake_worker();
  // After a leave the worker may have gone already.
  if (closed_.load() && try_drive()) {
    advance_queue();
    driven_.store(false, std::memory_order_seq_cst);
  }
  return posted;
}

bool Communicator::wait(Posted& posted, Deadline deadline) {
  const auto over = [&] { return posted.status.load(std::memory_order_acquire) != LOCKSTEP_PENDING; };
  while (!over()) {
    if (deadline.expired()) return false;
    if (!try_drive()) {
      futex_sleep(posted.status, LOCKSTEP_PENDING, deadline);
      continue;
    }
    if (const auto first = over() ? nullptr : advance_queue(); first && !over()) {
      std::optional<Failure> failure;
      const Outcome outcome = finish(first->operation, std::min(deadline, first->deadline), failure);
      if (outcome != Outcome::kGaveUp) complete(*first, std::move(failure));
    }
    stop_driving();
  }
  return true;
}

void Communicator::stop_driving() {
  driven_.store(false, std::memory_order_seq_cst);
  if (queued_.load(std::memory_order_seq_cst) != 0) wake_worker();
}

void Communicator::wake_worker() {
  attention_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(attention_);
  ring(fabric_->own().doorbell);
}

std::shared_ptr<Posted> Communicator::head() {
  const std::lock_guard lock(mutex_);
  return queue_.empty() ? nullptr : queue_.front();
}

void Communicator::complete(Posted& posted, std::optional<Failure> failure) {
  {
    const std::lock_guard lock(mutex_);
    if (!queue_.empty() && queue_.front().get() == &posted) {
      queue_.pop_front();
      queued_.fetch_sub(1, std::memory_order_release);
    }
  }
  if (failure) posted.error = std::move(failure->message);
  posted.status.store(failure ? status_of(failure->kind) : LOCKSTEP_OK, std::memory_order_release);
  futex_wake_all(posted.status);
  if (posted.done != nullptr) posted.done(posted.done_context);
}

std::optional<Failure> Communicator::advance_once(Operation& operation, Progress& progress) {
  if (!operation.started()) {
    if (stopped()) return stopped_failure();
    operation.start(*fabric_, ++sequence_);
  }
  progress = operation.advance(*fabric_, workspace_);
  if (progress == Progress::kMismatch) {
    const auto at = operation.sequence() % kHistory;
    return break_with(
        {.kind = ErrorKind::kUsage,
         .message = fmt::format("ranks called different operations: rank {} called {}, but rank {} called {}",
                                fabric_->rank(), describe_call(fabric_->own().history[at]), operation.peer(),
                                describe_call(fabric_->control(operation.peer()).history[at]))});
  }
  if (progress == Progress::kUneven) {
    return break_with(
        {.kind = ErrorKind::kUsage,
         .message = fmt::format("rank {} sends rank {} another number of elements than rank {} expects in {}",
                                operation.peer(), fabric_->rank(), fabric_->rank(), context(operation))});
  }
  if (progress == Progress::kBadPeer) {
    return break_with({.kind = ErrorKind::kInternal,
                       .message = fmt::format("rank {} named a buffer outside its arena", operation.peer())});
  }
  return std::nullopt;
}

Communicator::Outcome Communicator::finish(Operation& operation, Deadline until,
                                           std::optional<Failure>& failure) {
  int spins = spins_, yields = yields_, leaver = -1;
  std::uint64_t mark = operation.mark();
  Doorbell& door = fabric_->own().doorbell;
  bool armed = false;
  std::uint32_t ticket = 0;
  const auto end = [&](Outcome outcome) {
    if (armed) disarm(door);
    return outcome;
  };
  for (;;) {
    Progress progress{};
    failure = advance_once(operation, progress);
    if (failure) return end(Outcome::kFailed);
    if (progress == Progress::kDone) return end(Outcome::kDone);
    if (mark != operation.mark()) mark = operation.mark(), spins = spins_, yields = yields_, leaver = -1;
    if (stopped()) {
      failure = stopped_failure();
      return end(Outcome::kFailed);
    }
    if (spins > 0) {
      --spins;
      relax();
    } else if (yields > 0) {
      --yields;
      ::sched_yield();
    } else if (!armed) {
      armed = true;  // announced: look once more before sleeping
      ticket = arm(door);
    } else if (blocked_on_leaver(operation) && leaver != operation.peer()) {
      leaver = operation.peer();
    } else {
      if (leaver >= 0) failure = left_failure(operation);
      if (!failure) failure = reason_to_stop(operation);
      if (failure) return end(Outcome::kFailed);
      if (until.expired()) return end(Outcome::kGaveUp);
      sleep(door, ticket, until);
      disarm(door);
      armed = false;
    }
  }
}

bool Communicator::stopped() const {
  return fabric_->own().broken.load(std::memory_order_acquire) != 0 ||
         closed_.load(std::memory_order_relaxed);
}

Failure Communicator::stopped_failure() {
  if (auto first = first_failure(*fabric_)) return *first;
  return {.kind = ErrorKind::kAborted,
          .message = "this rank has left the group",
          .family = ErrorFamily::kBackend};
}

bool Communicator::blocked_on_leaver(const Operation& operation) {
  return fabric_->control(operation.peer()).left.load(std::memory_order_acquire) != 0;
}

Failure Communicator::left_failure(const Operation& operation) {
  const Control& other = fabric_->control(operation.peer());
  return break_with({.kind = ErrorKind::kPeerLost,
                     .message = fmt::format("rank {} (pid {}) left the group while rank {} was in {}",
                                            operation.peer(), other.pid, fabric_->rank(), context(operation)),
                     .peer = LostPeer{operation.peer(), other.pid, "left the group"}});
}

std::optional<Failure> Communicator::reason_to_stop(const Operation& operation) {
  if (stopped()) return stopped_failure();
  if (!Deadline::from_monotonic_ns(operation.call().deadline_ns).expired()) return std::nullopt;
  Control& other = fabric_->control(operation.peer());
  return break_with(
      {.kind = ErrorKind::kTimeout,
       .message = fmt::format("rank {} ran out of time in {}: it waits for rank {} (pid {}), which {}",
                              fabric_->rank(), context(operation), operation.peer(), other.pid,
                              describe_last(other))});
}

std::string Communicator::context(const Operation& operation) const {
  const char* where = operation.call().where;
  return fmt::format("{} #{}{}{}", describe_call(operation.fingerprint()), operation.sequence(),
                     where != nullptr && *where != '\0' ? " at " : "", where != nullptr ? where : "");
}

Failure Communicator::break_with(Failure failure) {
  failure.family = ErrorFamily::kBackend;
  break_group(*fabric_, failure);
  return first_failure(*fabric_).value_or(failure);
}

std::optional<Failure> Communicator::failure() {
  return first_failure(*fabric_);
}

void Communicator::abort(const std::string& reason) {
  break_with({.kind = ErrorKind::kAborted,
              .message = fmt::format("rank {} aborted the group: {}", fabric_->rank(), reason)});
  wake_worker();
}

void Communicator::leave(const char* cause) {
  if (closed_.exchange(true)) return;
  if (cause != nullptr) {
    break_with(
        {.kind = ErrorKind::kPeerLost,
         .message = fmt::format("rank {} (pid {}) is gone: {}", fabric_->rank(), fabric_->own().pid, cause),
         .peer = LostPeer{fabric_->rank(), fabric_->own().pid, cause}});
  }
  fabric_->own().left.store(1, std::memory_order_seq_cst);
  for (int r = 0; r < fabric_->size(); ++r) ring(fabric_->control(r).doorbell);
  wake_worker();
}

void Communicator::peer_lost(int rank) {
  const std::int64_t pid = fabric_->peer(rank).pid;
  const std::string cause = cause_of_loss(rank);
  break_with({.kind = ErrorKind::kPeerLost,
              .message = fmt::format("rank {} (pid {}) is lost: {}", rank, pid, cause),
              .peer = LostPeer{rank, pid, cause}});
  wake_worker();
}

// New kernels tell once the parent has reaped the process; the launcher and spawn publish what they saw. Both take a
// moment, and either may never come.
std::string Communicator::cause_of_loss(int rank) {
  const std::string key = fmt::format("/lockstep/exit/{}", rank);
  const Deadline patience = Deadline::after(Milliseconds(300));
  while (!patience.expired()) {
    if (auto cause = exit_cause(fabric_->peer(rank).pidfd.get())) return *cause;
    char words[128] = {};
    std::size_t length = 0;
    const Deadline slice = Deadline::after(Milliseconds(10));
    if (host_->kv_get(host_->context, key.c_str(), words, sizeof(words) - 1, &length, slice.monotonic_ns()) ==
        LOCKSTEP_OK) {
      return std::string(words, std::min(length, sizeof(words) - 1));
    }
    std::this_thread::sleep_until(slice.time_point());
  }
  return "gone, cause unknown";
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
    if (!failure && blocked_on_leaver(stuck->operation)) {
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

void Communicator::work() {
  Doorbell& door = fabric_->own().doorbell;
  for (;;) {
    const std::uint32_t seen = attention_.load(std::memory_order_seq_cst);
    if (queued_.load() == 0 || !try_drive()) {
      if (closed_.load() && queued_.load() == 0) return;
      futex_sleep(attention_, seen, Deadline::never());
      continue;
    }
    if (!advance_queue()) {
      driven_.store(false, std::memory_order_seq_cst);
      continue;
    }
    const std::uint32_t ticket = arm(door);
    const auto stuck = look_again();
    const Deadline until = stuck ? stuck->deadline : Deadline::never();
    driven_.store(false, std::memory_order_seq_cst);
    if (stuck && attention_.load() == seen) sleep(door, ticket, until);
    disarm(door);
  }
}

}  // namespace lockstep::comm::internal
