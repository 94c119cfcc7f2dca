#include "engines/nccl/lane.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {

using base::cat;

Lane::Lane(const LaneContext& context, std::string name, std::vector<int> ranks)
    : context_(context),
      name_(std::move(name)),
      ranks_(std::move(ranks)),
      own_(static_cast<int>(std::ranges::find(ranks_, context.peers.rank()) - ranks_.begin())) {}

Lane::~Lane() = default;

void Lane::queue(OperationPtr operation) {
  wanted_ = true;
  const base::MutexLock lock(queue_mutex_);
  queue_.push_back(std::move(operation));
}

void Lane::check(Result result, const char* call) const {
  if (result == kSuccess || result == kInProgress) return;
  const char* const last = context_.nccl.get_last_error(comm_);
  const bool usage = result == kInvalidArgument || result == kInvalidUsage;
  base::raise(usage ? ErrorKind::kUsage : ErrorKind::kSystem,
              cat(call, ": ", context_.nccl.get_error_string(result),
                  last != nullptr && *last != '\0' ? "; " : "", last != nullptr ? last : ""),
              ErrorFamily::kBackend);
}

// ---- issuing

// Empty: nothing is queued, or the last of a group has not come yet.
std::vector<OperationPtr> Lane::next_group() {
  const base::MutexLock lock(queue_mutex_);
  const auto last = std::ranges::find_if(
      queue_, [](const OperationPtr& each) { return (each->op.flags & LOCKSTEP_OP_MORE_FOLLOW) == 0; });
  if (last == queue_.end()) return {};
  std::vector<OperationPtr> group(std::make_move_iterator(queue_.begin()), std::make_move_iterator(last + 1));
  queue_.erase(queue_.begin(), last + 1);
  return group;
}

Result Lane::enqueue_all(std::span<const OperationPtr> group, cuda::Stream stream) {
  const auto size = static_cast<int>(ranks_.size());
  const bool grouped = group.size() > 1 || needs_group(group[0]->op);
  if (!grouped) return enqueue(context_, *group[0], comm_, own_, size, stream);
  check(context_.nccl.group_start(), "ncclGroupStart");
  Result first = kSuccess;
  try {
    for (const OperationPtr& each : group) {
      const Result result = enqueue(context_, *each, comm_, own_, size, stream);
      if (first == kSuccess && result != kInProgress) first = result;
    }
  } catch (...) {
    context_.nccl.group_end();  // NCCL counts starts and ends per thread
    throw;
  }
  const Result ended = context_.nccl.group_end();
  return first != kSuccess ? first : ended;
}

// The stream is ordered after what the lane issued before, in whichever stream, and after what each caller's stream held at
// its post.
void Lane::issue(std::vector<OperationPtr> group, cuda::Stream stream, bool captured) {
  const cuda::Driver& driver = context_.gpu.driver();
  if (!captured) {
    if (last_ && last_stream_ != stream)
      cuda::check(driver, driver.stream_wait_event(stream, last_->done.get(), 0), "cuStreamWaitEvent");
    for (const OperationPtr& each : group) {
      if (each->ready)
        cuda::check(driver, driver.stream_wait_event(stream, each->ready.get(), 0), "cuStreamWaitEvent");
    }
  }
  const Result result = enqueue_all(group, stream);
  settling_ = std::move(group);
  settling_stream_ = stream;
  settling_captured_ = captured;
  check(result, "NCCL");
  if (result == kSuccess) mark_issued();
}

// The events come after NCCL has launched its kernels: before that the stream does not hold them.
void Lane::mark_issued() {
  const cuda::Driver& driver = context_.gpu.driver();
  for (OperationPtr& each : settling_) {
    if (!settling_captured_) {
      each->done = context_.events->lend();
      cuda::check(driver, driver.event_record(each->done.get(), settling_stream_), "cuEventRecord");
      in_flight_.push_back(each);
      last_ = each;
      last_stream_ = settling_stream_;
    }
    const base::MutexLock lock(each->mutex);
    if (each->stage == Operation::Stage::kQueued) each->stage = Operation::Stage::kIssued;
    each->changed.notify_all();
  }
  settling_.clear();
}

bool Lane::settle() {
  if (settling_.empty()) return true;
  Result now = kSuccess;
  check(context_.nccl.comm_get_async_error(comm_, &now), "ncclCommGetAsyncError");
  check(now, "NCCL");
  if (now == kInProgress) return false;
  mark_issued();
  return true;
}

void Lane::pause(const Operation& operation, std::chrono::microseconds& length, const char* late) const {
  if (context_.stopped)
    base::raise(ErrorKind::kAborted, "the communicator was stopped", ErrorFamily::kBackend);
  if (Deadline::from_monotonic_ns(operation.op.deadline_ns).expired())
    base::raise(ErrorKind::kTimeout, cat(text_of(operation), ": ", late), ErrorFamily::kBackend);
  std::this_thread::sleep_for(length);
  length = std::min(length * 2, std::chrono::microseconds(500));
}

void Lane::await_settled(const Operation& operation) {
  std::chrono::microseconds length(5);
  while (!settle()) pause(operation, length, "NCCL has not connected to its peers");
}

// Half of them at a time: a caller that is far ahead of the device sleeps rarely.
void Lane::await_room(const Operation& operation) {
  if (in_flight_.size() < kMaxInFlight) return;
  std::chrono::microseconds length(5);
  for (collect(); in_flight_.size() > kMaxInFlight / 2; collect())
    pause(operation, length, "what was issued before has not completed");
}

void Lane::collect() {
  const cuda::Driver& driver = context_.gpu.driver();
  while (!in_flight_.empty()) {
    const cuda::Result result = driver.event_query(in_flight_.front()->done.get());
    if (result == cuda::kNotReady) break;
    cuda::check(driver, result, "cuEventQuery");
    completed_.push_back(std::move(in_flight_.front()));
    in_flight_.pop_front();
  }
}

void Lane::check_async() {
  if (comm_ == nullptr || in_flight_.empty() || !settling_.empty()) return;
  Result now = kSuccess;
  check(context_.nccl.comm_get_async_error(comm_, &now), "ncclCommGetAsyncError");
  check(now, "NCCL reports");
}

bool Lane::lock_to_issue() {
  for (int tries = 0; tries < 100; ++tries) {
    if (issue_mutex_.try_lock()) return true;
    if (tries >= 20) std::this_thread::yield();
  }
  return false;
}

// Whoever holds the lock issues in order. A thread that does not get it leaves its operation to the progress thread, which
// comes by again.
bool Lane::issue_queued() {
  if (!ready() || !lock_to_issue()) return false;
  const base::MutexLock lock(issue_mutex_, std::adopt_lock);
  const cuda::ContextScope scope(context_.gpu);
  return issue_next();
}

bool Lane::issue_next() {
  bool any = false;
  while (!context_.stopped && settle() && in_flight_.size() < kMaxInFlight) {
    auto group = next_group();
    if (group.empty()) break;
    issue(std::move(group), stream_.get(), false);
    any = true;
  }
  return any;
}

bool Lane::pump(std::vector<OperationPtr>& completed) {
  const cuda::ContextScope scope(context_.gpu);
  if (!ready()) return wanted_ && !context_.stopped && step_connect();
  if (!issue_mutex_.try_lock()) return false;
  const base::MutexLock lock(issue_mutex_, std::adopt_lock);
  collect();
  const bool any = !completed_.empty();
  completed.insert(completed.end(), completed_.begin(), completed_.end());
  completed_.clear();
  const bool issued = issue_next();
  if (!context_.stopped) check_async();
  return any || issued;
}

bool Lane::try_issue(const OperationPtr& operation, bool captured) {
  if (!ready() || !lock_to_issue()) return false;
  const base::MutexLock lock(issue_mutex_, std::adopt_lock);
  if (context_.stopped || !settle()) return false;
  {
    const base::MutexLock inner(queue_mutex_);
    if (!queue_.empty()) return false;
  }
  await_room(*operation);
  issue({operation}, static_cast<cuda::Stream>(operation->op.stream), captured);
  await_settled(*operation);
  return true;
}

// ---- ending

void Lane::revoke() noexcept {
  if (comm_ == nullptr || revoked_) return;
  revoked_ = true;
  const cuda::ContextScope scope(context_.gpu);
  // Not for a communicator that is still being made: only ncclCommAbort ends that.
  if (ready() && context_.nccl.comm_revoke != nullptr) {
    const Result result = context_.nccl.comm_revoke(comm_, 0);
    if (result == kSuccess || result == kInProgress) return;
  }
  const auto abort = [this] {
    const cuda::ContextScope inner(context_.gpu);
    context_.nccl.comm_abort(comm_);
    aborted_ = true;
  };
  try {
    aborter_ = base::Thread("ls-nccl-abort", abort);
  } catch (...) {
    abort();  // no thread: then it takes half a second here
  }
}

bool Lane::quiet() noexcept {
  if (!issue_mutex_.try_lock()) return false;
  const base::MutexLock lock(issue_mutex_, std::adopt_lock);
  const cuda::ContextScope scope(context_.gpu);
  // A device that reports an error runs nothing more.
  return std::ranges::all_of(in_flight_, [&](const OperationPtr& each) {
    return context_.gpu.driver().event_query(each->done.get()) != cuda::kNotReady;
  });
}

void Lane::close(bool orderly) noexcept {
  aborter_.join();
  if (comm_ != nullptr && !aborted_) {
    const cuda::ContextScope scope(context_.gpu);
    const Library& nccl = context_.nccl;
    Result now = kRemoteError;
    if (orderly && !revoked_ && ready()) {
      // Bounded: a rank that is gone by now would be waited for.
      const Deadline patience = Deadline::after(Milliseconds(2000));
      now = nccl.comm_finalize(comm_);
      while (now == kInProgress && !patience.expired()) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        if (nccl.comm_get_async_error(comm_, &now) != kSuccess) now = kInternalError;
      }
    }
    now == kSuccess ? nccl.comm_destroy(comm_) : nccl.comm_abort(comm_);
  }
  comm_ = nullptr;
  ready_ = false;
  state_ = State::kClosed;
  {
    const base::MutexLock lock(issue_mutex_);
    settling_.clear();
    in_flight_.clear();
    completed_.clear();
    last_.reset();
  }
  const base::MutexLock lock(queue_mutex_);
  queue_.clear();
}

}  // namespace lockstep::nccl_plugin
