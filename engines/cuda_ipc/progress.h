// The thread that makes operations progress, one per process: it watches the words of the control pages that streams write.
// A device rings no doorbell, so while operations are pending the thread polls: it spins for a while after the last change,
// then sleeps in growing steps. Nothing pending: it sleeps until wake().
// Thread: "ls-cuda-ipc", from the first communicator to the last.
// Thread safety: every method may be called from any thread, remove() not from the progress thread.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/thread.h"

namespace lockstep::cuda_ipc {

class Served {
 public:
  enum class State { kIdle, kPending, kMoved };
  // One pass, on the progress thread; never blocks, never raises. `slow`: also look at what need not be looked at often.
  virtual State serve(bool slow) noexcept = 0;

 protected:
  ~Served() = default;
};

class Progress {
 public:
  // The process's. Raises when there is no thread for it.
  static std::shared_ptr<Progress> of_process();
  ~Progress();
  Progress(const Progress&) = delete;

  void add(Served& served);
  // Returns when the thread is not inside it.
  void remove(Served& served);
  // Something is pending, or has changed.
  void wake();

 private:
  Progress();
  void work();
  Served::State pass(bool slow);

  base::Mutex mutex_;
  base::ConditionVariable changed_;
  std::vector<Served*> served_ LOCKSTEP_GUARDED_BY(mutex_);
  Served* serving_ LOCKSTEP_GUARDED_BY(mutex_) = nullptr;
  bool stopping_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::atomic<bool> woken_{false};
  std::atomic<bool> asleep_{false};
  base::Thread thread_;
};

}  // namespace lockstep::cuda_ipc
