// A rank's own arena: the segment others map, and the heap in it.
// Thread safety: allocate, free and contains may be called from any thread. The segment is shared with rank threads
// of the same process, which must use the same mapping (two mappings of one memory look like races to TSan).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/host/internal/layout.h"
#include "lockstep/local/page_heap.h"
#include "lockstep/local/segment_table.h"

namespace lockstep::comm::internal {

inline constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();
// How much address space an arena gets when the user does not say: as much as the machine has memory, but all arenas of
// `n_ranks` ranks, which every process maps, take no more than 16 TiB (an eighth of what x86-64 has) nor half of
// `limit`, what the process may still map.
std::uint64_t default_arena_bytes(std::uint64_t memory, std::uint64_t limit, int n_ranks);

class Arena {
 public:
  // Makes the segment and commits everything below the heap: memory that cannot be had is a kResource error here.
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
  // Gives the pages back. Pointers that allocate did not return are ignored with a log line.
  void free(void* memory);
  // The same for what comes and goes with communicators: pages that were given back are used again as they are, so that
  // making one costs neither a look at the memory left nor page faults on every rank. Not zeroed.
  void* allocate_block(std::size_t n_bytes);
  void free_block(void* memory);
  // True when [p, p + n_bytes) lies in the heap and the others see it.
  bool contains(const void* p, std::size_t n_bytes) const;

  // Takes the pages of a buffer away from the others, who keep the memory they have mapped: a process that does not run
  // may go on writing there for ever, and the buffer's owner wants it back. It keeps address and content; contains() is
  // false for it from now on, and its place in the arena is not used again. Raises kResource.
  void sever(const void* p, std::size_t n_bytes);
  // How often that happened: who published a buffer before and finds another number must look whether it is still shared.
  std::uint32_t n_severed() const { return n_severed_.load(std::memory_order_acquire); }

 private:
  bool overlaps_severed(std::size_t at, std::size_t n_bytes) const;

  const local::Mapping segment_;
  local::PageHeap heap_;
  std::atomic<std::uint32_t> n_severed_{0};
  mutable std::mutex mutex_;
  // Guarded by mutex_: offset -> length, in pages' bytes.
  std::map<std::size_t, std::size_t> used_;
  std::map<std::size_t, std::size_t> severed_;
  std::map<std::size_t, std::vector<void*>> idle_blocks_;  // by size in pages' bytes
};

}  // namespace lockstep::comm::internal
