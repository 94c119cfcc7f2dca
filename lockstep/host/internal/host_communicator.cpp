#include "lockstep/host/internal/host_communicator.h"

#include <bit>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine.h"
#include "lockstep/host/internal/perturb.h"
#include "lockstep/host/internal/split.h"
#include "lockstep/host/kernels.h"
#include "lockstep/local/wake.h"

namespace lockstep::comm::internal {
namespace {

lockstep_op with_where(lockstep_op op, const std::string& where) {
  op.where = where.c_str();
  return op;
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
  try {
    if (!own.empty()) {
      submit(std::move(own));
      advance_p2p_operations();
    }
  } catch (...) {
    stop_driving();  // what is left is the worker's
    return false;
  }
  driven_.store(false, std::memory_order_seq_cst);
  return !busy();
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
