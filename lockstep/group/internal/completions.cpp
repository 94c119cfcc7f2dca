#include "lockstep/group/internal/completions.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/base/log.h"
#include "lockstep/group/detail/work_state.h"

namespace lockstep::internal {
namespace {

using Clock = std::chrono::steady_clock;
using StatePtr = std::shared_ptr<Work::State>;

// How often engines are asked that call nobody back.
constexpr std::chrono::milliseconds kLook{1};
// A runner that is inside one operation's callbacks for longer than this, while others wait, is replaced.
constexpr std::chrono::milliseconds kBlocked{2};
// A thread that has had nothing to do for so long ends, but for the last two.
constexpr std::chrono::seconds kIdle{5};
// More threads than this are worth a word: each is a callback that blocks.
constexpr int kMany = 64;

void complete(Work::State& state) {
  try {
    state.complete();
  } catch (...) {  // libtorch logs what callbacks throw; this is for what is left
    base::log(LogLevel::kError,
              base::cat("a callback of ", name_of(state.type()), " #", state.sequence_number(),
                        " failed: ", base::current_failure().message));
  }
}

//   over_      works whose engine has called back, in that order
//   watched_   works of engines that do not call back: polled every millisecond
//   runner_    the one thread that takes from both; the others wait in await_turn()
//
// One runner keeps callbacks in order and off the engines' threads. A thread whose callback blocks for 2 ms
// loses the role, so that callbacks may wait for each other; hence there is always a spare thread. mutex_ is
// never held while a callback runs.
class Completions {
 public:
  void start() {
    const std::lock_guard lock(mutex_);
    pid_ = ::getpid();
    if (members_.empty()) add_spare();
  }

  void hand_over(StatePtr state) {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    over_.push_back(std::move(state));
    changed_.notify_one();
  }

  void watch(StatePtr state) {
    const std::lock_guard lock(mutex_);
    if (stopped_) return;
    watched_.push_back(std::move(state));
    changed_.notify_one();
  }

  // At exit, before static objects are destroyed: callbacks may use them. Work that is handed over later is
  // dropped.
  void stop() {
    std::list<Member> members;
    {
      std::unique_lock lock(mutex_);
      if (pid_ != ::getpid()) return;  // a forked child: the threads are its parent's
      // Callbacks that block are served until they are over.
      idle_.wait(lock, [this] { return n_busy_ == 0; });
      stopped_ = true;
      changed_.notify_all();
      members.swap(members_);
    }
  }

 private:
  struct Member {
    bool over = false;
    base::Thread thread;
  };

  // All below: mutex_ held on entry and return.

  void add_spare() {
    if (stopped_) return;
    members_.remove_if([](Member& member) {
      if (member.over) member.thread.join();  // it has let go of the mutex for good, or is about to return
      return member.over;
    });
    auto& member = members_.emplace_back();
    try {
      member.thread = base::Thread("ls-completion", [this, &member] { run(member); });
      ++n_idle_;
    } catch (const std::exception& error) {
      members_.pop_back();
      base::log(LogLevel::kError, base::cat("no further thread for callbacks: ", error.what()));
      return;
    }
    if (static_cast<int>(members_.size()) == kMany) {
      base::log(
          LogLevel::kWarn,
          base::cat(kMany, " callbacks of operations' futures block at once, each on a thread of its own"));
    }
  }

  void run(Member& member) {
    std::unique_lock lock(mutex_);
    while (await_turn(lock)) {
      runner_ = &member;
      --n_idle_;
      ++n_busy_;
      if (n_idle_ == 0) add_spare();
      while (runner_ == &member && !over_.empty()) complete_next(lock);
      if (runner_ == &member) look_at_watched(lock);
      if (runner_ == &member) runner_ = nullptr;
      if (--n_busy_ == 0) idle_.notify_all();
      ++n_idle_;
    }
    --n_idle_;
    member.over = true;
  }

  // Until there is something to do and nobody does it. False: the thread may end.
  // A thread may take over when there is something due and either no runner, or one that has been inside its
  // callback for kBlocked.
  bool await_turn(std::unique_lock<std::mutex>& lock) {
    const auto idle_since = Clock::now();
    while (!stopped_) {
      const auto now = Clock::now();
      if (over_.empty() && watched_.empty()) {
        if (now - idle_since > kIdle && n_idle_ > 2) return false;
        changed_.wait_for(lock, kIdle);
        continue;
      }
      const auto due = over_.empty() ? next_look_ : now;
      const auto free = runner_ == nullptr ? now : began_ + kBlocked;
      const auto turn = std::max(due, free);
      if (now >= turn) return true;
      changed_.wait_until(lock, turn);
    }
    return false;
  }

  void complete_next(std::unique_lock<std::mutex>& lock) {
    StatePtr state = std::move(over_.front());
    over_.pop_front();
    began_ = Clock::now();
    lock.unlock();
    complete(*state);
    state.reset();  // its end may be long, too
    lock.lock();
  }

  // Polled without the lock, on a list that nobody else has meanwhile; new ones go to watched_ and are
  // spliced together afterwards.
  void look_at_watched(std::unique_lock<std::mutex>& lock) {
    if (watched_.empty() || Clock::now() < next_look_) return;
    auto watched = std::exchange(watched_, {});
    began_ = Clock::now();
    next_look_ = began_ + kLook;
    lock.unlock();
    std::deque<StatePtr> over;
    watched.remove_if([&](const StatePtr& state) {
      if (!state->poll()) return false;
      over.push_back(state);
      return true;
    });
    lock.lock();
    watched_.splice(watched_.end(), watched);
    over_.insert(over_.end(), over.begin(), over.end());
  }

  std::mutex mutex_;
  std::condition_variable changed_;  // threads without a turn wait here
  std::condition_variable idle_;
  // Guarded by mutex_.
  bool stopped_ = false;
  pid_t pid_ = -1;
  std::deque<StatePtr> over_;
  std::list<StatePtr> watched_;
  std::list<Member> members_;
  const Member* runner_ = nullptr;
  Clock::time_point began_{};      // what the runner does now
  Clock::time_point next_look_{};  // at watched_
  int n_idle_ = 0;                 // threads in await_turn, or on their way there
  int n_busy_ = 0;                 // the runner, and those that were replaced
};

// Never destroyed: groups that are left while the process exits still hand over.
Completions& completions() {
  static auto& instance = *new Completions;
  return instance;
}

struct StopCompletionsAtExit {
  ~StopCompletionsAtExit() { completions().stop(); }
};

}  // namespace

void start_completions() {
  completions().start();
  static const StopCompletionsAtExit stop_at_exit;
}

void hand_over(std::shared_ptr<Work::State> state) noexcept {
  completions().hand_over(std::move(state));
}

void watch(std::shared_ptr<Work::State> state) {
  completions().watch(std::move(state));
}

}  // namespace lockstep::internal
