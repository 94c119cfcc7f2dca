// Allocates extents of whole pages in a sparse segment, for the process that made it. Pages exist from
// allocate() to free(). Best fit among the free extents; adjacent ones are merged. What an extent contains
// (blocks, size classes, who may still write there) is the caller's concern. The bookkeeping is in private
// memory, so no other process can corrupt it.
//
// Thread safety: every method may be called from any thread. The system calls that commit and discard pages
// are made outside the lock.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/local/segment_table.h"

namespace lockstep::local {

inline constexpr std::uint64_t kPageBytes = 4096;

class PageHeap {
 public:
  // Over [begin, size) of a segment that this process made; `begin` is a multiple of kPageBytes.
  PageHeap(Mapping segment, std::uint64_t begin);

  // The offset of `n_bytes`, rounded up to pages: committed, and all zero. Nothing when no extent is that
  // large; raises kResource when there is no memory for it, and then takes nothing.
  std::optional<std::uint64_t> allocate(std::uint64_t n_bytes);
  // Returns the pages to the system and the range to the heap: any part of what was allocated, in whole
  // pages, once.
  void free(std::uint64_t at, std::uint64_t n_bytes);
  // The range is inside the heap, allocated or not.
  bool contains(std::uint64_t at, std::uint64_t n_bytes) const;

 private:
  std::optional<std::uint64_t> take(std::uint64_t n_bytes) LOCKSTEP_EXCLUDES(mutex_);
  void give(std::uint64_t at, std::uint64_t n_bytes) LOCKSTEP_EXCLUDES(mutex_);

  const Mapping segment_;
  const std::uint64_t begin_;
  base::Mutex mutex_;
  // Offset -> bytes of each free extent; no two are adjacent, and none has pages.
  std::map<std::uint64_t, std::uint64_t> free_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::local
