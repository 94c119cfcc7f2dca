#include "lockstep/group/detail/group_factory.h"

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::internal {

Members::Members(std::vector<int> ranks) : ranks_(std::move(ranks)) {
  for (std::size_t i = 0; identity_ && i < ranks_.size(); ++i) identity_ = ranks_[i] == static_cast<int>(i);
}

int Members::index_of(int world_rank) const noexcept {
  const int size = static_cast<int>(ranks_.size());
  if (identity_) return world_rank >= 0 && world_rank < size ? world_rank : -1;
  const auto found = std::ranges::lower_bound(ranks_, world_rank);
  return found != ranks_.end() && *found == world_rank ? static_cast<int>(found - ranks_.begin()) : -1;
}

void GroupShared::completed(const WorkInfo& info) noexcept {
  if (!has_hook.load(std::memory_order_acquire)) return;
  try {
    hook(info);
  } catch (...) {
    base::log(LogLevel::kError, base::cat("the completion hook threw after ", info.op, " #",
                                          info.sequence_number, ": ", base::current_failure().message));
  }
}

}  // namespace lockstep::internal
