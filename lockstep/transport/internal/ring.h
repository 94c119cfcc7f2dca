// One direction of a connection in shared memory: a ring of records that one process writes and one reads.
//
//   data:  | free | record | record | ... | free |        positions grow for ever; the offset is position % capacity
//                 ^ head (reader's)       ^ tail (writer's)
//
// Invariants: head <= tail <= head + capacity, all multiples of a cache line. The writer moves `tail` last,
// so a writer that is killed in the middle has published nothing. Neither side trusts the other: each keeps
// its own position in private memory and checks the other's against the capacity; a record's length is read
// once and checked before anything is copied, and what is copied is private from then on. Records begin on
// cache lines, so a record's length never wraps.
//
// Memory orders: the store of `tail` releases the record, the store of `head` its room. Both are sequentially
// consistent because each side then loads another word that the other side stores before it looks here: the
// writer the inbox's bits, the reader `starved`. In any weaker order both could miss each other.
// Thread safety: one writer, one reader, each at a time; they may be different processes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>

namespace lockstep::transport::internal {

inline constexpr std::size_t kLine = 64;

constexpr std::uint64_t round_to_lines(std::uint64_t n_bytes) {
  return (n_bytes + kLine - 1) & ~static_cast<std::uint64_t>(kLine - 1);
}

// In shared memory, all zero at first. Positions count bytes since the beginning.
struct RingControl {
  alignas(kLine) std::atomic<std::uint64_t> tail;  // by the writer
  std::atomic<std::uint32_t> starved;  // 1: the writer waits for room; cleared by the reader that notifies it
  alignas(kLine) std::atomic<std::uint64_t> head;  // by the reader
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

// `data` has `capacity` bytes, a multiple of kLine; a record has a u32 of its whole length at its start.
struct Ring {
  RingControl* control = nullptr;
  std::uint8_t* data = nullptr;
  std::uint64_t capacity = 0;
};

class RingWriter {
 public:
  RingWriter() = default;
  explicit RingWriter(Ring ring) : ring_(ring) {}

  // False when there is no room, now or (beyond the capacity) ever. The reader's head is loaded only when the
  // last known one is not enough: its cache line stays with the reader.
  bool write(std::span<const std::uint8_t> record) {
    const std::uint64_t need = round_to_lines(record.size());
    if (need > room()) {
      seen_head_ = ring_.control->head.load(std::memory_order_seq_cst);
      if (need > room()) return false;
    }
    const std::uint64_t at = tail_ % ring_.capacity;
    const std::uint64_t first = std::min<std::uint64_t>(record.size(), ring_.capacity - at);
    std::memcpy(ring_.data + at, record.data(), first);
    std::memcpy(ring_.data, record.data() + first, record.size() - first);
    tail_ += need;
    ring_.control->tail.store(tail_, std::memory_order_seq_cst);
    return true;
  }
  // Asks to be notified of room. Then write() must be tried once more: the reader may have made room just
  // before.
  void want_room() { ring_.control->starved.store(1, std::memory_order_seq_cst); }
  const Ring& ring() const { return ring_; }

 private:
  // A head that cannot be (the reader may store anything) counts as a full ring.
  std::uint64_t room() const {
    const std::uint64_t used = tail_ - seen_head_;
    return used > ring_.capacity ? 0 : ring_.capacity - used;
  }

  Ring ring_;
  std::uint64_t tail_ = 0;
  std::uint64_t seen_head_ = 0;
};

class RingReader {
 public:
  RingReader() = default;
  explicit RingReader(Ring ring) : ring_(ring) {}
  // Begins where another reader of the same ring left it.
  RingReader(Ring ring, std::uint64_t head) : ring_(ring), head_(head) {}

  // The length of the next record: 0 when there is none, or when the writer's numbers cannot be (broken()).
  std::uint64_t next(std::uint64_t least, std::uint64_t most) {
    if (broken_) return 0;
    const std::uint64_t there = ring_.control->tail.load(std::memory_order_seq_cst) - head_;
    if (there == 0) return 0;
    // Records begin on cache lines: at least one line is there, and it has the whole length.
    if (there > ring_.capacity || there < kLine || head_ % kLine != 0) return fail();
    auto* at = reinterpret_cast<std::uint32_t*>(ring_.data + head_ % ring_.capacity);
    const std::uint64_t n_bytes = std::atomic_ref<std::uint32_t>(*at).load(std::memory_order_relaxed);
    if (n_bytes < least || n_bytes > most || round_to_lines(n_bytes) > there) return fail();
    return n_bytes;
  }
  // Copies the record whose length next() returned into memory of that size, and frees its room. True when
  // the writer waits for room and at least half of the ring is free: it is to be notified.
  bool take(std::uint8_t* out, std::uint64_t n_bytes) {
    const std::uint64_t at = head_ % ring_.capacity;
    const std::uint64_t first = std::min<std::uint64_t>(n_bytes, ring_.capacity - at);
    std::memcpy(out, ring_.data + at, first);
    std::memcpy(out + first, ring_.data, n_bytes - first);
    head_ += round_to_lines(n_bytes);
    ring_.control->head.store(head_, std::memory_order_seq_cst);
    if (ring_.control->starved.load(std::memory_order_seq_cst) == 0) return false;
    const std::uint64_t there = ring_.control->tail.load(std::memory_order_relaxed) - head_;
    return there <= ring_.capacity / 2 && ring_.control->starved.exchange(0, std::memory_order_seq_cst) == 1;
  }
  bool empty() const { return broken_ || ring_.control->tail.load(std::memory_order_seq_cst) == head_; }
  bool broken() const { return broken_; }

 private:
  std::uint64_t fail() {
    broken_ = true;
    return 0;
  }

  Ring ring_;
  std::uint64_t head_ = 0;
  bool broken_ = false;
};

}  // namespace lockstep::transport::internal
