#include "lockstep/group/detail/group_state.h"

#include <algorithm>

#include "lockstep/base/detail/text.h"
#include "lockstep/group/detail/work_state.h"

namespace lockstep::internal {
namespace {

// How long close() waits for operations in flight before it aborts them.
constexpr Milliseconds kLeaveGrace{2000};
// The ABI promises that an abort ends operations within 100 ms; a loaded machine gets more.
constexpr Milliseconds kAbortGrace{5000};
// Messages looked at by one reap(), so that many unanswered ones cost each operation little.
constexpr int kMessagesPerReap = 4;

}  // namespace

std::string GroupState::describe(const char* name, std::uint64_t sequence,
                                 const std::source_location& where) const {
  char text[kWhereCapacity];
  write_where(where, text);
  return base::cat(name, " #", sequence, " of group \"", this->name(), "\" (rank ", rank(), " of ", size(),
                   ", called at ", text, ")");
}

void GroupState::keep(std::shared_ptr<Work::State> state) {
  const std::lock_guard lock(mutex_);
  auto& list = state->is_message() ? messages_ : collectives_;
  list.push_back(std::move(state));
  n_unfinished_.fetch_add(1, std::memory_order_relaxed);
}

void GroupState::forget(const Work::State* state) noexcept {
  std::shared_ptr<Work::State> last;  // may be the last owner: released after the lock
  const std::lock_guard lock(mutex_);
  auto& list = state->is_message() ? messages_ : collectives_;
  const auto found = std::ranges::find(list, state, [](const auto& kept) { return kept.get(); });
  if (found == list.end()) return;
  last = std::move(*found);
  list.erase(found);
  n_unfinished_.fetch_sub(1, std::memory_order_relaxed);
}

void GroupState::reap() {
  if (n_unfinished_.load(std::memory_order_relaxed) == 0) [[likely]]
    return;
  // Collectives end in the order they were started, so the first that is not over stops the search.
  while (true) {
    std::shared_ptr<Work::State> first;
    {
      const std::lock_guard lock(mutex_);
      if (collectives_.empty()) break;
      first = collectives_.front();
    }
    if (!first->poll()) break;
  }
  for (int i = 0; i < kMessagesPerReap; ++i) {
    std::shared_ptr<Work::State> message;
    {
      const std::lock_guard lock(mutex_);
      if (messages_.empty()) return;
      message = messages_.front();
      messages_.splice(messages_.end(), messages_, messages_.begin());
    }
    message->poll();
  }
}

void GroupState::close(const std::string& cause) {
  if (closed_.exchange(true)) return;
  std::vector<std::shared_ptr<Work::State>> pending;
  {
    const std::lock_guard lock(mutex_);
    pending.assign(collectives_.begin(), collectives_.end());
    pending.insert(pending.end(), messages_.begin(), messages_.end());
  }
  // A rank that gives up must say so at once; an orderly one lets its last operations end.
  auto deadline = cause.empty() ? Deadline::after(kLeaveGrace) : Deadline::now();
  bool settled = true;
  for (const auto& state : pending) settled = state->settle(deadline) && settled;
  if (!settled) {
    if (cause.empty()) {
      abort(base::cat("rank ", rank(), " left group \"", name(), "\" with operations still running"));
    } else {
      leave(cause);
    }
    deadline = Deadline::after(kAbortGrace);
    for (const auto& state : pending) state->settle(deadline);
  }
  leave(cause);
}

void GroupState::settle_late(Work::State& state) {
  state.settle(Deadline::after(kAbortGrace));
}

}  // namespace lockstep::internal
