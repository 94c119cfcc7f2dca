// A tick every 20 ms for the communicators that have operations in progress. And a thread for calls that must
// not be made by the thread that caused them.
// Thread: one per engine, "ls-hierarchy", started with the first operation, asleep while nothing is in
// progress, joined by the destructor. Thread safety: all methods. enter() is called with the ticker's lock
// held, and takes the communicator's; tick(), exit() and posted calls run under no lock.
#pragma once

#include <deque>
#include <functional>
#include <set>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/thread.h"

namespace lockstep::comm::hierarchy {

class Ticking {
 public:
  // Called outside any lock, between enter and exit.
  virtual void tick() = 0;
  // Keeps the object alive until exit(). False when it has nothing in progress: it is removed from the list.
  virtual bool enter() = 0;
  virtual void exit() = 0;

 protected:
  ~Ticking() = default;
};

class Ticker {
 public:
  ~Ticker();
  void add(Ticking* one);
  // Afterwards enter() is not called any more; a tick() in progress ends with exit().
  void remove(Ticking* one);
  // Runs `call` on the thread, soon, under no lock.
  void call_soon(std::function<void()> call);

 private:
  void start_locked() LOCKSTEP_REQUIRES(mutex_);
  void run();

  base::Mutex mutex_;
  base::ConditionVariable changed_;
  std::set<Ticking*> active_ LOCKSTEP_GUARDED_BY(mutex_);
  std::deque<std::function<void()>> soon_ LOCKSTEP_GUARDED_BY(mutex_);
  bool stopping_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  base::Thread thread_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::comm::hierarchy
