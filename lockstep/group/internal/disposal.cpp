#include "lockstep/group/internal/disposal.h"

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::internal {
namespace {

thread_local int n_callbacks = 0;  // that this thread is inside of

// The last owner of a communicator may be a Work that ends inside the engine's own callback. Destroying the
// communicator there would wait for the very callback; so it is done on this thread.
class Disposal {
 public:
  void add(std::function<void()> end) {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;  // the process ends, and with it what is left
    waiting_.push_back(std::move(end));
    if (!thread_.joinable()) thread_ = base::Thread("ls-dispose", [this] { run(); });
    pid_ = ::getpid();
    changed_.notify_one();
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      if (pid_ != ::getpid()) return;  // a forked child: the thread is its parent's
      stopping_ = true;
      changed_.notify_one();
    }
    thread_.join();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const auto end = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      end();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool stopping_ = false;
  pid_t pid_ = 0;
  std::deque<std::function<void()>> waiting_;
  base::Thread thread_;
};

// Never destroyed: engines still call back while the process exits.
Disposal& disposal() {
  static auto& instance = *new Disposal;
  return instance;
}

struct StopDisposalAtExit {
  ~StopDisposalAtExit() { disposal().stop(); }
};

}  // namespace

EngineCallback::EngineCallback() {
  ++n_callbacks;
}

EngineCallback::~EngineCallback() {
  --n_callbacks;
}

void end_where_it_may_block(std::function<void()> end) noexcept {
  if (n_callbacks == 0) return end();
  try {
    disposal().add(std::move(end));
    static const StopDisposalAtExit stop_at_exit;
  } catch (...) {  // no thread to be had: what waits is ended with the next, or with the process
    base::log(LogLevel::kError, base::cat("a group cannot end yet: ", base::current_failure().message));
  }
}

}  // namespace lockstep::internal
