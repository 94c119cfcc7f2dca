#include "engines/cuda_ipc/progress.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>

namespace lockstep::cuda_ipc {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr microseconds kSpin{60};
constexpr microseconds kFirstNap{10}, kLongestNap{80};
constexpr microseconds kSlow{1000};

}  // namespace

std::shared_ptr<Progress> Progress::of_process() {
  struct Last {
    base::Mutex mutex;
    std::weak_ptr<Progress> progress LOCKSTEP_GUARDED_BY(mutex);
  };
  static Last* const last = new Last;
  const base::MutexLock lock(last->mutex);
  std::shared_ptr<Progress> progress = last->progress.lock();
  if (progress == nullptr) {
    progress.reset(new Progress);
    last->progress = progress;
  }
  return progress;
}

Progress::Progress() : thread_("ls-cuda-ipc", [this] { work(); }) {}

Progress::~Progress() {
  {
    const base::MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake();
  thread_.join();
}

void Progress::add(Served& served) {
  {
    const base::MutexLock lock(mutex_);
    served_.push_back(&served);
  }
  wake();
}

void Progress::remove(Served& served) {
  const base::MutexLock lock(mutex_);
  std::ranges::replace(served_, &served, static_cast<Served*>(nullptr));
  changed_.wait(mutex_, [&]() LOCKSTEP_REQUIRES(mutex_) { return serving_ != &served; });
}

// seq_cst, with the thread's own order in work(): it announces its sleep and then looks at woken_, the caller sets woken_
// and then looks for a sleeper. One of the two sees the other.
void Progress::wake() {
  woken_.store(true, std::memory_order_seq_cst);
  if (!asleep_.load(std::memory_order_seq_cst)) return;
  const base::MutexLock lock(mutex_);
  changed_.notify_all();
}

void Progress::work() {
  // Naps are shorter than the slack that the kernel adds to timers by default.
  ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  Clock::time_point moved = Clock::now(), slow = moved;
  microseconds nap = kFirstNap;
  for (;;) {
    const auto now = Clock::now();
    const bool look_slowly = now - slow >= kSlow;
    if (look_slowly) slow = now;
    const bool was_woken = woken_.exchange(false, std::memory_order_seq_cst);
    const Served::State state = pass(look_slowly || was_woken);
    if (was_woken || state == Served::State::kMoved) {
      moved = Clock::now();
      nap = kFirstNap;
      if (state != Served::State::kIdle) continue;
    }
    if (state == Served::State::kPending && Clock::now() - moved < kSpin) {
      ::sched_yield();  // a rank that computes on this core goes first
      continue;
    }
    asleep_.store(true, std::memory_order_seq_cst);
    {
      const base::MutexLock lock(mutex_);
      std::erase(served_, nullptr);
      if (stopping_) return;
      const auto woken = [this] { return woken_.load(std::memory_order_seq_cst); };
      if (state == Served::State::kIdle) {
        changed_.wait(mutex_, woken);
      } else {
        changed_.wait_for(mutex_, nap, woken);
        nap = std::min(kLongestNap, nap * 3 / 2);
      }
    }
    asleep_.store(false, std::memory_order_relaxed);
  }
}

// The index stays valid: entries are only added at the end, and removed ones become null until the pass is over.
Served::State Progress::pass(bool slow) {
  Served::State state = Served::State::kIdle;
  base::MutexLock lock(mutex_);
  for (std::size_t i = 0; i < served_.size(); ++i) {
    if (served_[i] == nullptr) continue;
    serving_ = served_[i];
    Served& served = *serving_;
    lock.unlock();
    state = std::max(state, served.serve(slow));
    lock.lock();
    serving_ = nullptr;
    changed_.notify_all();
  }
  return state;
}

}  // namespace lockstep::cuda_ipc
