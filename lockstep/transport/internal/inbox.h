// A worker's inbox: one segment with a head and a ring for each of up to 1024 senders, and the bell that
// wakes the owner. Senders map it; only the owner assigns slots. Every word here may be overwritten by a
// faulty sender: a wrong bit costs a look at a ring, a wrong `asleep` a needless or a missing wake-up of this
// worker alone.
//
//   sender:  store record (ring.h); set bit; wake(asleep)       owner:  announce(asleep); load bits; sleep
//                                                               owner:  take record; clear bit; load ring again
//
// All sequentially consistent: neither does a record stay in a ring without its bit, nor the owner asleep
// with a bit set (local/wake.h).
// Thread safety: every function here.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "lockstep/base/detail/fd.h"
#include "lockstep/local/segment_table.h"
#include "lockstep/local/wake.h"
#include "lockstep/transport/internal/ring.h"

namespace lockstep::transport::internal {

using local::Mapping;

inline constexpr std::uint32_t kSlots = 1024;
inline constexpr std::uint64_t kRingBytes = 32 << 10;

struct InboxHead {
  alignas(kLine) std::atomic<std::uint32_t> asleep;                // 1: ring the bell
  alignas(kLine) std::atomic<std::uint64_t> pending[kSlots / 64];  // slots with records, or lately without
};

inline constexpr std::uint64_t kInboxPage = 4096;
inline constexpr std::uint64_t kSlotBytes = kInboxPage + kRingBytes;
inline constexpr std::uint64_t kInboxBytes = kInboxPage + kSlots * kSlotBytes;
static_assert(sizeof(InboxHead) <= kInboxPage && sizeof(RingControl) <= kInboxPage);

// Over a mapping of kInboxBytes, the owner's or a sender's.
class Inbox {
 public:
  Inbox() = default;
  explicit Inbox(Mapping mapping) : mapping_(std::move(mapping)) {}

  InboxHead& head() const { return *reinterpret_cast<InboxHead*>(mapping_->data()); }
  Ring ring(std::uint32_t slot) const {
    std::uint8_t* at = mapping_->data() + kInboxPage + slot * kSlotBytes;
    return {.control = reinterpret_cast<RingControl*>(at), .data = at + kInboxPage, .capacity = kRingBytes};
  }
  // Allocates a slot's pages, all zero. Raises kResource.
  void prepare(std::uint32_t slot) const {
    const std::uint64_t at = kInboxPage + slot * kSlotBytes;
    mapping_->discard(at, kSlotBytes);
    mapping_->commit(at, kSlotBytes);
  }
  const Mapping& mapping() const { return mapping_; }

  bool any_pending() const {
    for (const auto& word : head().pending) {
      if (word.load(std::memory_order_seq_cst) != 0) return true;
    }
    return false;
  }
  // After a record was published in `slot`.
  void announce(std::uint32_t slot, int eventfd) const {
    auto& word = head().pending[slot / 64];
    const std::uint64_t bit = std::uint64_t{1} << slot % 64;
    // Already set: it was set along with a wake-up, and the owner clears it only before it checks the ring
    // again.
    if ((word.load(std::memory_order_seq_cst) & bit) != 0) return;
    word.fetch_or(bit, std::memory_order_seq_cst);
    local::wake(bell(eventfd));
  }
  // `eventfd`: the owner's, as it came with the mapping.
  local::EventBell bell(int eventfd) const { return {.asleep = head().asleep, .eventfd = eventfd}; }

 private:
  Mapping mapping_;
};

}  // namespace lockstep::transport::internal
