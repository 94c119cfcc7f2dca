// The threads of an agent. One of them at a time is the poller: it takes what arrives and runs short work in
// place. The others run tasks, or sleep until there are some.
//
// Who the poller is, is arbitrated by one counter, `turn_`:
//
//            run_long() begins                     run_long() ends: turn + 1, it stays the poller
//   even  ------------------------>  odd  ---+-->  even
//   the poller looks for work        inside  |     the watch, after 0.5 ms, or the poller itself before it blocks: turn + 1,
//                                    work    +-->  another thread becomes the poller; the old one goes on as an ordinary thread
//
// Only the poller moves it from even to odd. From odd to even it is moved by compare-and-swap, once: whoever
// succeeds decides. The watch is the thread "ls-rpc-watch".
// Thread safety: every method may be called from any thread. No lock is held while step(), rest(), a task or
// work runs. stop() joins all threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <string>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/base/detail/thread.h"

namespace lockstep::rpc::internal {

class Pool {
 public:
  using Task = std::function<void()>;
  struct Duties {
    // Neither throws.
    std::function<bool()> step;  // takes one thing that arrived; false when there was none
    std::function<void()> rest;  // sleeps until something arrives, or wake()
    std::function<void()> wake;
  };
  struct Options {
    int n_threads = 16;  // that run at once, asleep ones not counted
    base::RankThread* rank = nullptr;
  };

  Pool(Duties duties, Options options);
  // The first thread; once. Apart from the constructor: threads find the pool through whoever owns it.
  void start();
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs it on one of the threads. What it throws is logged: nothing that a thread of the pool runs may end
  // the process.
  void post(Task task);
  // Runs `work`, which may last, on this thread. Pre: this thread is the poller, inside step().
  template <class Work>
  void run_long(Work&& work) {
    struct Turn {
      ~Turn() { pool.end_long(turn); }
      Pool& pool;
      const std::uint64_t turn;
    };
    const Turn mine{*this, begin_long()};
    work();
  }
  // This thread is the poller, and no long work has cost it that role.
  bool poller_here() const;
  // This thread belongs to the pool.
  bool is_mine() const;
  // Around sleep in a thread of the pool; nothing in others.
  void before_sleep();
  void after_sleep();
  // Tasks that are queued are dropped; those that run are waited for. Raises kUsage on a thread of the pool.
  void stop();

  int n_threads() const;
  int n_idle() const;

 private:
  struct Member;
  void work(Member& member);
  void poll() LOCKSTEP_REQUIRES(mutex_);
  void look_for_work() LOCKSTEP_EXCLUDES(mutex_);
  std::uint64_t begin_long();
  void end_long(std::uint64_t turn);
  // Takes the role of poller from the thread inside long work `turn` (odd), if that has not ended. True when
  // this call did it.
  bool depose(std::uint64_t turn);
  void watch();
  // One more thread, or an idle one, if there is need and room.
  void call_up() LOCKSTEP_REQUIRES(mutex_);
  void start_thread() LOCKSTEP_REQUIRES(mutex_);
  // Joins threads that have ended. This cannot block for long: a member sets `over` as the last thing it does
  // under mutex_.
  void reap() LOCKSTEP_REQUIRES(mutex_);

  const Duties duties_;
  const Options options_;
  std::atomic<std::uint64_t> turn_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> watch_asleep_{true};

  mutable base::Mutex mutex_;
  base::ConditionVariable changed_;
  base::ConditionVariable watch_changed_;
  std::deque<Task> tasks_ LOCKSTEP_GUARDED_BY(mutex_);
  std::list<Member> members_ LOCKSTEP_GUARDED_BY(mutex_);
  bool has_poller_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  int n_threads_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // alive
  int n_idle_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  int n_called_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // idle ones that were notified and have not come yet
  int n_asleep_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // inside Future::wait

  base::Thread watch_;  // set by start(), joined by stop()
};

}  // namespace lockstep::rpc::internal
