// What a communicator does when something breaks: which rank caused it, who is notified, and what the message
// says.
#include <fmt/core.h>

#include <algorithm>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/loss_note.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine.h"
#include "lockstep/host/internal/describe.h"
#include "lockstep/host/internal/failure_record.h"
#include "lockstep/host/internal/host_communicator.h"
#include "lockstep/host/internal/split.h"

namespace lockstep::comm::internal {

// After a failure of this rank alone (it has left) the group is broken too: the others must not access this
// rank's buffers for an operation that it has given up.
void HostCommunicator::give_up(Operation& operation) noexcept {
  if (operation.started() && members_->own().broken.load(std::memory_order_acquire) == 0) {
    const int me = members_->rank();
    try {
      break_with({.kind = ErrorKind::kPeerLost,
                  .message = fmt::format("rank {} (pid {}) left the group in the middle of {}", me,
                                         members_->pid(me), context(operation)),
                  .peer = LostPeer{me, members_->pid(me), "left the group"}});
    } catch (...) {
      break_with(base::current_failure());
    }
  }
  operation.await_buffers_free(*members_);
}

// A copy that finds its owner gone knows less than the death watch will report in a moment: which rank, and
// how it ended. Until then the operation is merely blocked. A rank that left in order is not watched, so it
// is reported here.
std::optional<Failure> HostCommunicator::after_exception() noexcept {
  Failure failure = base::current_failure();
  if (failure.kind == ErrorKind::kPeerLost && failure.peer && failure.peer->pid) {
    const std::int64_t pid = *failure.peer->pid;
    std::optional<int> leaver;
    for (int r = 0; r < members_->size(); ++r) {
      if (members_->pid(r) != pid) continue;
      if (!has_left(r)) return std::nullopt;
      leaver = r;
    }
    try {
      if (leaver) {
        failure.message =
            fmt::format("rank {} (pid {}) left the group and ended while rank {} still needed it", *leaver,
                        pid, members_->rank());
        failure.peer = LostPeer{*leaver, pid, "left the group"};
      }
    } catch (const std::bad_alloc&) {
      // The text that it has must do.
    }
  }
  return break_with(std::move(failure));
}

// The fingerprints differ, so both ranks have published their calls: acquiring the peer's arrival made its
// record readable here.
Failure HostCommunicator::mismatch(const Operation& operation, Progress progress) {
  const int me = members_->rank(), peer = operation.peer();
  const auto at = operation.sequence() % kHistory;
  if (progress == Progress::kBadPeer) {
    return {.kind = ErrorKind::kInternal,
            .message = fmt::format("rank {} named a buffer outside its arena", peer)};
  }
  if (progress == Progress::kUneven) {
    return {.kind = ErrorKind::kUsage,
            .message = fmt::format("rank {} sends rank {} another number of elements than it expects in {}",
                                   peer, operation.uneven_receiver(), context(operation))};
  }
  return {
      .kind = ErrorKind::kUsage,
      .message = fmt::format("ranks called different operations: rank {} called {}, but rank {} called {}",
                             me, describe_call(members_->own().history[at]), peer,
                             describe_call(members_->block(peer).history[at]))};
}

// acquire: with the store of `broken`, so that the record is readable. closed_ concerns this rank only;
// relaxed, a driver that misses it finds it in the next turn.
bool HostCommunicator::stopped() const {
  return members_->own().broken.load(std::memory_order_acquire) != 0 ||
         closed_.load(std::memory_order_relaxed);
}

Failure HostCommunicator::stopped_failure() noexcept {
  try {
    auto first = first_failure(*members_);
    // What this rank broke by leaving is a lost peer for the others only.
    const bool by_leaving = closed_.load() && first && first->peer && first->peer->rank == members_->rank();
    if (first && !by_leaving) return std::move(*first);
    return {.kind = ErrorKind::kAborted,
            .message = "this rank has left the group",
            .family = ErrorFamily::kBackend};
  } catch (...) {
    return base::current_failure();
  }
}

bool HostCommunicator::has_left(int peer) {
  if (peer >= 0) return members_->block(peer).left.load(std::memory_order_acquire) != 0;
  for (int r = 0; r < members_->size(); ++r) {
    if (r != members_->rank() && !has_left(r)) return false;
  }
  return members_->size() > 1;
}

// A collective cannot go on without a member, so this breaks the group on all ranks; a point-to-point
// operation fails alone if it can (late_p2p).
Failure HostCommunicator::left_failure(const Operation& operation) {
  const int peer = operation.peer();
  return break_with({.kind = ErrorKind::kPeerLost,
                     .message = fmt::format("rank {} (pid {}) left the group while rank {} was in {}", peer,
                                            members_->pid(peer), members_->rank(), context(operation)),
                     .peer = LostPeer{peer, members_->pid(peer), "left the group"}});
}

// A timeout breaks the group too: the others would reduce into the buffers of a rank that has returned to its
// caller.
std::optional<Failure> HostCommunicator::reason_to_stop(const Operation& operation) {
  if (stopped()) return stopped_failure();
  if (!Deadline::from_monotonic_ns(operation.call().deadline_ns).expired()) return std::nullopt;
  return break_with({.kind = ErrorKind::kTimeout,
                     .message = fmt::format("rank {} ran out of time in {}: it waits for {}",
                                            members_->rank(), context(operation), waited_for(operation))});
}

// Every rank that has not entered the operation; the one it is blocked on when all have.
std::string HostCommunicator::waited_for(const Operation& operation) {
  constexpr int kMostNamed = 8;
  std::string text;
  int n_missing = 0;
  const auto add = [&](int rank) {
    if (++n_missing > kMostNamed) return;
    text += fmt::format("{}rank {} (pid {}), which {}", text.empty() ? "" : "; and for ", rank,
                        members_->pid(rank), describe_last(members_->block(rank)));
  };
  for (int r = 0; r < members_->size(); ++r) {
    if (r != members_->rank() && !operation.entered_by(*members_, r)) add(r);
  }
  if (n_missing == 0) add(operation.peer());
  if (n_missing > kMostNamed) text += fmt::format("; and for {} more", n_missing - kMostNamed);
  return text;
}

std::string HostCommunicator::waiting_in(const Operation& operation) {
  return fmt::format("group \"{}\": rank {} waits in {} for {}", name_, members_->rank(), context(operation),
                     waited_for(operation));
}

std::string HostCommunicator::waiting_in(const P2pOperation& p2p) {
  const std::string whom = p2p.peer < 0
                               ? "any rank"
                               : fmt::format("rank {} (pid {}), which {}", p2p.peer, members_->pid(p2p.peer),
                                             describe_last(members_->block(p2p.peer)));
  return fmt::format("group \"{}\": rank {} waits in {} for {}", name_, members_->rank(), context(p2p), whom);
}

std::unique_ptr<CommMembers> HostCommunicator::make_child(const lockstep_comm_config& config,
                                                          const std::string& key) {
  try {
    return split({.service = *service_, .parent = *members_, .config = config, .key = key});
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout || !members_are_ahead(config)) throw;
    Failure failure = error.failure();
    failure.message += fmt::format(
        ", of group \"{}\", which this rank has not entered: all ranks must make groups and call collectives "
        "in one "
        "order",
        name_);
    base::raise(std::move(failure));
  }
}

// Needs the blocks of this communicator only, however the child's members meet.
// A hint for a message, not a proof: sequence numbers may grow while they are read.
bool HostCommunicator::members_are_ahead(const lockstep_comm_config& config) {
  const auto last_of = [&](int r) {
    const auto& arrivals = members_->block(r).arrivals;
    return std::max(arrivals[0].sequence.load(std::memory_order_acquire),
                    arrivals[1].sequence.load(std::memory_order_acquire)) >>
           1;
  };
  return std::any_of(config.parent_ranks, config.parent_ranks + config.size,
                     [&](int r) { return last_of(r) > last_of(members_->rank()); });
}

// Ends a point-to-point operation whose deadline has passed or whose peer has left. One that no peer has
// matched is withdrawn and fails alone; one whose bytes are being moved cannot be withdrawn, and breaks the
// group.
std::optional<Failure> HostCommunicator::late_p2p(P2pOperation& p2p, Deadline deadline) {
  if (stopped()) return stopped_failure();
  const bool left = has_left(p2p.peer);
  if (!left && !deadline.expired()) return std::nullopt;
  if (left) {  // it may have done its part just before it left
    try {
      matcher_.advance();
    } catch (...) {
      return after_exception();
    }
    if (p2p.over) return std::nullopt;
  }
  const std::string whom = p2p.peer < 0 ? left ? "every other rank" : "any rank"
                                        : fmt::format("rank {} (pid {})", p2p.peer, members_->pid(p2p.peer));
  Failure failure{.kind = left ? ErrorKind::kPeerLost : ErrorKind::kTimeout, .family = ErrorFamily::kBackend};
  if (left) {
    failure.message =
        fmt::format("{} left the group while rank {} was in {}", whom, members_->rank(), context(p2p));
    failure.peer = LostPeer{.cause = "left the group"};
    if (p2p.peer >= 0) failure.peer = LostPeer{p2p.peer, members_->pid(p2p.peer), "left the group"};
  } else {
    failure.message =
        fmt::format("rank {} ran out of time in {}: it waits for {}{}", members_->rank(), context(p2p), whom,
                    p2p.peer < 0 ? "" : ", which " + describe_last(members_->block(p2p.peer)));
  }
  if (matcher_.withdraw(p2p)) {
    p2p.failure = failure;  // before `over`, which without a failure is success: this copy may find no memory
    p2p.over = true;
    return failure;
  }
  return break_with(std::move(failure));
}

// late_p2p() only marks operations as over; advance_p2p() removes and completes them, outside this loop,
// since a callback may change the list.
void HostCommunicator::end_late_p2p(Deadline& until) {
  for (const auto& posted : p2p_operations_) {
    if (posted->p2p.over) continue;
    if (!late_p2p(posted->p2p, posted->deadline)) until = std::min(until, posted->deadline);
  }
  advance_p2p();
}

// An operation that waits behind others has a deadline too. It cannot be removed alone: the ranks' queues
// would differ.
void HostCommunicator::end_late_queue(Deadline& until) {
  std::optional<Failure> late;
  {
    const base::MutexLock lock(mutex_);
    for (const auto& posted : queue_) {
      until = std::min(until, posted->deadline);
      if (late || !posted->deadline.expired() || posted->operation.started()) continue;
      late =
          Failure{.kind = ErrorKind::kTimeout,
                  .message = fmt::format("rank {} ran out of time in {}, which waits for the ones before it",
                                         members_->rank(), context(posted->operation))};
    }
  }
  if (late) break_with(std::move(*late));
}

std::string HostCommunicator::context(const Operation& operation) const {
  const char* where = operation.call().where;
  const std::string number = operation.started() ? fmt::format(" #{}", operation.number()) : "";
  return fmt::format("{}{}{}{}", describe_call(operation.fingerprint()), number,
                     where != nullptr && *where != '\0' ? " at " : "", where != nullptr ? where : "");
}

std::string HostCommunicator::context(const P2pOperation& p2p) const {
  const char* where = p2p.op.where;
  return fmt::format("{}({} bytes, tag {}){}{}", p2p.is_send() ? "send" : "recv", p2p.n_bytes, p2p.op.tag,
                     where != nullptr && *where != '\0' ? " at " : "", where != nullptr ? where : "");
}

// The record decides what is reported, also to this caller: when two ranks fail at once, all of them name the
// same first cause.
Failure HostCommunicator::break_with(Failure failure) noexcept {
  failure.family = ErrorFamily::kBackend;
  break_group(*members_, failure);
  try {
    if (auto first = first_failure(*members_)) return std::move(*first);
  } catch (const std::bad_alloc&) {
    // The group is broken; this caller gets its own reason.
  }
  return failure;
}

std::optional<Failure> HostCommunicator::failure() {
  return first_failure(*members_);
}

// break_with() rings every rank, this one included, but only if it sleeps announced; wake() also reaches an
// idle worker.
void HostCommunicator::abort(const std::string& reason) {
  break_with({.kind = ErrorKind::kAborted,
              .message = fmt::format("rank {} aborted the group: {}", members_->rank(), reason)});
  service_->wake();
}

// With a cause, `left` is stored after `broken`: whoever sees that this rank has left finds the cause
// recorded.
void HostCommunicator::leave(const char* cause) {
  if (closed_.exchange(true)) return;
  const std::int64_t pid = members_->pid(members_->rank());
  if (cause != nullptr) {
    break_with({.kind = ErrorKind::kPeerLost,
                .message = fmt::format("rank {} (pid {}) is gone: {}", members_->rank(), pid, cause),
                .peer = LostPeer{members_->rank(), pid, cause}});
  }
  members_->own().left.store(1, std::memory_order_seq_cst);
  members_->ring_others();
  service_->wake();
}

// A rank that left in order may end its process afterwards: that is not a loss.
bool HostCommunicator::needs(int host_rank) {
  const int rank = members_->rank_of(host_rank);
  return rank >= 0 && !has_left(rank);
}

void HostCommunicator::lost(int host_rank, const std::string& cause) {
  const int rank = members_->rank_of(host_rank);
  const std::int64_t pid = members_->pid(rank);
  break_with({.kind = ErrorKind::kPeerLost,
              .message = fmt::format("rank {} (pid {}) is lost: {}", rank, pid, cause),
              .peer = LostPeer{rank, pid, cause}});
  service_->wake();
}

// Recent kernels report how a process ended once its parent has reaped it; the launcher and spawn publish
// what they saw. Both take a moment. Where nobody publishes, only the parent is waited for, and briefly: it
// may never reap. Blocks for 300 ms at most.
std::string HostCommunicator::cause_of_loss(int host_rank) {
  const int rank = members_->rank_of(host_rank);
  const std::string key = fmt::format("/lockstep/exit/{}", rank);
  Deadline patience = Deadline::after(Milliseconds(300));
  bool published = true;
  while (!patience.expired()) {
    if (const auto cause = members_->peer(rank).process.exit_cause()) {
      const std::string error = base::loss_noted_by(static_cast<pid_t>(members_->pid(rank)));
      return error.empty() ? *cause : fmt::format("{}; its last error: {}", *cause, error);
    }
    const Deadline slice = Deadline::after(Milliseconds(published ? 10 : 1));
    if (published) {
      char text[sizeof(FailureRecord::cause)] = {};
      std::size_t length = 0;
      const auto status =
          host_->kv_get(host_->context, key.c_str(), text, sizeof(text) - 1, &length, slice.monotonic_ns());
      if (status == LOCKSTEP_OK) return std::string(text, std::min(length, sizeof(text) - 1));
      published = status != LOCKSTEP_UNSUPPORTED;
      if (!published) patience = Deadline::after(Milliseconds(5));
    }
    std::this_thread::sleep_until(slice.time_point());
  }
  return "gone, cause unknown";
}

}  // namespace lockstep::comm::internal
