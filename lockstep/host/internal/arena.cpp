#include "lockstep/host/internal/arena.h"

#include <fmt/core.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <new>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/host/internal/push.h"

namespace lockstep::comm::internal {
namespace {

// What RLIMIT_AS still allows this process to map.
std::uint64_t address_space_left() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNoLimit;
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, pages * kPage);
}

// Address space, not memory: pages exist once allocated.
std::size_t arena_bytes(int n_ranks) {
  if (const auto mib = base::environment_int(base::EnvVar::kLockstepHostArena)) {
    if (*mib < 16) {
      base::raise(ErrorKind::kUsage, fmt::format("{} must be at least 16, but is {}",
                                                 name_of(base::EnvVar::kLockstepHostArena), *mib));
    }
    return static_cast<std::size_t>(*mib) << 20;
  }
  const auto pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
  return default_arena_bytes(pages * kPage, address_space_left(), n_ranks);
}

}  // namespace

std::uint64_t default_arena_bytes(std::uint64_t memory, std::uint64_t limit, int n_ranks) {
  // kLeast is also the smallest value of the variable above. A machine with less than kFew of memory gets
  // kFew: address space alone costs nothing.
  constexpr std::uint64_t kLeast = 16 << 20, kFew = 1 << 30, kAllArenas = std::uint64_t{16} << 40;
  const std::uint64_t share = std::min(kAllArenas, limit / 2) / static_cast<std::uint64_t>(n_ranks);
  return std::max(kLeast, std::min(std::max(memory, kFew), share) / kPage * kPage);
}

Arena::Arena(const std::string& name, int rank, int n_ranks)
    : segment_(local::SegmentTable::of_process().create("lockstep-" + name, arena_bytes(n_ranks))),
      heap_(segment_, kHeapAt) {
  // Committed first: a store to a page for which there is no memory raises SIGBUS instead of an error.
  segment_->commit(0, kHeapAt);
  auto* header = new (segment_->data()) ArenaHeader();
  header->magic = kLayoutMagic;
  header->version = kLayoutVersion;
  header->rank = rank;
  header->pid = ::getpid();
  header->pid_namespace = own_pid_namespace();
  static_assert(sizeof(cpu_set_t) == sizeof(header->cores));
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) std::memcpy(header->cores, &cores, sizeof(cores));
}

void* Arena::allocate(std::size_t n_bytes) {
  const auto at = heap_.allocate(n_bytes);
  if (!at) {
    base::raise(ErrorKind::kResource,
                fmt::format("no room for {} bytes in this rank's shared arena of {} bytes; raise {}", n_bytes,
                            segment_->size(), name_of(base::EnvVar::kLockstepHostArena)));
  }
  const base::MutexLock lock(mutex_);
  used_[*at] = std::max(round_up(n_bytes, kPage), kPage);
  return segment_->data() + *at;
}

// Four at a time: one check of the available memory for several communicators.
void* Arena::allocate_block(std::size_t n_bytes) {
  constexpr std::size_t kAtOnce = 4;
  const std::size_t need = round_up(n_bytes, kPage);
  {
    const base::MutexLock lock(mutex_);
    if (auto& idle = idle_blocks_[need]; !idle.empty()) {
      void* block = idle.back();
      idle.pop_back();
      return block;
    }
  }
  auto* blocks = static_cast<std::uint8_t*>(allocate(kAtOnce * need));
  const base::MutexLock lock(mutex_);
  const auto at = static_cast<std::size_t>(blocks - segment_->data());
  // One allocation becomes four entries, since each block is freed alone.
  used_.erase(at);
  for (std::size_t k = 0; k < kAtOnce; ++k) {
    used_[at + k * need] = need;
    if (k > 0) idle_blocks_[need].push_back(blocks + k * need);
  }
  return blocks;
}

void Arena::free_block(void* memory) {
  const base::MutexLock lock(mutex_);
  const auto used =
      used_.find(static_cast<std::size_t>(static_cast<std::uint8_t*>(memory) - segment_->data()));
  // It stays in used_, where the next free_block() finds its size again; its pages stay committed.
  if (used != used_.end()) idle_blocks_[used->second].push_back(memory);
}

void Arena::free(void* memory) {
  const auto at = static_cast<std::size_t>(static_cast<std::uint8_t*>(memory) - segment_->data());
  const base::MutexLock lock(mutex_);
  const auto used = used_.find(at);
  if (used == used_.end())
    return base::log(LogLevel::kError, "free of memory that is not of this arena: ignored");
  const std::size_t length = used->second;
  used_.erase(used);
  if (!overlaps_severed(at, length)) return heap_.free(at, length);
  // A stopped rank may still write there: the offsets are never used again, only the pages and the copy are
  // freed. Two sets of pages: discard() drops those that the others still map, madvise() the private copies
  // of this process.
  segment_->discard(at, length);
  ::madvise(memory, length, MADV_DONTNEED);
}

bool Arena::in_heap(const void* p, std::size_t n_bytes) const {
  // An address before the segment becomes an offset far beyond its end.
  return heap_.contains(offset_of(p), n_bytes);
}

bool Arena::contains(const void* p, std::size_t n_bytes) const {
  if (!in_heap(p, n_bytes)) return false;
  if (n_severed() == 0) return true;
  const base::MutexLock lock(mutex_);
  return !overlaps_severed(offset_of(p), n_bytes);
}

void Arena::sever(const void* p, std::size_t n_bytes) {
  if (n_bytes == 0 || !in_heap(p, n_bytes)) return;
  const base::MutexLock lock(mutex_);
  const std::size_t end = round_up(offset_of(p) + n_bytes, kPage);
  // Pages that a neighbour's buffer had in common are private already; mapping them once more would replace
  // what this process has written there since by what the others see.
  for (std::size_t first = offset_of(p) / kPage * kPage; first < end; first += kPage) {
    if (overlaps_severed(first, kPage)) continue;
    std::size_t length = kPage;
    while (first + length < end && !overlaps_severed(first + length, kPage)) length += kPage;
    // Counted before the pages change: an operation that ends after the change finds another count
    // (Operation::believable).
    severed_[first] = length;
    n_severed_.fetch_add(1, std::memory_order_release);
    segment_->make_private(first, length);
    first += length - kPage;
  }
}

bool Arena::overlaps_severed(std::size_t at, std::size_t n_bytes) const {
  return std::ranges::any_of(
      severed_, [&](const auto& part) { return at < part.first + part.second && part.first < at + n_bytes; });
}

}  // namespace lockstep::comm::internal
