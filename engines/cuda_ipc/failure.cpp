// What ends operations early: deadlines, lost ranks, errors of the device, abort and leaving.
#include <algorithm>

#include "engines/cuda_ipc/communicator.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/engine.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/local/wake.h"

namespace lockstep::cuda_ipc {
namespace {

// A kernel that runs when the group breaks still writes. Its operation ends when it has ended, or after this: abort ends
// operations within 100 ms.
constexpr Milliseconds kInFlight{70};

}  // namespace

std::string Communicator::who(int rank) const {
  return base::cat("rank ", rank, " (pid ", pid(rank), ")");
}

// ---- what is late ----

void Communicator::check_slowly() {
  for (std::size_t i = 0; i < collectives_.size() && !page_->broken(); ++i)
    check_collective(*collectives_[i]);
  for (auto* list : {&sends_, &receives_, &deferred_}) {
    if (!page_->broken()) check_messages(*list);
  }
  if (!collectives_.empty()) check_device(*collectives_.front());
  if (!receives_.empty()) check_device(*receives_.front());
}

// A kernel that fails reports it to no one who does not ask, and its "done" never comes.
void Communicator::check_device(const Operation& operation) {
  if (operation.device == nullptr) return;
  const cuda::Driver& driver = operation.device->driver();
  const cuda::ContextScope scope(operation.device->context());
  const cuda::Result result = driver.stream_query(operation.device->stream());
  if (result != cuda::kSuccess && result != cuda::kNotReady)
    cuda::check(driver, result, "the device of this rank");
}

void Communicator::check_collective(const Operation& operation) {
  const std::uint64_t k = operation.number;
  const bool in_window = k <= completed_.load(std::memory_order_relaxed) + kWindow;
  for (int r = 0; in_window && r < size_; ++r) {
    // `left` first: a rank stores it after the last call it published.
    if (!has_left(r) || page_->call(r, k).number.load(std::memory_order_acquire) == k) continue;
    break_with({.kind = ErrorKind::kPeerLost,
                .message = base::cat(who(r), " left the group while rank ", rank_, " was in ",
                                     describe(operation.op)),
                .peer = LostPeer{r, pid(r), "left the group"}});
    return;
  }
  if (!operation.deadline.expired()) return;
  break_with({.kind = ErrorKind::kTimeout,
              .message = base::cat("rank ", rank_, " ran out of time in ", describe(operation.op), " #",
                                   operation.op.tag, ": it waits for ", awaited(operation))});
}

// Who has not done its part, as far as the page shows it.
std::string Communicator::awaited(const Operation& operation) {
  const std::uint64_t k = operation.number, front = collectives_.front()->number;
  if (k != front) return base::cat("the ", k - front, " before it");
  std::string names;
  const auto add = [&](int r, const char* what) {
    names += base::cat(names.empty() ? "" : ", ", who(r), ", ", what);
  };
  for (int r = 0; r < size_; ++r) {
    if (page_->call(r, k).number.load(std::memory_order_acquire) != k) {
      add(r, "which has not called it");
    } else if (page_->ready(r, k).load(std::memory_order_acquire) != k) {
      add(r, "whose stream has not reached it");
    }
  }
  if (!names.empty()) return names;
  if (page_->submitted(k).load(std::memory_order_acquire) != k)
    return base::cat(who(kLeader), ", which launches it");
  return base::cat("the device of ", who(kLeader));
}

// ---- ending ----

Failure Communicator::break_with(Failure failure) noexcept {
  failure.family = ErrorFamily::kBackend;
  page_->break_with(failure);
  progress_->wake();
  try {
    if (auto first = page_->failure()) return std::move(*first);
  } catch (...) {
    // The group is broken; the caller's own reason must do.
  }
  return failure;
}

// What this rank broke by leaving is a lost peer for the others only.
Failure Communicator::stop_reason() noexcept {
  try {
    auto first = page_->failure();
    const bool by_leaving = leaving_.load() && first && first->peer && first->peer->rank == rank_;
    if (first && !by_leaving) return std::move(*first);
    return {.kind = ErrorKind::kAborted,
            .message = "this rank has left the group",
            .family = ErrorFamily::kBackend};
  } catch (...) {
    return current_failure();
  }
}

// The device may be reading or writing its buffers now.
bool Communicator::in_flight(const Operation& operation) {
  const std::uint64_t k = operation.number;
  if (operation.op.kind == LOCKSTEP_RECV)
    return operation.launched &&
           ControlPage::number_in(page_->message_done(operation.source, operation.slot)) < k;
  if (operation.op.kind == LOCKSTEP_SEND) {
    const int to = operation.op.root;
    return !(operation.deferred && !operation.published) &&
           page_->message(rank_, operation.slot).state.load(std::memory_order_acquire) == Message::kTaken &&
           ControlPage::number_in(page_->message_done(rank_, operation.slot)) < k && !has_left(to) &&
           !family_->is_lost(ranks_[static_cast<std::size_t>(to)]);
  }
  if (operation.copied) {
    const cuda::ContextScope scope(operation.device->context());
    return operation.device->driver().event_query(operation.copied.get()) == cuda::kNotReady;
  }
  return page_->launching(k).load(std::memory_order_seq_cst) == k &&
         ControlPage::number_in(page_->done(k)) < k && !family_->is_lost(ranks_[kLeader]);
}

template <class List>
void Communicator::end_list(List& list, const Failure& reason) {
  List left;
  for (List all = std::move(list); !all.empty(); all.pop_front()) {
    const OperationPtr operation = all.front();
    const bool message = comm::is_point_to_point(operation->op.kind);
    if (message) withdraw(*operation);
    if (in_flight(*operation) && !give_up_.expired()) {
      left.push_back(operation);
    } else {
      complete(*operation, &reason);
    }
  }
  list = std::move(left);
}

// Broken, or leaving. What has completed on the device has completed; the rest ends with the reason.
bool Communicator::end_all() {
  const std::size_t before = collectives_.size() + sends_.size() + receives_.size() + deferred_.size();
  complete_collectives();
  serve_sends();
  if (closed_.load() && !collectives_.empty() && !page_->broken())
    break_with({.kind = ErrorKind::kPeerLost,
                .message = base::cat(who(rank_), " left the group in the middle of ",
                                     describe(collectives_.front()->op)),
                .peer = LostPeer{rank_, pid(rank_), "left the group"}});
  if (give_up_.is_never()) give_up_ = Deadline::after(kInFlight);
  const Failure reason = stop_reason();
  end_list(collectives_, reason);
  end_list(sends_, reason);
  end_list(receives_, reason);
  end_list(deferred_, reason);
  const std::size_t after = collectives_.size() + sends_.size() + receives_.size() + deferred_.size();
  if (after == 0 && closed_.load()) finish_leaving();
  return after != before;
}

void Communicator::finish_leaving() {
  {
    const base::MutexLock lock(mutex_);
    if (!posted_.empty()) return;
  }
  page_->rank(rank_).left.store(RankState::kLeft, std::memory_order_release);
  ended_.store(1, std::memory_order_release);
  local::futex_wake_all(ended_);
}

void Communicator::submitted(Operation& operation) {
  std::uint32_t posted = Operation::kPosted;
  if (operation.phase.compare_exchange_strong(posted, Operation::kSubmitted, std::memory_order_acq_rel))
    local::futex_wake_all(operation.phase);
}

// The callback may release the handle: nothing is used afterwards but what the caller of this holds.
void Communicator::complete(Operation& operation, const Failure* failure) noexcept {
  operation.status = failure == nullptr ? LOCKSTEP_OK : comm::status_of(failure->kind);
  try {
    if (failure != nullptr) operation.error = failure->message;
  } catch (...) {
    // Without the text.
  }
  const auto done = operation.op.done;
  void* const context = operation.op.done_context;
  operation.phase.store(Operation::kOver, std::memory_order_release);
  local::futex_wake_all(operation.phase);
  if (done != nullptr) done(context);
}

// ---- from outside ----

std::optional<Failure> Communicator::failure() {
  return page_->failure();
}

void Communicator::abort(const std::string& reason) {
  break_with(
      {.kind = ErrorKind::kAborted, .message = base::cat("rank ", rank_, " aborted the group: ", reason)});
}

// The cause before closed_: the progress thread, which sees the latter, tells the others that this rank has left, and the
// first reason stays.
void Communicator::leave(const char* cause) {
  if (leaving_.exchange(true)) return;
  if (cause != nullptr)
    break_with({.kind = ErrorKind::kPeerLost,
                .message = base::cat(who(rank_), " is gone: ", cause),
                .peer = LostPeer{rank_, pid(rank_), cause}});
  closed_.store(true);
  progress_->wake();
}

int Communicator::rank_of(int family_rank) {
  const auto found = std::ranges::find(ranks_, family_rank);
  return found == ranks_.end() ? -1 : static_cast<int>(found - ranks_.begin());
}

// A rank that left in order may end its process afterwards: that is no loss.
bool Communicator::needs(int family_rank) {
  const int rank = rank_of(family_rank);
  return rank >= 0 && rank != rank_ && !has_left(rank);
}

void Communicator::lost(int family_rank, const std::string& cause) {
  const int rank = rank_of(family_rank);
  break_with({.kind = ErrorKind::kPeerLost,
              .message = base::cat(who(rank), " is lost: ", cause),
              .peer = LostPeer{rank, pid(rank), cause}});
}

}  // namespace lockstep::cuda_ipc
