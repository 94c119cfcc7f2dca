#include "lockstep/transport/internal/message_heap.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <new>

#include "lockstep/base/error.h"

namespace lockstep::transport::internal {
namespace {

constexpr std::uint64_t kPage = local::kPageBytes;
constexpr std::uint64_t kHead = sizeof(BlockHead);
// Blocks of up to a quarter of this are carved many at a time: allocating pages costs more than they do.
constexpr std::uint64_t kSlab = 1 << 20;
// Held blocks of the wanted size that one allocation checks.
constexpr int kLooks = 4;

std::uint64_t round_up(std::uint64_t n_bytes, std::uint64_t step) {
  return (n_bytes + step - 1) / step * step;
}

// Eight sizes per power of two, so that messages of nearly the same size share blocks, and no waste for the
// powers themselves. 0: too large for any.
std::uint64_t capacity_for(std::uint64_t n_bytes) {
  if (n_bytes > (std::uint64_t{1} << 60)) return 0;
  if (n_bytes < 8 * kPage) return round_up(n_bytes + kHead, kPage);
  return round_up(n_bytes, std::bit_floor(n_bytes) / 8) + kPage;
}

// In this order: while the link is open the receiver may be alive and reading.
bool is_dead(const Holder& holder) {
  return holder.link_ended.load(std::memory_order_acquire) && holder.process.ended();
}

}  // namespace

MessageHeap::MessageHeap(std::uint64_t n_bytes, std::uint64_t warm_bytes)
    : mapping_(local::SegmentTable::of_process().create("lockstep-heap", n_bytes)),
      pages_(mapping_, 0),
      warm_bound_(warm_bytes) {}

BlockHead* MessageHeap::head(std::uint64_t block) const {
  return reinterpret_cast<BlockHead*>(mapping_->data() + block);
}

bool MessageHeap::returned(std::uint64_t block) const {
  return head(block)->held.load(std::memory_order_acquire) == 0;
}

// From cheap to expensive: a warm block; one of the same size that was returned since (find_returned); a
// sweep over all held blocks, at most once per half as many new ones, so that its cost per allocation is
// constant; new pages; and, before giving up, everything that can be freed.
std::optional<std::uint64_t> MessageHeap::allocate(std::uint64_t n_bytes, std::shared_ptr<Holder> holder) {
  const std::uint64_t capacity = capacity_for(n_bytes);
  if (capacity == 0 || capacity > mapping_->size()) return std::nullopt;
  const base::MutexLock lock(mutex_);
  auto block = find_warm(capacity);
  if (!block) block = find_returned(capacity);
  if (!block && ++new_since_sweep_ > held_.size() / 2) {
    sweep();
    block = find_warm(capacity);
  }
  if (!block) block = carve(capacity);
  if (!block) {
    // Frees everything that no receiver holds.
    sweep();
    cool(0);
    block = carve(capacity);
  }
  if (!block) return std::nullopt;
  const std::uint64_t really = held_.contains(*block) ? held_[*block].capacity : capacity;
  held_[*block] = {.capacity = really, .holder = std::move(holder)};
  turn_[really].push_back(*block);
  head(*block)->held.store(1, std::memory_order_relaxed);  // published with the message
  return *block + kHead;
}

// The smallest warm block that wastes no more than a quarter. Leaves its capacity in held_ for the caller.
std::optional<std::uint64_t> MessageHeap::find_warm(std::uint64_t capacity) {
  const auto found = warm_.lower_bound(capacity);
  if (found == warm_.end() || found->first > capacity + capacity / 4) return std::nullopt;
  const std::uint64_t block = found->second.back(), really = found->first;
  found->second.pop_back();
  if (found->second.empty()) warm_.erase(found);
  warm_sum_ -= really;
  held_[block].capacity = really;
  return block;
}

// Blocks are looked at in turn, not from the beginning: one that a receiver keeps for long does not hide the
// others.
std::optional<std::uint64_t> MessageHeap::find_returned(std::uint64_t capacity) {
  const auto found = turn_.find(capacity);
  if (found == turn_.end()) return std::nullopt;
  auto& blocks = found->second;
  auto& next = next_turn_[capacity];
  for (int i = 0; i < kLooks && !blocks.empty(); ++i) {
    if (next >= blocks.size()) next = 0;
    const std::uint64_t block = blocks[next];
    if (!returned(block)) {
      ++next;
      continue;
    }
    blocks[next] = blocks.back();
    blocks.pop_back();
    return block;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> MessageHeap::carve(std::uint64_t capacity) {
  const std::uint64_t wanted = capacity <= kSlab / 4 ? kSlab / capacity * capacity : capacity;
  auto extent = take_extent(wanted);
  const std::uint64_t got = extent ? wanted : capacity;
  if (!extent && wanted != capacity) extent = take_extent(capacity);
  if (!extent) return std::nullopt;
  for (std::uint64_t at = capacity; at < got; at += capacity) {
    warm_[capacity].push_back(*extent + at);
    warm_sum_ += capacity;
  }
  held_[*extent].capacity = capacity;
  return extent;
}

// Nothing also when there is no memory: the caller tries a smaller extent, or fails.
std::optional<std::uint64_t> MessageHeap::take_extent(std::uint64_t capacity) {
  try {
    return pages_.allocate(capacity);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Everything that was returned becomes warm. A process is asked once per sweep whether it has ended.
void MessageHeap::sweep() {
  new_since_sweep_ = 0;
  std::map<const Holder*, bool> dead;
  for (auto& [capacity, blocks] : turn_) {
    std::erase_if(blocks, [&, size = capacity](std::uint64_t block) LOCKSTEP_REQUIRES(mutex_) {
      const auto held = held_.find(block);
      const Holder* holder = held->second.holder.get();
      if (!returned(block)) {
        if (holder == nullptr) return false;
        const auto [known, fresh] = dead.try_emplace(holder, false);
        if (fresh) known->second = is_dead(*holder);
        if (!known->second) return false;
      }
      held_.erase(held);
      warm_[size].push_back(block);
      warm_sum_ += size;
      return true;
    });
  }
  std::erase_if(turn_, [](const auto& entry) { return entry.second.empty(); });
  std::erase_if(next_turn_,
                [&](const auto& entry) LOCKSTEP_REQUIRES(mutex_) { return !turn_.contains(entry.first); });
  cool(warm_bound_);
}

// Frees pages, of the largest blocks first: few system calls.
void MessageHeap::cool(std::uint64_t bound) {
  while (warm_sum_ > bound) {
    const auto largest = std::prev(warm_.end());
    const std::uint64_t block = largest->second.back(), capacity = largest->first;
    largest->second.pop_back();
    if (largest->second.empty()) warm_.erase(largest);
    warm_sum_ -= capacity;
    pages_.free(block, capacity);
  }
}

// Only marks the block as returned; the next allocation or sweep finds it like any other. relaxed: it is read
// under the same mutex.
void MessageHeap::take_back(std::uint64_t payload) {
  const base::MutexLock lock(mutex_);
  if (payload >= kHead && held_.contains(payload - kHead)) {
    head(payload - kHead)->held.store(0, std::memory_order_relaxed);
  }
}

void MessageHeap::filled(std::uint64_t payload) {
  head(payload - kHead)->held.store(1, std::memory_order_release);
}

std::uint64_t MessageHeap::held_bytes() {
  const base::MutexLock lock(mutex_);
  sweep();
  std::uint64_t sum = 0;
  for (const auto& [block, held] : held_) sum += held.capacity;
  return sum;
}

std::uint64_t MessageHeap::warm_bytes() {
  const base::MutexLock lock(mutex_);
  return warm_sum_;
}

}  // namespace lockstep::transport::internal
