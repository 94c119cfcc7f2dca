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

// How long the resident looks for more after the last message before it sleeps. A core that is woken from sleep takes tens of
// microseconds; a caller that has just been answered often asks again.
constexpr auto kLook = std::chrono::microseconds(50);
// A resident that is away longer than this is replaced.
constexpr auto kAway = std::chrono::microseconds(500);
// The watch sleeps deeply after so many looks at which nothing happened.
constexpr int kCalmLooks = 20;
constexpr auto kIdleFor = std::chrono::seconds(5);

// Which pool this thread belongs to, and whether it is the resident.
thread_local const Pool* my_pool = nullptr;
thread_local bool resident = false;
thread_local std::uint64_t lingering = 0;  // the odd turn this thread began; 0: none

}  // namespace

struct Pool::Member {
  bool over = false;  // guarded by the pool's mutex_
  base::Thread thread;
};

Pool::Pool(Duties duties, Options options) : duties_(std::move(duties)), options_(options) {}

void Pool::start() {
  const std::lock_guard lock(mutex_);
  start_thread();
  watch_ = base::Thread("ls-rpc-watch", [this] { watch(); });
}

Pool::~Pool() {
  stop();
}

bool Pool::is_mine() const {
  return my_pool == this;
}
bool Pool::resident_here() const {
  return my_pool == this && resident;
}

int Pool::n_threads() const {
  const std::lock_guard lock(mutex_);
  return n_threads_;
}

int Pool::n_idle() const {
  const std::lock_guard lock(mutex_);
  return n_idle_ + (has_resident_ && turn_.load() % 2 == 0 ? 1 : 0);
}

void Pool::post(Task task) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  tasks_.push_back(std::move(task));
  call_up();
}

void Pool::call_up() {
  const auto n_needed = static_cast<int>(tasks_.size()) + (has_resident_ ? 0 : 1);
  if (n_idle_ > n_called_) {
    if (n_called_ < n_needed) {
      ++n_called_;
      changed_.notify_one();
    }
    return;
  }
  // The residence must be filled whatever the limit says.
  const bool room = n_threads_ - n_asleep_ - (has_resident_ ? 1 : 0) < options_.n_threads;
  if (n_called_ < n_needed && (room || !has_resident_)) start_thread();
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
  std::unique_lock lock(mutex_);
  for (;;) {
    if (stopping_) break;
    if (!has_resident_) {
      // First of all: what arrives may be what a task waits for.
      if (!tasks_.empty()) {
        has_resident_ = true;
        call_up();
        has_resident_ = false;
      }
      reside(lock);
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
    ++n_idle_;
    const bool called = changed_.wait_for(
        lock, kIdleFor, [this] { return stopping_ || n_called_ > 0 || !has_resident_ || !tasks_.empty(); });
    --n_idle_;
    if (n_called_ > 0) --n_called_;
    if (!called && n_threads_ > 2) break;
  }
  --n_threads_;
  member.over = true;
}

void Pool::reside(std::unique_lock<std::mutex>& lock) {
  has_resident_ = true;
  resident = true;
  lock.unlock();
  auto quiet_since = Clock::now();
  while (resident && !stopping_.load(std::memory_order_relaxed)) {
    if (duties_.step()) {
      if (resident) quiet_since = Clock::now();
      continue;
    }
    if (!resident) break;  // what its step ran took too long
    if (Clock::now() - quiet_since < kLook) {
      ::sched_yield();
      continue;
    }
    duties_.rest();
    quiet_since = Clock::now();
  }
  lock.lock();
  if (resident) {  // stopping; else someone else has it
    resident = false;
    has_resident_ = false;
  }
}

std::uint64_t Pool::begin_linger() {
  const std::uint64_t turn = turn_.load(std::memory_order_relaxed) + 1;
  turn_.store(turn, std::memory_order_seq_cst);
  lingering = turn;
  if (watch_asleep_.load(std::memory_order_seq_cst)) {
    const std::lock_guard lock(mutex_);
    watch_asleep_ = false;
    watch_changed_.notify_one();
  }
  return turn;
}

void Pool::end_linger(std::uint64_t turn) {
  lingering = 0;
  std::uint64_t expected = turn;
  // Fails when another thread was made resident meanwhile; then this one is not any more.
  if (resident && !turn_.compare_exchange_strong(expected, turn + 1)) resident = false;
}

bool Pool::depose(std::uint64_t turn) {
  if (turn % 2 == 0 || !turn_.compare_exchange_strong(turn, turn + 1)) return false;
  const std::lock_guard lock(mutex_);
  has_resident_ = false;
  if (!stopping_) call_up();
  return true;
}

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
      std::unique_lock lock(mutex_);
      watch_asleep_.store(true, std::memory_order_seq_cst);
      if (turn_.load(std::memory_order_seq_cst) == seen) {
        watch_changed_.wait(lock, [this] { return stopping_ || !watch_asleep_; });
      }
      watch_asleep_ = false;
      calm = 0;
    }
  }
}

void Pool::before_sleep() {
  if (my_pool != this) return;
  const bool was_resident = std::exchange(resident, false);
  // Deposed by itself, unless the watch was quicker.
  if (was_resident && lingering != 0) depose(lingering);
  const std::lock_guard lock(mutex_);
  if (was_resident && lingering == 0) {  // asleep where nobody expected it
    has_resident_ = false;
    call_up();
  }
  ++n_asleep_;
  if (!tasks_.empty()) call_up();
}

void Pool::after_sleep() {
  if (my_pool != this) return;
  const std::lock_guard lock(mutex_);
  --n_asleep_;
}

void Pool::stop() {
  if (is_mine()) base::raise(ErrorKind::kUsage, "an RPC agent cannot be shut down by one of its own threads");
  std::list<Member> members;
  std::deque<Task> tasks;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    watch_changed_.notify_all();
  }
  duties_.wake();
  watch_.join();
  {
    const std::lock_guard lock(mutex_);
    members.swap(members_);
    tasks.swap(tasks_);
  }
  members.clear();
}

}  // namespace lockstep::rpc::internal
