#include "lockstep/hierarchy/internal/ticker.h"

#include <chrono>
#include <vector>

namespace lockstep::comm::hierarchy {
namespace {

constexpr std::chrono::milliseconds kTick{20};

}  // namespace

Ticker::~Ticker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Ticker::add(Ticking* one) {
  const std::lock_guard lock(mutex_);
  const bool first = active_.empty();
  active_.insert(one);
  start_locked();
  if (first) changed_.notify_all();
}

void Ticker::call_soon(std::function<void()> call) {
  const std::lock_guard lock(mutex_);
  soon_.push_back(std::move(call));
  start_locked();
  changed_.notify_all();
}

void Ticker::start_locked() {
  if (!thread_.joinable()) thread_ = base::Thread("ls-hierarchy", [this] { run(); });
}

void Ticker::remove(Ticking* one) {
  const std::lock_guard lock(mutex_);
  active_.erase(one);
}

void Ticker::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !active_.empty() || !soon_.empty(); });
    changed_.wait_for(lock, kTick, [&] { return stopping_ || !soon_.empty(); });
    while (!soon_.empty()) {
      const auto call = std::move(soon_.front());
      soon_.pop_front();
      lock.unlock();
      call();
      lock.lock();
    }
    if (stopping_) return;
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
