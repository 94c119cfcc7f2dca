#include "lockstep/hierarchy/internal/ticker.h"

#include <chrono>
#include <vector>

namespace lockstep::comm::hierarchy {
namespace {

// Bounds how late a rank that waits in one sub-communicator notices a failure in another.
constexpr std::chrono::milliseconds kTick{20};

}  // namespace

Ticker::~Ticker() {
  {
    const base::MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

// Wakes the thread only when it sleeps without a timeout, which is when nothing was active.
void Ticker::add(Ticking* one) {
  const base::MutexLock lock(mutex_);
  const bool first = active_.empty();
  active_.insert(one);
  start_locked();
  if (first) changed_.notify_all();
}

void Ticker::call_soon(std::function<void()> call) {
  const base::MutexLock lock(mutex_);
  soon_.push_back(std::move(call));
  start_locked();
  changed_.notify_all();
}

void Ticker::start_locked() {
  if (!thread_.joinable()) thread_ = base::Thread("ls-hierarchy", [this] { run(); });
}

void Ticker::remove(Ticking* one) {
  const base::MutexLock lock(mutex_);
  active_.erase(one);
}

void Ticker::run() {
  base::MutexLock lock(mutex_);
  for (;;) {
    changed_.wait(
        mutex_, [&]() LOCKSTEP_REQUIRES(mutex_) { return stopping_ || !active_.empty() || !soon_.empty(); });
    // Calls cut the pause short; a tick then comes early, which is harmless.
    changed_.wait_for(mutex_, kTick, [&]() LOCKSTEP_REQUIRES(mutex_) { return stopping_ || !soon_.empty(); });
    while (!soon_.empty()) {
      const auto call = std::move(soon_.front());
      soon_.pop_front();
      lock.unlock();
      call();
      lock.lock();
    }
    if (stopping_) return;
    // enter() under the lock, so that after remove() either it was not called or the communicator has counted
    // it (users_); tick() without it, since it calls engines and the store.
    std::vector<Ticking*> now;
    for (auto one = active_.begin(); one != active_.end();) {
      if ((*one)->enter()) {
        now.push_back(*one++);
      } else {
        one = active_.erase(one);
      }
    }
    lock.unlock();
    for (Ticking* one : now) {
      one->tick();
      one->exit();
    }
    lock.lock();
  }
}

}  // namespace lockstep::comm::hierarchy
