#include "lockstep/local/page_heap.h"

#include <iterator>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::local {
namespace {

// At least one; 0 when it does not fit into 64 bits.
std::uint64_t whole_pages(std::uint64_t n_bytes) {
  if (n_bytes == 0) return kPageBytes;
  return (n_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace

PageHeap::PageHeap(Mapping segment, std::uint64_t begin) : segment_(std::move(segment)), begin_(begin) {
  if (begin_ < segment_->size()) free_[begin_] = segment_->size() - begin_;
}

std::optional<std::uint64_t> PageHeap::allocate(std::uint64_t n_bytes) {
  const std::uint64_t need = whole_pages(n_bytes);
  // The range is taken before its pages are committed: the system call may take long, and runs without the
  // lock, on a range that belongs to this thread alone.
  const auto at = need == 0 ? std::nullopt : take(need);
  if (!at) return std::nullopt;
  try {
    segment_->commit(*at, need);
  } catch (...) {
    free(*at, need);  // some pages may exist
    throw;
  }
  return at;
}

void PageHeap::free(std::uint64_t at, std::uint64_t n_bytes) {
  const std::uint64_t whole = whole_pages(n_bytes);
  // Before give(): from then on another thread may allocate the range, and must find zeros.
  segment_->discard(at, whole);
  give(at, whole);
}

bool PageHeap::contains(std::uint64_t at, std::uint64_t n_bytes) const {
  return at >= begin_ && at <= segment_->size() && n_bytes <= segment_->size() - at;
}

// A linear search: there are few extents, since adjacent ones are merged.
std::optional<std::uint64_t> PageHeap::take(std::uint64_t n_bytes) {
  const base::MutexLock lock(mutex_);
  auto best = free_.end();
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->second >= n_bytes && (best == free_.end() || at->second < best->second)) best = at;
  }
  if (best == free_.end()) return std::nullopt;
  const auto [offset, length] = *best;
  free_.erase(best);
  if (length > n_bytes) free_[offset + n_bytes] = length - n_bytes;
  return offset;
}

void PageHeap::give(std::uint64_t at, std::uint64_t n_bytes) {
  const base::MutexLock lock(mutex_);
  const auto [here, fresh] = free_.emplace(at, n_bytes);
  // Freed twice: the first entry stays. The pages were discarded twice, which does no harm.
  if (!fresh) return;
  if (const auto next = std::next(here); next != free_.end() && here->first + here->second == next->first) {
    here->second += next->second;
    free_.erase(next);
  }
  if (here == free_.begin()) return;
  if (const auto before = std::prev(here); before->first + before->second == here->first) {
    before->second += here->second;
    free_.erase(here);
  }
}

}  // namespace lockstep::local
