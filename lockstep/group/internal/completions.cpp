#include "lockstep/group/internal/completions.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/thread.h"
#include "lockstep/group/internal/work_state.h"

namespace lockstep::internal {
namespace {

using States = std::vector<std::shared_ptr<Work::State>>;

class Completions {
 public:
  void start() {
    const std::lock_guard lock(mutex_);
    if (stopping_ || thread_.joinable()) return;
    thread_ = Thread("ls-callback", [this] { run(); });
  }

  void hand_over(std::shared_ptr<Work::State> state) {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    over_.push_back(std::move(state));
    changed_.notify_one();
  }

  void watch(std::shared_ptr<Work::State> state) {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    watched_.push_back(std::move(state));
    changed_.notify_one();
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_one();
    }
    thread_.join();
  }

 private:
  static constexpr std::chrono::milliseconds kLook{1};

  void run() {
    States watching;
    while (true) {
      States over;
      {
        std::unique_lock lock(mutex_);
        const auto something = [&] { return stopping_ || !over_.empty() || !watched_.empty(); };
        if (watching.empty()) {
          changed_.wait(lock, something);
        } else {
          changed_.wait_for(lock, kLook, something);
        }
        if (stopping_) return;
        over.swap(over_);
        watching.insert(watching.end(), watched_.begin(), watched_.end());
        watched_.clear();
      }
      for (const auto& state : over) {
        state->settle(Deadline::never());  // short: the engine is through
        resolve(*state);
      }
      std::erase_if(watching, [](const auto& state) {
        const bool is_over = state->poll();
        if (is_over) resolve(*state);
        return is_over;
      });
    }
  }

  static void resolve(Work::State& state) {
    try {
      state.resolve();
    } catch (...) {  // libtorch logs what callbacks throw; this is for what is left
      log(LogLevel::kError, cat("a callback of ", name_of(state.type()), " #", state.sequence_number(),
                                " failed: ", current_failure().message));
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool stopping_ = false;
  States over_;
  States watched_;
  Thread thread_;
};

// Never destroyed: groups that are left while the process exits still hand over.
Completions& completions() {
  static auto& instance = *new Completions;
  return instance;
}

struct StopAtExit {
  ~StopAtExit() { completions().stop(); }
};

}  // namespace

void start_completions() {
  completions().start();
  static const StopAtExit stop_at_exit;
}

void hand_over(std::shared_ptr<Work::State> state) noexcept {
  completions().hand_over(std::move(state));
}

void watch(std::shared_ptr<Work::State> state) {
  completions().watch(std::move(state));
}

}  // namespace lockstep::internal
