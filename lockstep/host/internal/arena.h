// A rank's own arena: the segment others map, and the heap in it.
// Thread safety: allocate, free and contains may be called from any thread. The segment is shared with rank
// threads of the same process, which must use the same mapping (two mappings of one memory look like races to
// TSan).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/host/internal/layout.h"
#include "lockstep/local/page_heap.h"
#include "lockstep/local/segment_table.h"

namespace lockstep::comm::internal {

inline constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();
// How much address space an arena gets when the user does not say: as much as the machine has memory, but all
// arenas of `n_ranks` ranks, which every process maps, take no more than 16 TiB (an eighth of what x86-64
// has) nor half of `limit`, what the process may still map.
std::uint64_t default_arena_bytes(std::uint64_t memory, std::uint64_t limit, int n_ranks);

class Arena {
 public:
  // Creates the segment and commits everything below the heap: missing memory is a kResource error here.
  Arena(const std::string& name, int rank, int n_ranks);

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(segment_->data()); }
  std::uint64_t offset_of(const void* p) const {
    return static_cast<std::uint64_t>(static_cast<const std::uint8_t*>(p) - segment_->data());
  }
  std::uint8_t* base() const { return segment_->data(); }
  std::size_t size() const { return segment_->size(); }
  const local::Mapping& segment() const { return segment_; }

  // Whole pages, zeroed. Raises kResource when there is no memory or no room.
  void* allocate(std::size_t n_bytes);
  // Returns the pages to the system. Pointers that allocate did not return are ignored with a log line.
  void free(void* memory);
  // The same for what communicators allocate: freed pages are kept and reused as they are, so that creating a
  // communicator costs neither a check of the available memory nor page faults on every rank. Not zeroed.
  void* allocate_block(std::size_t n_bytes);
  void free_block(void* memory);
  bool in_heap(const void* p, std::size_t n_bytes) const;
  // True when [p, p + n_bytes) is in the heap and the others see all of it.
  bool contains(const void* p, std::size_t n_bytes) const;

  // Unshares the pages of a buffer: this process gets private copies at the same address, and the others keep
  // the old pages. For a stopped process that may continue to write there at any time, while the owner needs
  // its buffer. contains() is false for it from now on, and its offsets in the arena are never used again.
  // Pages that are private already stay as they are. Raises kResource.
  void sever(const void* p, std::size_t n_bytes);
  // How often that happened. Read it before a buffer is published: if it has changed when the operation ends,
  // check whether the buffer is still shared.
  std::uint32_t n_severed() const { return n_severed_.load(std::memory_order_acquire); }

 private:
  // Pages, not buffers: a neighbour in the same page counts as severed too.
  bool overlaps_severed(std::size_t at, std::size_t n_bytes) const LOCKSTEP_REQUIRES(mutex_);

  const local::Mapping segment_;
  local::PageHeap heap_;
  std::atomic<std::uint32_t> n_severed_{0};
  mutable base::Mutex mutex_;
  // Offset -> length, in pages' bytes.
  std::map<std::size_t, std::size_t> used_ LOCKSTEP_GUARDED_BY(mutex_);
  std::map<std::size_t, std::size_t> severed_ LOCKSTEP_GUARDED_BY(mutex_);
  // By size in pages' bytes.
  std::map<std::size_t, std::vector<void*>> idle_blocks_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::comm::internal
