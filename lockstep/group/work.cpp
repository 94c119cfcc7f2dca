#include "lockstep/group/work.h"

#include "lockstep/base/text.h"
#include "lockstep/group/internal/work_state.h"

namespace lockstep {

Work::State::State(std::shared_ptr<internal::Core> core, comm::OpHandle handle,
                   const internal::Request& request, std::uint64_t sequence, internal::Held held)
    : name_(request.name),
      where_(request.where),
      sequence_(sequence),
      core_(std::move(core)),
      handle_(std::move(handle)),
      held_(std::move(held)) {}

Work::State::State(std::uint64_t sequence, std::vector<at::Tensor> results)
    : name_(""), sequence_(sequence), over_(true) {
  held_.results = std::move(results);
}

bool Work::State::poll() {
  const std::lock_guard lock(mutex_);
  // A thread inside the engine's wait will finish it; the handle is that thread's.
  if (over_ || waiting_) return over_;
  if (const auto status = handle_.test(); status != LOCKSTEP_PENDING) finish(status);
  return over_;
}

bool Work::State::settle(Deadline deadline) {
  std::unique_lock lock(mutex_);
  while (!over_) {
    if (waiting_) {
      changed_.wait_until(lock, deadline.time_point());
    } else {
      waiting_ = true;
      lock.unlock();
      const auto status = handle_.wait(deadline);
      lock.lock();
      waiting_ = false;
      if (status != LOCKSTEP_PENDING) finish(status);
      changed_.notify_all();
    }
    if (!over_ && deadline.expired()) return false;
  }
  return true;
}

void Work::State::finish(lockstep_status status) {
  if (status == LOCKSTEP_OK) {
    try {
      held_.copy_back();
    } catch (...) {
      failure_ = current_failure();
    }
  } else {
    failure_ = core_->comm().failure(status, handle_.last_error());
  }
  if (failure_) failure_->message = cat(describe(), ": ", failure_->message);
  handle_.release();
  held_.buffers.clear();
  held_.copies.clear();
  over_ = true;
  core_->forget(this);
  core_.reset();
}

std::string Work::State::describe() const {
  return core_->describe(name_, sequence_, where_);
}

void Work::State::wait(std::optional<Milliseconds> timeout) {
  const auto deadline = timeout ? Deadline::after(*timeout) : Deadline::never();
  if (!settle(deadline)) {
    const std::lock_guard lock(mutex_);
    if (!over_) {
      raise(ErrorKind::kTimeout,
            cat(describe(), ": not over after ", timeout->count(), " ms of waiting; it goes on"),
            ErrorFamily::kBackend);
    }
  }
  if (const auto error = failure()) raise(*error);
}

std::optional<Failure> Work::State::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::vector<at::Tensor> Work::State::results() {
  if (!poll()) {
    raise(ErrorKind::kUsage,
          cat("result() of ", name_, " #", sequence_, " asked for before it is over; wait() first"));
  }
  const std::lock_guard lock(mutex_);
  if (failure_) raise(*failure_);
  return held_.results;
}

Work::Work() = default;
Work::Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
Work::Work(at::Tensor result, std::uint64_t sequence_number)
    : result_(std::move(result)), sequence_number_(sequence_number) {}

void Work::wait(std::optional<Milliseconds> timeout) const {
  if (state_) state_->wait(timeout);
}

bool Work::is_completed() const {
  return !state_ || state_->poll();
}

bool Work::is_success() const {
  return !state_ || (state_->poll() && !state_->failure());
}

std::exception_ptr Work::exception() const {
  if (!state_ || !state_->poll()) return nullptr;
  const auto failure = state_->failure();
  if (!failure) return nullptr;
  try {
    raise(*failure);
  } catch (...) {
    return std::current_exception();
  }
}

std::vector<at::Tensor> Work::result() const {
  if (state_) return state_->results();
  if (!result_.defined()) return {};
  return {result_};
}

std::uint64_t Work::sequence_number() const {
  return state_ ? state_->sequence_number() : sequence_number_;
}

}  // namespace lockstep
