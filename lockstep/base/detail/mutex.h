// A mutex, its scoped locks and a condition variable for which clang proves who holds what (-Wthread-safety;
// the test `tidy`). They are std::mutex and std::condition_variable, of the same size and with every call
// inline; what they add are the names below, which say what a mutex guards and which functions need it. Other
// compilers read nothing there.
//
//   std::deque<Job> jobs_ LOCKSTEP_GUARDED_BY(mutex_);     every access holds mutex_
//   void start_next() LOCKSTEP_REQUIRES(mutex_);           the caller holds it
//   void stop() LOCKSTEP_EXCLUDES(mutex_);                 the caller does not: it is locked inside
//
// A lambda is a function of its own: [&]() LOCKSTEP_REQUIRES(mutex_) { return jobs_.empty(); }.
// Not checked: constructors and destructors, whose object is not shared, and what is behind a callback or a
// virtual call; see Mutex::assume_held().
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define LOCKSTEP_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define LOCKSTEP_THREAD_ANNOTATION(x)
#endif

// Of types.
#define LOCKSTEP_CAPABILITY(name) LOCKSTEP_THREAD_ANNOTATION(capability(name))
#define LOCKSTEP_SCOPED_CAPABILITY LOCKSTEP_THREAD_ANNOTATION(scoped_lockable)
// Of members; PT: of what a pointer or a std::unique_ptr points to.
#define LOCKSTEP_GUARDED_BY(mutex) LOCKSTEP_THREAD_ANNOTATION(guarded_by(mutex))
#define LOCKSTEP_PT_GUARDED_BY(mutex) LOCKSTEP_THREAD_ANNOTATION(pt_guarded_by(mutex))
// Of functions.
#define LOCKSTEP_REQUIRES(...) LOCKSTEP_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define LOCKSTEP_EXCLUDES(...) LOCKSTEP_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define LOCKSTEP_ACQUIRE(...) LOCKSTEP_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define LOCKSTEP_TRY_ACQUIRE(...) LOCKSTEP_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define LOCKSTEP_RELEASE(...) LOCKSTEP_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define LOCKSTEP_ASSERT_HELD(mutex) LOCKSTEP_THREAD_ANNOTATION(assert_capability(mutex))
#define LOCKSTEP_RETURN_CAPABILITY(mutex) LOCKSTEP_THREAD_ANNOTATION(lock_returned(mutex))
// For what the analysis cannot follow; a comment beside it says why.
#define LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS LOCKSTEP_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace lockstep::base {

class LOCKSTEP_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() LOCKSTEP_ACQUIRE() { mutex_.lock(); }
  bool try_lock() LOCKSTEP_TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() LOCKSTEP_RELEASE() { mutex_.unlock(); }
  // For the analysis only: from here on this function's caller is taken to hold it. The contract of whoever
  // calls back says so.
  void assume_held() const LOCKSTEP_ASSERT_HELD(this) {}

 private:
  friend class ConditionVariable;
  std::mutex mutex_;
};

// Held from construction to destruction, except between unlock() and lock().
class LOCKSTEP_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) LOCKSTEP_ACQUIRE(mutex) : mutex_(mutex) { mutex.lock(); }
  // Takes over what try_lock() has locked.
  MutexLock(Mutex& mutex, std::adopt_lock_t) LOCKSTEP_REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() LOCKSTEP_RELEASE() {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() LOCKSTEP_RELEASE() {
    held_ = false;
    mutex_.unlock();
  }
  void lock() LOCKSTEP_ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// The opposite, for a function that is called with the mutex held: not held from construction to destruction.
class LOCKSTEP_SCOPED_CAPABILITY MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mutex) LOCKSTEP_RELEASE(mutex) : mutex_(mutex) { mutex.unlock(); }
  // Annotated as a release: of a scoped object that means "back to what was before".
  ~MutexUnlock() LOCKSTEP_RELEASE() { mutex_.lock(); }
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits take the mutex, which the caller holds: the analysis then knows which one. Predicates are called with
// it held.
class ConditionVariable {
 public:
  void notify_one() noexcept { condition_.notify_one(); }
  void notify_all() noexcept { condition_.notify_all(); }

  void wait(Mutex& mutex) LOCKSTEP_REQUIRES(mutex) {
    Lent lock(mutex.mutex_);
    condition_.wait(lock.lock);
  }
  template <class Clock, class Duration>
  std::cv_status wait_until(Mutex& mutex, const std::chrono::time_point<Clock, Duration>& until)
      LOCKSTEP_REQUIRES(mutex) {
    Lent lock(mutex.mutex_);
    return condition_.wait_until(lock.lock, until);
  }

  template <class Ready>
  void wait(Mutex& mutex, Ready ready) LOCKSTEP_REQUIRES(mutex) {
    while (!holds(ready)) wait(mutex);
  }
  // What ready() returned last: false when the time came first.
  template <class Clock, class Duration, class Ready>
  bool wait_until(Mutex& mutex, const std::chrono::time_point<Clock, Duration>& until, Ready ready)
      LOCKSTEP_REQUIRES(mutex) {
    while (!holds(ready)) {
      if (wait_until(mutex, until) == std::cv_status::timeout) return holds(ready);
    }
    return true;
  }
  template <class Rep, class Period, class Ready>
  bool wait_for(Mutex& mutex, const std::chrono::duration<Rep, Period>& time, Ready ready)
      LOCKSTEP_REQUIRES(mutex) {
    return wait_until(mutex, std::chrono::steady_clock::now() + time, ready);
  }

 private:
  // The caller's mutex for the time of a wait. It stays locked on every way out, also when the thread is
  // cancelled in the wait: the caller's own lock releases it.
  struct Lent {
    explicit Lent(std::mutex& mutex) : lock(mutex, std::adopt_lock) {}
    ~Lent() { lock.release(); }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;
    std::unique_lock<std::mutex> lock;
  };

  // The predicate names the mutex as its own function does, the analysis here by another name.
  template <class Ready>
  static bool holds(Ready& ready) LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS {
    return ready();
  }

  std::condition_variable condition_;
};

}  // namespace lockstep::base
