#include "engines/gloo/pool.h"

#include <pthread.h>

#include <chrono>

#include "engines/gloo/signals.h"

namespace lockstep::gloo_plugin {

Pool::~Pool() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return threads_.empty(); });
  join_ended(lock);
}

void Pool::run(std::function<void()> work) {
  std::unique_lock lock(mutex_);
  join_ended(lock);
  queue_.push_back(std::move(work));
  if (idle_ >= queue_.size()) {
    changed_.notify_all();
    return;
  }
  const auto self = threads_.emplace(threads_.end());
  const NoSignals none;
  try {
    *self = std::thread([this, self] { serve(self); });
  } catch (...) {
    threads_.erase(self);
    queue_.pop_back();
    throw;
  }
}

void Pool::join_ended(std::unique_lock<std::mutex>& lock) {
  while (!ended_.empty()) {
    std::thread thread = std::move(ended_.front());
    ended_.pop_front();
    lock.unlock();
    thread.join();
    lock.lock();
  }
}

void Pool::serve(std::list<std::thread>::iterator self) {
  ::pthread_setname_np(::pthread_self(), "ls-gloo-op");
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    changed_.wait_for(lock, std::chrono::seconds(2), [&] { return stopping_ || !queue_.empty(); });
    --idle_;
    if (queue_.empty()) break;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
  }
  ended_.splice(ended_.end(), threads_, self);
  changed_.notify_all();
}

}  // namespace lockstep::gloo_plugin
