#include "engines/gloo/pool.h"

#include <pthread.h>

#include <chrono>

#include "engines/gloo/signals.h"

namespace lockstep::gloo_plugin {

// A thread cannot join itself: when it ends it moves to ended_, and the next run() or this destructor joins
// it.
Pool::~Pool() {
  const base::MutexLock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  changed_.wait(mutex_, [&]() LOCKSTEP_REQUIRES(mutex_) { return threads_.empty(); });
  join_ended();
}

void Pool::run(std::function<void()> work) {
  const base::MutexLock lock(mutex_);
  join_ended();
  queue_.push_back(std::move(work));
  // An idle thread for every queued task, this one included. Otherwise one is started: a task may block, and
  // must not delay another.
  if (idle_ >= queue_.size()) {
    changed_.notify_all();
    return;
  }
  const auto self = threads_.emplace(threads_.end());
  // A new thread inherits the mask: signals of the program go to the program's threads.
  const NoSignals none;
  try {
    *self = std::thread([this, self] { serve(self); });
  } catch (...) {
    threads_.erase(self);
    queue_.pop_back();
    throw;
  }
}

void Pool::join_ended() {
  while (!ended_.empty()) {
    std::thread thread = std::move(ended_.front());
    ended_.pop_front();
    const base::MutexUnlock open(mutex_);
    thread.join();
  }
}

void Pool::serve(std::list<std::thread>::iterator self) {
  ::pthread_setname_np(::pthread_self(), "ls-gloo-op");
  base::MutexLock lock(mutex_);
  for (;;) {
    ++idle_;
    // Idle threads end after two seconds; a burst of operations finds those of the last one.
    changed_.wait_for(mutex_, std::chrono::seconds(2),
                      [&]() LOCKSTEP_REQUIRES(mutex_) { return stopping_ || !queue_.empty(); });
    --idle_;
    if (queue_.empty()) break;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    // What the task held is released before the lock is taken, on this thread.
    work = nullptr;
    lock.lock();
  }
  ended_.splice(ended_.end(), threads_, self);
  changed_.notify_all();
}

}  // namespace lockstep::gloo_plugin
