#include "lockstep/rpc/internal/pool.h"

#include <sched.h>

#include <chrono>
#include <thread>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/rpc/failure.h"

namespace lockstep::rpc::internal {
namespace {

using Clock = std::chrono::steady_clock;

// How long the poller keeps looking after the last message before it sleeps: a core woken from sleep takes
// tens of microseconds, and a caller that has just been answered often calls again.
constexpr auto kLook = std::chrono::microseconds(50);
// A poller inside long work for longer than this is replaced: at most twice as long passes before the next
// message is taken.
constexpr auto kAway = std::chrono::microseconds(500);
// After so many looks at which nothing happened the watch sleeps until begin_long() wakes it.
constexpr int kCalmLooks = 20;
constexpr auto kIdleFor = std::chrono::seconds(5);

// Which pool this thread belongs to, and whether it is the poller.
thread_local const Pool* my_pool = nullptr;
thread_local bool is_poller = false;
thread_local std::uint64_t long_turn = 0;  // the odd turn this thread began; 0: none

}  // namespace

struct Pool::Member {
  bool over = false;  // accessed under the pool's mutex_, which a member cannot name in an annotation
  base::Thread thread;
};

Pool::Pool(Duties duties, Options options) : duties_(std::move(duties)), options_(options) {}

void Pool::start() {
  const base::MutexLock lock(mutex_);
  start_thread();
  watch_ = base::Thread("ls-rpc-watch", [this] { watch(); });
}

Pool::~Pool() {
  stop();
}

bool Pool::is_mine() const {
  return my_pool == this;
}
bool Pool::poller_here() const {
  return my_pool == this && is_poller;
}

int Pool::n_threads() const {
  const base::MutexLock lock(mutex_);
  return n_threads_;
}

int Pool::n_idle() const {
  const base::MutexLock lock(mutex_);
  return n_idle_ + (has_poller_ && turn_.load() % 2 == 0 ? 1 : 0);
}

void Pool::post(Task task) {
  const base::MutexLock lock(mutex_);
  if (stopping_) return;
  tasks_.push_back(std::move(task));
  call_up();
}

// n_called_ counts idle threads that were notified and have not taken the lock yet: without it, two posts in
// a row would both count on the same idle thread. Every thread looks for tasks again before it sleeps, so no
// task is left without one.
void Pool::call_up() {
  const auto n_needed = static_cast<int>(tasks_.size()) + (has_poller_ ? 0 : 1);
  if (n_idle_ > n_called_) {
    if (n_called_ < n_needed) {
      ++n_called_;
      changed_.notify_one();
    }
    return;
  }
  // There must be a poller, whatever the limit says: what it receives may be what all others wait for.
  const bool room = n_threads_ - n_asleep_ - (has_poller_ ? 1 : 0) < options_.n_threads;
  if (n_called_ < n_needed && (room || !has_poller_)) start_thread();
}

void Pool::start_thread() {
  reap();
  auto& member = members_.emplace_back();
  ++n_threads_;
  try {
    member.thread = base::Thread("ls-rpc", [this, &member] { work(member); });
  } catch (const std::exception& error) {
    --n_threads_;
    members_.pop_back();
    base::log(LogLevel::kError, std::string("no thread for an RPC agent: ") + error.what());
  }
}

void Pool::reap() {
  members_.remove_if([](Member& member) {
    if (!member.over) return false;
    member.thread.join();
    return true;
  });
}

void Pool::work(Member& member) {
  my_pool = this;
  const base::RankThreadScope rank(options_.rank);
  base::MutexLock lock(mutex_);
  for (;;) {
    if (stopping_) break;
    if (!has_poller_) {
      // Before any task: what arrives may be what a task waits for. Tasks that are queued need another
      // thread, which call_up() counts as if this one were the poller already.
      if (!tasks_.empty()) {
        has_poller_ = true;
        call_up();
        has_poller_ = false;
      }
      poll();
      continue;
    }
    if (!tasks_.empty()) {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        task();
      } catch (...) {
        log_current_failure("a task of an RPC agent threw");
      }
      task = nullptr;
      lock.lock();
      continue;
    }
    // An idle thread ends after kIdleFor; two stay, the poller and one that can replace it without the cost
    // of a new thread.
    ++n_idle_;
    const bool called = changed_.wait_for(mutex_, kIdleFor, [this]() LOCKSTEP_REQUIRES(mutex_) {
      return stopping_ || n_called_ > 0 || !has_poller_ || !tasks_.empty();
    });
    --n_idle_;
    if (n_called_ > 0) --n_called_;
    if (!called && n_threads_ > 2) break;
  }
  --n_threads_;
  member.over = true;
}

// Until the pool stops, or this thread is not the poller any more.
void Pool::look_for_work() {
  auto quiet_since = Clock::now();
  while (is_poller && !stopping_.load(std::memory_order_relaxed)) {
    if (duties_.step()) {
      if (is_poller) quiet_since = Clock::now();
      continue;
    }
    if (!is_poller) break;  // what its step ran took too long
    if (Clock::now() - quiet_since < kLook) {
      ::sched_yield();
      continue;
    }
    duties_.rest();
    quiet_since = Clock::now();
  }
}

void Pool::poll() {
  has_poller_ = true;
  is_poller = true;
  {
    const base::MutexUnlock open(mutex_);
    look_for_work();
  }
  if (is_poller) {  // the pool stops; otherwise depose() has cleared has_poller_, and another thread may have set it again
    is_poller = false;
    has_poller_ = false;
  }
}

// begin_long() and watch() may not miss each other: either the watch sees the new turn and keeps looking, or
// this thread sees that it is asleep and wakes it. Each stores, then loads what the other stored; seq_cst
// keeps either from reading first.
std::uint64_t Pool::begin_long() {
  // Relaxed: turn_ is even here, so no other thread changes it.
  const std::uint64_t turn = turn_.load(std::memory_order_relaxed) + 1;
  turn_.store(turn, std::memory_order_seq_cst);
  long_turn = turn;
  if (watch_asleep_.load(std::memory_order_seq_cst)) {
    const base::MutexLock lock(mutex_);
    watch_asleep_ = false;
    watch_changed_.notify_one();
  }
  return turn;
}

void Pool::end_long(std::uint64_t turn) {
  long_turn = 0;
  std::uint64_t expected = turn;
  // Fails when this thread was deposed meanwhile.
  if (is_poller && !turn_.compare_exchange_strong(expected, turn + 1)) is_poller = false;
}

// Between the compare-and-swap and has_poller_ = false nobody polls, which is harmless: the thread that made
// the swap is about to call one up. The swap comes before the lock, so that the thread inside long work never
// needs the lock to end it.
bool Pool::depose(std::uint64_t turn) {
  if (turn % 2 == 0 || !turn_.compare_exchange_strong(turn, turn + 1)) return false;
  const base::MutexLock lock(mutex_);
  has_poller_ = false;
  if (!stopping_) call_up();
  return true;
}

// Deposes a poller that is found at the same odd turn twice, kAway apart.
void Pool::watch() {
  std::uint64_t seen = 0;
  int calm = 0;
  while (!stopping_.load()) {
    std::this_thread::sleep_for(kAway);
    const std::uint64_t now = turn_.load();
    if (now != seen) {
      seen = now;
      calm = 0;
    } else if (now % 2 == 1) {
      depose(now);
    } else if (++calm > kCalmLooks) {
      const base::MutexLock lock(mutex_);
      watch_asleep_.store(true, std::memory_order_seq_cst);
      if (turn_.load(std::memory_order_seq_cst) == seen) {
        watch_changed_.wait(mutex_, [this] { return stopping_ || !watch_asleep_; });
      }
      watch_asleep_ = false;
      calm = 0;
    }
  }
}

void Pool::before_sleep() {
  if (my_pool != this) return;
  const bool was_poller = std::exchange(is_poller, false);
  // This thread is about to block inside long work: it deposes itself, unless the watch was quicker.
  if (was_poller && long_turn != 0) depose(long_turn);
  const base::MutexLock lock(mutex_);
  if (was_poller && long_turn == 0) {  // it blocks inside step(), outside run_long()
    has_poller_ = false;
    call_up();
  }
  ++n_asleep_;
  if (!tasks_.empty()) call_up();
}

void Pool::after_sleep() {
  if (my_pool != this) return;
  const base::MutexLock lock(mutex_);
  --n_asleep_;
}

// The watch first, so that no thread is called up any more. Then the members: their destructors join, outside
// mutex_, which they need to end. Tasks that are left are destroyed after the threads, here.
void Pool::stop() {
  if (is_mine()) base::raise(ErrorKind::kUsage, "an RPC agent cannot be shut down by one of its own threads");
  std::list<Member> members;
  std::deque<Task> tasks;
  {
    const base::MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    watch_changed_.notify_all();
  }
  duties_.wake();
  watch_.join();
  {
    const base::MutexLock lock(mutex_);
    members.swap(members_);
    tasks.swap(tasks_);
  }
  members.clear();
}

}  // namespace lockstep::rpc::internal
