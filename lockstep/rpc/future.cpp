#include "lockstep/rpc/future.h"

#include "lockstep/base/log.h"

namespace lockstep::rpc::internal {

bool FutureBase::wait_over(Deadline deadline) {
  if (over()) return true;
  const auto pump = pump_.lock();
  if (pump) {
    pump->help(over_);
    if (over()) return true;
    pump->before_sleep();
  }
  {
    std::unique_lock lock(mutex_);
    ++n_sleeping_;
    const auto ended = [this] { return over(); };
    if (deadline.is_never()) {
      changed_.wait(lock, ended);
    } else {
      changed_.wait_until(lock, deadline.time_point(), ended);
    }
    --n_sleeping_;
  }
  if (pump) pump->after_sleep();
  return over();
}

void FutureBase::on_over(Callback callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!over()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  std::vector<Callback> one;
  one.push_back(std::move(callback));
  run(std::move(one));
}

std::vector<FutureBase::Callback> FutureBase::fail(CallFailure failure) {
  return end([&] { failure_ = std::move(failure); });
}

void FutureBase::run(std::vector<Callback> callbacks) noexcept {
  for (auto& callback : callbacks) {
    try {
      callback();
    } catch (...) {
      log(LogLevel::kError, "a callback of a future threw: " + current_failure().message);
    }
  }
}

}  // namespace lockstep::rpc::internal
