// Where a worker puts the large parts of its messages: one sparse segment that others map and in which only
// the owner allocates. A block's first cache line has one word: 1 while the receiver holds the block, 0 once
// it is done, which is all that a receiver ever writes. The owner's bookkeeping is private, and it finds
// returned blocks when it needs new ones.
//
//   extent of the page heap --carve--> held by a receiver --word is 0, or its process ended--> warm --allocate--> held ...
//            ^                                                                                  |
//            '--------------------- pages beyond the bound are freed (cool) --------------------'
//
// Warm blocks keep their pages, which both sides have mapped. Memory orders: the receiver stores 0 with
// release when its last view is gone, the owner loads it with acquire before it reuses the block. Thread
// safety: every method; one lock, under which only the page heap's is taken.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/local/page_heap.h"
#include "lockstep/local/peer_process.h"
#include "lockstep/local/segment_table.h"
#include "lockstep/transport/internal/ring.h"

namespace lockstep::transport::internal {

using local::Mapping;

// Before a block's payload.
struct BlockHead {
  alignas(kLine) std::atomic<std::uint32_t> held;
};

// Who holds blocks: a process at the other end of a link.
struct Holder {
  local::PeerProcess
      process{};  // empty: its end cannot be detected; its blocks then stay until it returns them
  // The link is over; whether the process is too is checked when memory is needed.
  std::atomic<bool> link_ended{false};
};

class MessageHeap {
 public:
  static constexpr std::uint64_t kWarmBytes = 256 << 20;

  // Address space only; pages come with blocks. Raises as Segment::create.
  explicit MessageHeap(std::uint64_t n_bytes, std::uint64_t warm_bytes = kWarmBytes);

  // The offset of a payload of `n_bytes`, aligned to kLine, held by `holder` from now on. Nothing when there
  // is no memory for it.
  std::optional<std::uint64_t> allocate(std::uint64_t n_bytes, std::shared_ptr<Holder> holder);
  // Takes back a block that its holder never saw. An offset that is no block's is ignored.
  void take_back(std::uint64_t payload);

  std::uint8_t* at(std::uint64_t payload) const { return mapping_->data() + payload; }
  const Mapping& mapping() const { return mapping_; }
  // The payload at this offset is written. Who reuses the block has loaded the word that this stores, so that
  // tools which cannot see the receiver's process see the order too.
  void filled(std::uint64_t payload);
  // For tests: bytes of blocks that receivers hold, after a sweep, and of warm ones.
  std::uint64_t held_bytes();
  std::uint64_t warm_bytes();

 private:
  struct Held {
    std::uint64_t capacity = 0;
    std::shared_ptr<Holder> holder;
  };
  using Offsets = std::vector<std::uint64_t>;

  BlockHead* head(std::uint64_t block) const;
  bool returned(std::uint64_t block) const;
  std::optional<std::uint64_t> find_warm(std::uint64_t capacity) LOCKSTEP_REQUIRES(mutex_);
  std::optional<std::uint64_t> find_returned(std::uint64_t capacity) LOCKSTEP_REQUIRES(mutex_);
  std::optional<std::uint64_t> carve(std::uint64_t capacity) LOCKSTEP_REQUIRES(mutex_);
  std::optional<std::uint64_t> take_extent(std::uint64_t capacity);
  void sweep() LOCKSTEP_REQUIRES(mutex_);
  void cool(std::uint64_t bound) LOCKSTEP_REQUIRES(mutex_);

  const Mapping mapping_;
  local::PageHeap pages_;
  const std::uint64_t warm_bound_;
  base::Mutex mutex_;
  // Offsets are of blocks, heads included; capacities count the head.
  std::map<std::uint64_t, Offsets> warm_ LOCKSTEP_GUARDED_BY(mutex_);  // capacity -> blocks
  std::uint64_t warm_sum_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::unordered_map<std::uint64_t, Held> held_ LOCKSTEP_GUARDED_BY(mutex_);
  // Capacity -> held blocks, looked at in turn.
  std::map<std::uint64_t, std::vector<std::uint64_t>> turn_ LOCKSTEP_GUARDED_BY(mutex_);
  std::map<std::uint64_t, std::size_t> next_turn_ LOCKSTEP_GUARDED_BY(mutex_);
  std::size_t new_since_sweep_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
};

}  // namespace lockstep::transport::internal
