// The pages of a sparse segment, handed out by the process that made it: whole extents, which exist once taken and are gone
// again once given back. Best fit among the free ones, of which neighbours are joined. What is in an extent (blocks, size
// classes, who may still write there) is its owner's business; the books are private, so nobody else can damage them.
//
// Thread safety: every method. Taking and giving back ask the kernel for pages, outside the lock.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "lockstep/local/segment_table.h"

namespace lockstep::local {

inline constexpr std::uint64_t kPageBytes = 4096;

class PageHeap {
 public:
  // Over [begin, size) of a segment that this process made; `begin` is a multiple of kPageBytes.
  PageHeap(Mapping segment, std::uint64_t begin);

  // The offset of `n_bytes`, rounded up to pages: committed, and all zero. Nothing when no extent is that large; raises
  // kResource when there is no memory for it, with nothing taken.
  std::optional<std::uint64_t> allocate(std::uint64_t n_bytes);
  // Gives pages back to the system and the place to the heap: any part of what was allocated, whole pages, once.
  void free(std::uint64_t at, std::uint64_t n_bytes);
  // It lies in the heap, free or not.
  bool contains(std::uint64_t at, std::uint64_t n_bytes) const;

 private:
  std::optional<std::uint64_t> take(std::uint64_t n_bytes);
  void give(std::uint64_t at, std::uint64_t n_bytes);

  const Mapping segment_;
  const std::uint64_t begin_;
  std::mutex mutex_;
  // Guarded by mutex_: offset -> bytes, without pages; never adjacent.
  std::map<std::uint64_t, std::uint64_t> free_;
};

}  // namespace lockstep::local
