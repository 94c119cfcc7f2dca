// The progress thread: see communicator.h.
#include <algorithm>
#include <chrono>

#include "engines/nccl/communicator.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {
namespace {

using base::cat;

constexpr std::int64_t kShortPauseNs = 10'000;
// While messages are matched or somebody may wait on the host; a device's own order does not need this thread.
constexpr std::int64_t kLongPauseNs = 200'000;
constexpr std::int64_t kCheckNs = 2'000'000;    // deadlines, pages of the ranks of this host
constexpr std::int64_t kSlowNs = 50'000'000;    // requests to the store
constexpr std::int64_t kLingerNs = 50'000'000;  // how long a thread without work stays
constexpr std::int64_t kRemoteMessagesNs = 1'000'000;

std::int64_t now_ns() {
  return Deadline::now().monotonic_ns();
}

}  // namespace

void Communicator::kick() {
  const base::MutexLock lock(mutex_);
  ensure_thread();
  kicked_ = true;
  changed_.notify_all();
}

// A thread that has returned is joined by the assignment, at once: serving_ is the last it touches.
void Communicator::ensure_thread() {
  if (serving_ || closed_) return;
  serving_ = true;
  idle_since_ns_ = 0;
  try {
    thread_ = base::Thread("ls-nccl", [this] { serve(); });
  } catch (...) {
    serving_ = false;
    base::raise(ErrorKind::kResource, "no thread can be started for NCCL's progress", ErrorFamily::kBackend);
  }
}

void Communicator::serve() {
  // A capture of the program's in another thread must not make this thread's calls fail.
  const cuda::RelaxedCaptureScope scope(driver_);
  bool moved = true;
  do {
    try {
      moved = step();
    } catch (...) {
      break_with(explain());
    }
  } while (rest(moved));
}

bool Communicator::step() {
  if (stopped_) {
    wind_down();
    return false;
  }
  bool moved = false;
  if (Gpu* const gpu = gpu_now_.load(std::memory_order_acquire)) {
    const bool slow = now_ns() >= next_slow_ns_;
    if (slow) next_slow_ns_ = now_ns() + kRemoteMessagesNs;
    moved = step_messages(*gpu, slow);
    moved = pump_lanes(*gpu) || moved;
  }
  check_times();
  return moved;
}

bool Communicator::step_messages(Gpu& gpu, bool slow) {
  std::vector<OperationPtr> posted;
  {
    const base::MutexLock lock(mutex_);
    posted.swap(posted_messages_);
  }
  if (posted.empty() && !messages_.waiting()) return false;
  messages_.add(std::move(posted));
  const auto issue = messages_.step(slow);
  for (std::size_t i = 0; i < issue.size(); ++i) {
    const bool pair = i + 1 < issue.size() && issue[i + 1]->partner == issue[i];
    queue_message(gpu, issue[i], pair);
  }
  return !issue.empty();
}

// pair: a send to itself, which the receive after it copies; both are over together.
void Communicator::queue_message(Gpu& gpu, const OperationPtr& operation, bool pair) {
  const bool sends = operation->op.kind == LOCKSTEP_SEND;
  const int sender = sends ? rank() : operation->peer, receiver = sends ? operation->peer : rank();
  auto& lane = gpu.messages[{sender, receiver}];
  if (!lane && sender == receiver) {
    lane = std::make_unique<Lane>(gpu.context, "self", std::vector<int>{rank()});
  } else if (!lane) {
    lane = std::make_unique<Lane>(gpu.context, cat("message/", sender, '-', receiver),
                                  std::vector<int>{sender, receiver});
  }
  if (pair) operation->op.flags |= LOCKSTEP_OP_MORE_FOLLOW;
  lane->queue(operation);
}

bool Communicator::pump_lanes(Gpu& gpu) {
  std::vector<OperationPtr> completed;
  const auto deliver = [&] {
    for (const OperationPtr& each : completed) complete(each, std::nullopt);
  };
  bool moved = false;
  try {
    moved = gpu.collectives.pump(completed);
    for (const auto& [ranks, lane] : gpu.messages) moved = lane->pump(completed) || moved;
  } catch (...) {
    deliver();
    throw;
  }
  deliver();
  return moved;
}

// The status is set under the operation's mutex, which wait() holds; `done` runs after it, under no lock.
void Communicator::complete(const OperationPtr& operation, const std::optional<Failure>& failure) {
  {
    const base::MutexLock lock(mutex_);
    pending_.erase(operation->place);
    if (!failure && !comm::is_point_to_point(operation->op.kind)) ++completed_;
  }
  // A copy: the operation may be released as soon as it is over.
  const auto done = operation->op.done;
  void* const context = operation->op.done_context;
  {
    const base::MutexLock lock(operation->mutex);
    if (failure) operation->error = failure->message;
    operation->status = failure
                            ? static_cast<lockstep_status>(static_cast<int>(failure->kind) + LOCKSTEP_USAGE)
                            : LOCKSTEP_OK;
    operation->stage = Operation::Stage::kOver;
    operation->changed.notify_all();
  }
  if (done != nullptr) done(context);
}

// ---- what can go wrong

void Communicator::check_times() {
  const std::int64_t now = now_ns();
  if (now < next_check_ns_) return;
  next_check_ns_ = now + kCheckNs;
  const bool slow = now >= next_store_ns_;
  if (slow) next_store_ns_ = now + kSlowNs;
  check_peers(slow);
  OperationPtr late;
  {
    const base::MutexLock lock(mutex_);
    const auto found =
        std::ranges::find_if(pending_, [&](const OperationPtr& each) { return each->op.deadline_ns <= now; });
    if (found != pending_.end()) late = *found;
  }
  if (!late) return;
  break_with({.kind = ErrorKind::kTimeout,
              .message = cat("rank ", rank(), " ran out of time in ", text_of(*late), ": ", waits_for(*late)),
              .family = ErrorFamily::kBackend,
              .peer = {}});
}

void Communicator::check_peers(bool slow) {
  std::optional<Failure> news;
  {
    const base::MutexLock lock(news_mutex_);
    news = peers_.news(slow);
  }
  if (news) return break_with(std::move(*news));
  check_left();
}

// A rank that left in order completes nothing any more.
void Communicator::check_left() {
  if (auto failure = messages_.unanswerable()) return break_with(std::move(*failure));
  OperationPtr last;
  {
    const base::MutexLock lock(mutex_);
    const auto found = std::find_if(pending_.rbegin(), pending_.rend(), [](const OperationPtr& each) {
      return !comm::is_point_to_point(each->op.kind);
    });
    if (found != pending_.rend()) last = *found;
  }
  if (!last) return;
  for (int r = 0; r < size(); ++r) {
    if (r == rank() || peers_.left(r).value_or(last->sequence) >= last->sequence) continue;
    return break_with({.kind = ErrorKind::kPeerLost,
                       .message = cat("rank ", rank(), " is in ", text_of(*last), ", but ", peers_.who(r),
                                      " has left the group"),
                       .family = ErrorFamily::kBackend,
                       .peer = LostPeer{.rank = r, .pid = peers_.pid(r), .cause = "left the group"}});
  }
}

std::string Communicator::waits_for(const Operation& operation) const {
  if (comm::is_point_to_point(operation.op.kind)) {
    if (operation.op.root < 0) return "it waits for any rank";
    return cat("it waits for ", peers_.who(operation.op.root));
  }
  const std::string behind = peers_.behind(operation.sequence);
  if (!behind.empty()) return cat("it waits for ", behind);
  return "all ranks of this host have called it; it waits for NCCL";
}

// ---- when to sleep

bool Communicator::rest(bool moved) {
  base::MutexLock lock(mutex_);
  const std::int64_t now = now_ns();
  const bool connecting = gpu_ && !stopped_ && gpu_->collectives.connecting();
  const bool busy = !pending_.empty() || connecting || captured_ || (leaving_ && gpu_ != nullptr && !closed_);
  if (busy || idle_since_ns_ == 0) idle_since_ns_ = now;
  if ((!busy && now - idle_since_ns_ >= kLingerNs) || closed_) {
    serving_ = false;
    changed_.notify_all();
    return false;
  }
  // An idle thread wakes up to see what run has issued without a word to it.
  if (moved || kicked_) pause_ns_ = kShortPauseNs;
  const bool quiet = pending_.empty() && !connecting;
  const std::int64_t pause = quiet ? kCheckNs : pause_ns_;
  pause_ns_ = std::min(pause_ns_ * 2, kLongPauseNs);
  if (!kicked_)
    changed_.wait_for(mutex_, std::chrono::nanoseconds(pause),
                      [&]() LOCKSTEP_REQUIRES(mutex_) { return kicked_; });
  kicked_ = false;
  return true;
}

}  // namespace lockstep::nccl_plugin
