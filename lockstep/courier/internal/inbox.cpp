#include "lockstep/courier/internal/inbox.h"

namespace lockstep::courier::internal {

void ring_bell(int bell) noexcept {
  const std::uint64_t one = 1;
  // Full means that it rings already.
  [[maybe_unused]] const auto written = ::write(bell, &one, sizeof one);
}

void Inbox::knock(int bell) const {
  auto& asleep = head().asleep;
  if (asleep.load(std::memory_order_seq_cst) == 1 && asleep.exchange(0, std::memory_order_seq_cst) == 1)
    ring_bell(bell);
}

}  // namespace lockstep::courier::internal
