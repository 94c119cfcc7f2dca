#include "lockstep/rpc/future.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/log.h"

namespace lockstep::rpc::internal {

void raise_empty_future() {
  base::raise(ErrorKind::kUsage,
              "this Future is empty: it was default-constructed, and no call or Promise completes it");
}

void raise_not_done() {
  base::raise(ErrorKind::kUsage,
              "Future::result: it is not done yet; wait() blocks until it is, done() says whether it is");
}

Deadline wait_deadline(const std::optional<Milliseconds>& timeout) {
  return timeout ? Deadline::after(base::checked_timeout(*timeout, "Future::wait")) : Deadline::never();
}

void raise_late(Milliseconds timeout) {
  base::raise(ErrorKind::kTimeout, base::cat("RPCErr:", static_cast<int>(RpcErrorCode::kTimeout),
                                             ": Future::wait: not over after ", timeout.count(),
                                             " milliseconds; it continues, and may be waited for again"));
}

// First the cheap part: this thread fetches messages itself for a moment, and may find its own answer without
// a wake-up. before_sleep() gives up the poller's role, if it has that, and lets the pool start another
// thread.
bool FutureBase::wait_over(Deadline deadline, const std::function<std::string()>& waiting) {
  if (over()) return true;
  const auto helper = helper_.lock();
  if (helper) {
    helper->help(over_);
    if (over()) return true;
    helper->before_sleep();
  }
  {
    base::MutexLock lock(mutex_);
    // Counted under the mutex, so that end() skips the notification when nobody sleeps.
    ++n_sleeping_;
    base::SlowWait slow(deadline);
    const auto ended = [this] { return over(); };
    while (!changed_.wait_until(mutex_, slow.next().time_point(), ended) && !deadline.expired()) {
      lock.unlock();
      try {
        slow.say_if_due([&] { return awaited(helper.get(), waiting); });
      } catch (...) {  // the wait goes on without its line
        log_current_failure("a slow wait for a future cannot be described");
      }
      lock.lock();
    }
    --n_sleeping_;
  }
  if (helper) helper->after_sleep();
  return over();
}

base::Awaited FutureBase::awaited(const WaitHelper* helper,
                                  const std::function<std::string()>& waiting) const {
  if (waiting) return {.text = waiting()};
  if (helper != nullptr) return helper->awaited(*this);
  return {.text = "Future::wait waits for a Promise of this process that nobody has set"};
}

std::exception_ptr FutureBase::error() const {
  if (!over() || !failure_) return nullptr;
  try {
    failure_->raise();
  } catch (...) {
    return std::current_exception();
  }
}

// Over is checked under the mutex: end() takes the list under it, so a callback is either in that list or
// runs here. Once, in both cases.
void FutureBase::on_over(Callback callback) {
  {
    const base::MutexLock lock(mutex_);
    if (!over()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  std::vector<Callback> one;
  one.push_back(std::move(callback));
  run(std::move(one));
}

// Returns the callbacks instead of running them: the caller knows on which thread they may run.
std::vector<FutureBase::Callback> FutureBase::fail(CallFailure failure) {
  return end([&] { failure_ = std::move(failure); });
}

void FutureBase::run(std::vector<Callback> callbacks) noexcept {
  for (auto& callback : callbacks) {
    try {
      callback();
    } catch (...) {
      log_current_failure("a callback of a future threw");
    }
  }
}

}  // namespace lockstep::rpc::internal
