// Threads for operations under way. It grows while more of them run than there are threads, so none waits for
// another, and a thread without work for a while ends. Thread safety: run from any thread.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <thread>

#include "lockstep/base/detail/mutex.h"

namespace lockstep::gloo_plugin {

class Pool {
 public:
  Pool() = default;
  // Joins the threads. No work may be queued or running.
  ~Pool();
  Pool(const Pool&) = delete;

  // Runs `work` at once on a thread of its own. It must not throw. Raises std::system_error when no thread
  // can start.
  void run(std::function<void()> work);

 private:
  void serve(std::list<std::thread>::iterator self);
  void join_ended() LOCKSTEP_REQUIRES(mutex_);

  base::Mutex mutex_;
  base::ConditionVariable changed_;
  std::deque<std::function<void()>> queue_ LOCKSTEP_GUARDED_BY(mutex_);
  std::list<std::thread> threads_ LOCKSTEP_GUARDED_BY(mutex_);
  std::list<std::thread> ended_ LOCKSTEP_GUARDED_BY(mutex_);
  std::size_t idle_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  bool stopping_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep::gloo_plugin
