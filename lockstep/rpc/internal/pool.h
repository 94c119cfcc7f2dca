// The threads of an agent. One of them at a time is resident: it takes what arrives and runs short work in place. The others
// run tasks, or sleep until there are some.
//
// Residence is arbitrated by one counter, `turn_`: even while the resident looks for work, odd while it is inside something
// that may last. Whoever moves it from odd to even decides: the resident itself when it comes back, or the watch ("ls-rpc-watch")
// when that takes too long, or the resident before it goes to sleep inside; in the last two cases another thread takes over, and
// the old resident goes on as an ordinary thread.
// Thread safety: every method may be called from any thread. stop() joins all threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <string>

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

  // Runs it on one of the threads. What it throws is logged: nothing that a thread of the pool runs may end the process.
  void post(Task task);
  // Runs `work` on this thread, which is the resident and calls from inside step(): it may last.
  template <class Work>
  void linger(Work&& work) {
    struct Turn {
      ~Turn() { pool.end_linger(turn); }
      Pool& pool;
      const std::uint64_t turn;
    };
    const Turn mine{*this, begin_linger()};
    work();
  }
  // Resident, and none of what lingers has lost it the residence.
  bool resident_here() const;
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
  void reside(std::unique_lock<std::mutex>& lock);
  std::uint64_t begin_linger();
  void end_linger(std::uint64_t turn);
  // Takes the residence from whoever lingers, if turn_ is still `turn` (odd).
  bool depose(std::uint64_t turn);
  void watch();
  // One more thread, or an idle one, if there is need and room. Pre: mutex_ is held.
  void call_up();
  void start_thread();
  void reap();

  const Duties duties_;
  const Options options_;
  std::atomic<std::uint64_t> turn_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> watch_asleep_{true};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable watch_changed_;
  // Guarded by mutex_.
  std::deque<Task> tasks_;
  std::list<Member> members_;
  bool has_resident_ = false;
  int n_threads_ = 0;  // alive
  int n_idle_ = 0;
  int n_called_ = 0;  // idle ones that were notified and have not come yet
  int n_asleep_ = 0;  // inside Future::wait
  base::Thread watch_;
};

}  // namespace lockstep::rpc::internal
