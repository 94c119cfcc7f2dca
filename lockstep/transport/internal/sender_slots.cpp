#include "lockstep/transport/internal/sender_slots.h"

#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <new>
#include <numeric>

namespace lockstep::transport::internal {
namespace {

// A record larger than a ring may carry, or positions that cannot be.
constexpr const char* kBadRing = "a record with an impossible length";
constexpr const char* kNoMemory = "a message for which there is no memory";

void tell_room(int socket) {
  const std::uint8_t room = 'R';
  // When the socket is full of these bytes, the sender has one to read.
  [[maybe_unused]] const auto sent = ::send(socket, &room, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

SenderSlots::SenderSlots(Inbox inbox) : inbox_(std::move(inbox)), free_(kSlots) {
  // Descending, since slots are taken from the end: low numbers first, so that the bits in use share few
  // words.
  std::iota(free_.rbegin(), free_.rend(), 0u);
}

// The pages are prepared outside any lock: system calls. A slot that is neither free nor open belongs to this
// call.
std::optional<std::uint32_t> SenderSlots::claim(WorkerId from, Sender sender, int socket) {
  std::uint32_t index = 0;
  {
    const base::MutexLock lock(free_mutex_);
    if (free_.empty()) return std::nullopt;
    index = free_.back();
    free_.pop_back();
  }
  try {
    inbox_.prepare(index);
  } catch (...) {
    const base::MutexLock lock(free_mutex_);
    free_.push_back(index);
    throw;
  }
  Slot& slot = slots_[index];
  const base::MutexLock lock(slot.mutex);
  slot.open = true;
  slot.from = from;
  slot.sender = std::move(sender);
  slot.reader = RingReader(inbox_.ring(index));
  slot.socket = socket;
  slot.broken.clear();
  return index;
}

// At the end of the queue: a sender that has not noticed its end may still write into the ring, so the slot
// rests as long as possible.
void SenderSlots::release(std::uint32_t index) {
  {
    Slot& slot = slots_[index];
    const base::MutexLock lock(slot.mutex);
    slot.open = false;
    slot.sender = {};
    slot.socket = -1;
  }
  const base::MutexLock lock(free_mutex_);
  free_.insert(free_.begin(), index);
}

void SenderSlots::silence(std::uint32_t index) {
  const base::MutexLock lock(slots_[index].mutex);
  slots_[index].open = false;
}

std::string SenderSlots::broken(std::uint32_t index) {
  const base::MutexLock lock(slots_[index].mutex);
  return slots_[index].broken;
}

// acquire: a set bit is published with the record. A stale bit costs a look at an empty ring.
std::optional<Event> SenderSlots::poll(int bell) {
  constexpr std::uint32_t kWords = kSlots / 64;
  auto& pending = inbox_.head().pending;
  // Round robin: the search begins behind the last sender that was served, so a busy one does not starve the
  // others.
  const std::uint32_t first = next_.load(std::memory_order_relaxed) % kSlots;
  const std::uint64_t below = (std::uint64_t{1} << first % 64) - 1;
  // The first word twice: the bits from the start position on, and those below it at the end.
  for (std::uint32_t i = 0; i <= kWords; ++i) {
    const std::uint32_t word = (first / 64 + i) % kWords;
    std::uint64_t bits = pending[word].load(std::memory_order_acquire);
    if (i == 0) bits &= ~below;
    if (i == kWords) bits &= below;
    for (; bits != 0; bits &= bits - 1) {
      const std::uint32_t slot = word * 64 + static_cast<std::uint32_t>(std::countr_zero(bits));
      if (auto event = take(slot, bell)) {
        next_.store(slot + 1, std::memory_order_relaxed);
        return event;
      }
    }
  }
  return std::nullopt;
}

std::optional<Event> SenderSlots::take(std::uint32_t index, int bell) {
  Slot& slot = slots_[index];
  auto& word = inbox_.head().pending[index / 64];
  const std::uint64_t bit = std::uint64_t{1} << index % 64;
  const base::MutexLock lock(slot.mutex);
  auto event = take_locked(slot);
  if (slot.open && !slot.reader.empty()) return event;
  // Seems empty: clear the bit, then check the ring again (both seq_cst). The sender stores its record and
  // then loads the bit: either it finds the bit cleared and sets it, or the record is seen here.
  word.fetch_and(~bit, std::memory_order_seq_cst);
  if (slot.open && !slot.reader.empty()) inbox_.announce(index, bell);
  return event;
}

// The sender's length decides how much memory is allocated: when there is none, that sender is cut off, and
// nobody else.
Decoded SenderSlots::read_record(Slot& slot, std::uint64_t n_bytes) {
  try {
    const Buffer record(n_bytes);
    if (slot.reader.take(record.data(), n_bytes)) tell_room(slot.socket);
    return decode_record(record, n_bytes, slot.sender);
  } catch (const std::bad_alloc&) {
    return {.error = kNoMemory};
  }
}

std::optional<Event> SenderSlots::take_locked(Slot& slot) {
  if (!slot.open) return std::nullopt;
  const std::uint64_t n_bytes = slot.reader.next(kMinRecord, kMaxRingRecord);
  if (n_bytes == 0) {
    if (slot.reader.broken() && slot.broken.empty()) {
      slot.broken = kBadRing;
      ::shutdown(slot.socket, SHUT_RDWR);  // the thread that handles sockets ends the connection
    }
    return std::nullopt;
  }
  auto decoded = read_record(slot, n_bytes);
  if (!decoded.message) {
    slot.open = false;
    slot.broken = std::move(decoded.error);
    ::shutdown(slot.socket, SHUT_RDWR);
    return std::nullopt;
  }
  return Event{.from = slot.from, .message = std::move(*decoded.message)};
}

}  // namespace lockstep::transport::internal
