// What a communicator does when something breaks: who is to blame, who must hear of it, and in which words.
#include <fmt/core.h>

#include <algorithm>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/loss_note.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine.h"
#include "lockstep/host/internal/communicator.h"
#include "lockstep/host/internal/describe.h"
#include "lockstep/host/internal/ledger.h"
#include "lockstep/host/internal/split.h"

namespace lockstep::comm::internal {

// After a failure of this rank alone (it has left) the others must not begin what it gave up: their buffers are theirs.
void Communicator::give_up(Operation& operation) {
  if (operation.started() && circle_->own().broken.load(std::memory_order_acquire) == 0) {
    const int me = circle_->rank();
    break_with({.kind = ErrorKind::kPeerLost,
                .message = fmt::format("rank {} (pid {}) left the group in the middle of {}", me,
                                       circle_->pid(me), context(operation)),
                .peer = LostPeer{me, circle_->pid(me), "left the group"}});
  }
  operation.retreat(*circle_);
}

// A copy that found its owner gone says less than the watch will in a moment: who, and how it ended. Until then the
// operation is merely stuck. But nobody watches over a rank that left in order.
std::optional<Failure> Communicator::after_exception() {
  Failure failure = base::current_failure();
  if (failure.kind == ErrorKind::kPeerLost && failure.peer) {
    const std::int64_t pid = failure.peer->pid;
    int leaver = -1;
    for (int r = 0; r < circle_->size(); ++r) {
      if (circle_->pid(r) != pid) continue;
      if (!has_left(r)) return std::nullopt;
      leaver = r;
    }
    failure.message = fmt::format("rank {} (pid {}) left the group and ended while rank {} still needed it",
                                  leaver, pid, circle_->rank());
    failure.peer = LostPeer{leaver, pid, "left the group"};
  }
  return break_with(std::move(failure));
}

Failure Communicator::mismatch(const Operation& operation, Progress progress) {
  const int me = circle_->rank(), peer = operation.peer();
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
                             me, describe_call(circle_->own().history[at]), peer,
                             describe_call(circle_->board(peer).history[at]))};
}

bool Communicator::stopped() const {
  return circle_->own().broken.load(std::memory_order_acquire) != 0 ||
         closed_.load(std::memory_order_relaxed);
}

Failure Communicator::stopped_failure() {
  auto first = first_failure(*circle_);
  // What this rank broke by leaving is a lost peer to the others only.
  const bool by_leaving = closed_.load() && first && first->peer && first->peer->rank == circle_->rank();
  if (first && !by_leaving) return *first;
  return {.kind = ErrorKind::kAborted,
          .message = "this rank has left the group",
          .family = ErrorFamily::kBackend};
}

bool Communicator::has_left(int peer) {
  if (peer >= 0) return circle_->board(peer).left.load(std::memory_order_acquire) != 0;
  for (int r = 0; r < circle_->size(); ++r) {
    if (r != circle_->rank() && !has_left(r)) return false;
  }
  return circle_->size() > 1;
}

Failure Communicator::left_failure(const Operation& operation) {
  const int peer = operation.peer();
  return break_with({.kind = ErrorKind::kPeerLost,
                     .message = fmt::format("rank {} (pid {}) left the group while rank {} was in {}", peer,
                                            circle_->pid(peer), circle_->rank(), context(operation)),
                     .peer = LostPeer{peer, circle_->pid(peer), "left the group"}});
}

std::optional<Failure> Communicator::reason_to_stop(const Operation& operation) {
  if (stopped()) return stopped_failure();
  if (!Deadline::from_monotonic_ns(operation.call().deadline_ns).expired()) return std::nullopt;
  return break_with({.kind = ErrorKind::kTimeout,
                     .message = fmt::format("rank {} ran out of time in {}: it waits for {}", circle_->rank(),
                                            context(operation), waited_for(operation))});
}

// Every rank that has not entered the operation; the one it is blocked on when all have.
std::string Communicator::waited_for(const Operation& operation) {
  constexpr int kMostNamed = 8;
  std::string words;
  int n_missing = 0;
  const auto add = [&](int rank) {
    if (++n_missing > kMostNamed) return;
    words += fmt::format("{}rank {} (pid {}), which {}", words.empty() ? "" : "; and for ", rank,
                         circle_->pid(rank), describe_last(circle_->board(rank)));
  };
  for (int r = 0; r < circle_->size(); ++r) {
    if (r != circle_->rank() && !operation.entered_by(*circle_, r)) add(r);
  }
  if (n_missing == 0) add(operation.peer());
  if (n_missing > kMostNamed) words += fmt::format("; and for {} more", n_missing - kMostNamed);
  return words;
}

std::string Communicator::waiting_in(const Operation& operation) {
  return fmt::format("group \"{}\": rank {} waits in {} for {}", name_, circle_->rank(), context(operation),
                     waited_for(operation));
}

std::string Communicator::waiting_in(const Letter& letter) {
  const std::string whom =
      letter.peer < 0 ? "any rank"
                      : fmt::format("rank {} (pid {}), which {}", letter.peer, circle_->pid(letter.peer),
                                    describe_last(circle_->board(letter.peer)));
  return fmt::format("group \"{}\": rank {} waits in {} for {}", name_, circle_->rank(), context(letter),
                     whom);
}

std::unique_ptr<Circle> Communicator::make_child(const lockstep_comm_config& config, const std::string& key) {
  try {
    return split({.hub = *hub_, .parent = *circle_, .config = config, .key = key});
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

// Needs the boards of this communicator only, whatever way the child's members meet.
bool Communicator::members_are_ahead(const lockstep_comm_config& config) {
  const auto last_of = [&](int r) {
    const auto& arrivals = circle_->board(r).arrivals;
    return std::max(arrivals[0].sequence.load(std::memory_order_acquire),
                    arrivals[1].sequence.load(std::memory_order_acquire)) >>
           1;
  };
  return std::any_of(config.parent_ranks, config.parent_ranks + config.size,
                     [&](int r) { return last_of(r) > last_of(circle_->rank()); });
}

// Ends a letter whose deadline has passed or whose peer has left. One that nobody met is taken back and fails alone; one
// whose bytes are on their way cannot be, and breaks the group.
std::optional<Failure> Communicator::late_letter(Letter& letter, Deadline deadline) {
  if (stopped()) return stopped_failure();
  const bool left = has_left(letter.peer);
  if (!left && !deadline.expired()) return std::nullopt;
  if (left) {  // it may have done its part just before
    try {
      mailroom_.advance();
    } catch (...) {
      return after_exception();
    }
    if (letter.over) return std::nullopt;
  }
  const std::string whom = letter.peer < 0
                               ? left ? "every other rank" : "any rank"
                               : fmt::format("rank {} (pid {})", letter.peer, circle_->pid(letter.peer));
  Failure failure{.kind = left ? ErrorKind::kPeerLost : ErrorKind::kTimeout, .family = ErrorFamily::kBackend};
  if (left) {
    failure.message =
        fmt::format("{} left the group while rank {} was in {}", whom, circle_->rank(), context(letter));
    failure.peer = LostPeer{letter.peer, letter.peer < 0 ? -1 : circle_->pid(letter.peer), "left the group"};
  } else {
    failure.message =
        fmt::format("rank {} ran out of time in {}: it waits for {}{}", circle_->rank(), context(letter),
                    whom, letter.peer < 0 ? "" : ", which " + describe_last(circle_->board(letter.peer)));
  }
  if (mailroom_.withdraw(letter)) {
    letter.over = true;
    letter.failure = failure;
    return failure;
  }
  return break_with(std::move(failure));
}

void Communicator::end_late_letters(Deadline& until) {
  for (const auto& posted : letters_) {
    if (posted->letter.over) continue;
    if (!late_letter(posted->letter, posted->deadline)) until = std::min(until, posted->deadline);
  }
  advance_letters();
}

// One that waits behind others has a deadline too; to take it out of its turn would part the ranks.
void Communicator::end_late_queue(Deadline& until) {
  std::optional<Failure> late;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& posted : queue_) {
      until = std::min(until, posted->deadline);
      if (late || !posted->deadline.expired() || posted->operation.started()) continue;
      late =
          Failure{.kind = ErrorKind::kTimeout,
                  .message = fmt::format("rank {} ran out of time in {}, which waits for the ones before it",
                                         circle_->rank(), context(posted->operation))};
    }
  }
  if (late) break_with(std::move(*late));
}

std::string Communicator::context(const Operation& operation) const {
  const char* where = operation.call().where;
  const std::string number = operation.started() ? fmt::format(" #{}", operation.number()) : "";
  return fmt::format("{}{}{}{}", describe_call(operation.fingerprint()), number,
                     where != nullptr && *where != '\0' ? " at " : "", where != nullptr ? where : "");
}

std::string Communicator::context(const Letter& letter) const {
  const char* where = letter.op.where;
  return fmt::format("{}({} bytes, tag {}){}{}", letter.is_send() ? "send" : "recv", letter.n_bytes,
                     letter.op.tag, where != nullptr && *where != '\0' ? " at " : "",
                     where != nullptr ? where : "");
}

Failure Communicator::break_with(Failure failure) {
  failure.family = ErrorFamily::kBackend;
  break_group(*circle_, failure);
  return first_failure(*circle_).value_or(failure);
}

std::optional<Failure> Communicator::failure() {
  return first_failure(*circle_);
}

void Communicator::abort(const std::string& reason) {
  break_with({.kind = ErrorKind::kAborted,
              .message = fmt::format("rank {} aborted the group: {}", circle_->rank(), reason)});
  hub_->wake();
}

void Communicator::leave(const char* cause) {
  if (closed_.exchange(true)) return;
  const std::int64_t pid = circle_->pid(circle_->rank());
  if (cause != nullptr) {
    break_with({.kind = ErrorKind::kPeerLost,
                .message = fmt::format("rank {} (pid {}) is gone: {}", circle_->rank(), pid, cause),
                .peer = LostPeer{circle_->rank(), pid, cause}});
  }
  circle_->own().left.store(1, std::memory_order_seq_cst);
  circle_->ring_others();
  hub_->wake();
}

bool Communicator::needs(int fabric_rank) {
  const int rank = circle_->rank_of(fabric_rank);
  return rank >= 0 && !has_left(rank);
}

void Communicator::lost(int fabric_rank, const std::string& cause) {
  const int rank = circle_->rank_of(fabric_rank);
  const std::int64_t pid = circle_->pid(rank);
  break_with({.kind = ErrorKind::kPeerLost,
              .message = fmt::format("rank {} (pid {}) is lost: {}", rank, pid, cause),
              .peer = LostPeer{rank, pid, cause}});
  hub_->wake();
}

// New kernels tell once the parent has reaped the process; the launcher and spawn publish what they saw. Both take a
// moment. Where nobody publishes, only the parent is waited for, and briefly: it may be a program that never reaps.
std::string Communicator::cause_of_loss(int fabric_rank) {
  const int rank = circle_->rank_of(fabric_rank);
  const std::string key = fmt::format("/lockstep/exit/{}", rank);
  Deadline patience = Deadline::after(Milliseconds(300));
  bool published = true;
  while (!patience.expired()) {
    if (const auto cause = circle_->peer(rank).process.exit_cause()) {
      const std::string error = base::loss_noted_by(static_cast<pid_t>(circle_->pid(rank)));
      return error.empty() ? *cause : fmt::format("{}; its last error: {}", *cause, error);
    }
    const Deadline slice = Deadline::after(Milliseconds(published ? 10 : 1));
    if (published) {
      char words[sizeof(Ledger::cause)] = {};
      std::size_t length = 0;
      const auto status =
          host_->kv_get(host_->context, key.c_str(), words, sizeof(words) - 1, &length, slice.monotonic_ns());
      if (status == LOCKSTEP_OK) return std::string(words, std::min(length, sizeof(words) - 1));
      published = status != LOCKSTEP_UNSUPPORTED;
      if (!published) patience = Deadline::after(Milliseconds(5));
    }
    std::this_thread::sleep_until(slice.time_point());
  }
  return "gone, cause unknown";
}

}  // namespace lockstep::comm::internal
