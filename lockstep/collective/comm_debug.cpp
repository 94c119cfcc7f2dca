#include "lockstep/collective/comm_debug.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/base/detail/text.h"

namespace lockstep {
namespace {

struct OpenScopes {
  std::atomic<int> n{0};  // so that operations outside every scope take no lock
  std::mutex mutex;
  std::vector<CommDebugScope*> scopes;  // guarded by mutex
};
OpenScopes& open_scopes() {
  static OpenScopes* const open = new OpenScopes;
  return *open;
}

std::size_t slot(OpType type) {
  return static_cast<std::size_t>(type);
}

}  // namespace

CommDebugScope::CommDebugScope() : rank_(base::this_rank_thread()) {
  auto& open = open_scopes();
  const std::lock_guard lock(open.mutex);
  open.scopes.push_back(this);
  open.n.store(static_cast<int>(open.scopes.size()), std::memory_order_relaxed);
}

CommDebugScope::~CommDebugScope() {
  auto& open = open_scopes();
  const std::lock_guard lock(open.mutex);
  std::erase(open.scopes, this);
  open.n.store(static_cast<int>(open.scopes.size()), std::memory_order_relaxed);
}

std::int64_t CommDebugScope::count(OpType type) const {
  return slot(type) < kTypes ? counts_[slot(type)].load(std::memory_order_relaxed) : 0;
}

std::int64_t CommDebugScope::total() const {
  std::int64_t sum = 0;
  for (const auto& n : counts_) sum += n.load(std::memory_order_relaxed);
  return sum;
}

std::string CommDebugScope::describe() const {
  std::string text;
  for (std::size_t i = 0; i < kTypes; ++i) {
    const auto n = counts_[i].load(std::memory_order_relaxed);
    if (n == 0) continue;
    if (!text.empty()) text += ", ";
    text += base::cat(name_of(static_cast<OpType>(i)), " ", n);
  }
  return text.empty() ? "none" : text;
}

void internal::count_operation(OpType type) noexcept {
  auto& open = open_scopes();
  if (open.n.load(std::memory_order_relaxed) == 0) [[likely]]
    return;
  const std::lock_guard lock(open.mutex);
  for (auto* scope : open.scopes) {
    if (scope->rank_ != base::this_rank_thread() || slot(type) >= CommDebugScope::kTypes) continue;
    scope->counts_[slot(type)].fetch_add(1, std::memory_order_relaxed);
  }
}

}  // namespace lockstep
