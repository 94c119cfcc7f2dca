// Which worker sends into which ring of the inbox, and taking the next record of one. On the hot path of
// poll().
//
//   free --claim()--> open --silence(), or a record that cannot be--> closed --release()--> free
//
// A slot whose sender broke the rules is not released: the sender may continue to write there.
// Locks: one per slot, and one for the list of free slots; never two at once. Thread safety: every method.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/transport/internal/inbox.h"
#include "lockstep/transport/internal/record.h"
#include "lockstep/transport/transport.h"

namespace lockstep::transport::internal {

class SenderSlots {
 public:
  explicit SenderSlots(Inbox inbox);

  // `socket` is the connection on which the sender is notified of room; it must stay open until release().
  // Nothing when all slots are in use. Raises kResource.
  std::optional<std::uint32_t> claim(WorkerId from, Sender sender, int socket);
  void release(std::uint32_t slot);

  // The next message of any sender; bell is the owner's.
  std::optional<Event> poll(int bell);
  // The next of one sender, in order. Nothing when there is none or the sender's numbers cannot be: see
  // broken().
  std::optional<Event> take(std::uint32_t slot, int bell);
  // From now on nothing is taken from it.
  void silence(std::uint32_t slot);
  // What was wrong with its records; empty when nothing.
  std::string broken(std::uint32_t slot);

 private:
  struct Slot {
    base::Mutex mutex;
    bool open LOCKSTEP_GUARDED_BY(mutex) = false;
    WorkerId from LOCKSTEP_GUARDED_BY(mutex) = 0;
    Sender sender LOCKSTEP_GUARDED_BY(mutex);
    RingReader reader LOCKSTEP_GUARDED_BY(mutex);
    int socket LOCKSTEP_GUARDED_BY(mutex) = -1;
    std::string broken LOCKSTEP_GUARDED_BY(mutex);
  };

  static Decoded read_record(Slot& slot, std::uint64_t n_bytes) LOCKSTEP_REQUIRES(slot.mutex);
  std::optional<Event> take_locked(Slot& slot) LOCKSTEP_REQUIRES(slot.mutex);

  const Inbox inbox_;
  std::array<Slot, kSlots> slots_;
  std::atomic<std::uint32_t> next_{0};  // where poll looks first, so that nobody starves
  base::Mutex free_mutex_;
  // The one that is free for longest is last.
  std::vector<std::uint32_t> free_ LOCKSTEP_GUARDED_BY(free_mutex_);
};

}  // namespace lockstep::transport::internal
