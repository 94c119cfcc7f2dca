// Lets threads that are not a rank's own work on behalf of a rank of run_threads, as long as that rank is
// running: a callback then finds that rank's default group. The rank's thread outlives every such scope,
// since end() waits for them; later scopes have no effect.
// Thread safety: every method may be called from any thread. Ownership: shared by the rank's world and its
// operations in flight.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/base/detail/rank_thread.h"

namespace lockstep::internal {

class RankUse {
 public:
  explicit RankUse(base::RankThread* rank) : rank_(rank) {}

  // Later scopes do not work for the rank; blocks until the current ones have ended.
  void end() {
    std::unique_lock lock(mutex_);
    rank_ = nullptr;
    changed_.wait(lock, [this] { return n_scopes_ == 0; });
  }

  // While it exists, this thread works for the rank, if the rank has not ended. `use` may be null: the
  // process is the rank.
  class Scope {
   public:
    explicit Scope(std::shared_ptr<RankUse> use) : use_(std::move(use)) {
      if (!use_) return;
      const std::lock_guard lock(use_->mutex_);
      if (use_->rank_ == nullptr) return;
      ++use_->n_scopes_;
      scope_.emplace(use_->rank_);
    }
    ~Scope() {
      if (!scope_) return;
      scope_.reset();
      const std::lock_guard lock(use_->mutex_);
      if (--use_->n_scopes_ == 0) use_->changed_.notify_all();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const std::shared_ptr<RankUse> use_;
    std::optional<base::RankThreadScope> scope_;
  };

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  base::RankThread* rank_;
  int n_scopes_ = 0;
};

// Of the rank that the calling thread works for; null outside of run_threads.
std::shared_ptr<RankUse> current_rank_use();

}  // namespace lockstep::internal
