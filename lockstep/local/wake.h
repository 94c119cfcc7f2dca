// Sleeping and waking across processes. Two bells for two kinds of sleeper: a Doorbell is a futex in shared
// memory, for any number of threads that wait for words there; an EventBell an eventfd, for one that waits in
// epoll, where sockets may wake it as well. Both cost the waker one read of a cached word unless a thread
// sleeps.
//
//   sleeper:  announce(bell)                     waker:  publish (sequentially consistent)
//             look (sequentially consistent)             wake(bell)
//             if nothing is there: sleep
//             retract(bell)
//
// The sleeper writes "I sleep" and then reads what it waits for; the waker writes that and then reads "I
// sleep". Store and load of different words may pass each other in any weaker order, also on x86. With all
// four sequentially consistent there is one order of them that both agree on, and in it one of the two sees
// the other: the sleeper finds something, or the waker finds a sleeper.
//
// Everything here is on hot paths, hence in a header.
// Thread safety: every function may be called from any thread of any process that has the memory mapped.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include "lockstep/base/deadline.h"
#include "lockstep/local/perturb.h"

namespace lockstep::local {

// Sleeps while `word` is `expected`, at most until the deadline; may wake early. Works between processes.
inline void futex_sleep(std::atomic<std::uint32_t>& word, std::uint32_t expected, Deadline deadline) {
  const std::int64_t ns = deadline.monotonic_ns();
  timespec until{.tv_sec = static_cast<time_t>(ns / 1'000'000'000), .tv_nsec = ns % 1'000'000'000};
  ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, deadline.is_never() ? nullptr : &until, nullptr,
            FUTEX_BITSET_MATCH_ANY);
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// ---- threads that wait for words in shared memory ----

// In memory that sleepers and wakers have mapped; a cache line of its own, all zero at first.
struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> bell;      // grows when somebody is woken
  std::atomic<std::uint32_t> sleepers;  // threads between announce and retract
};
static_assert(sizeof(Doorbell) == 64 && std::atomic<std::uint32_t>::is_always_lock_free);

// For sleep(). Taken before the look: a later ring changes the word, and sleep() returns at once; an earlier
// ring came after its publication, and the look sees that. Without announce() only ring() wakes.
inline std::uint32_t ticket_of(const Doorbell& door) {
  return door.bell.load(std::memory_order_seq_cst);
}

// Returns the ticket.
inline std::uint32_t announce(Doorbell& door) {
  // seq_cst: before the look that follows, see above.
  door.sleepers.fetch_add(1, std::memory_order_seq_cst);
  perturb();
  return ticket_of(door);
}

// Until woken or the deadline; may return early. The kernel compares ticket and bell under its own lock.
inline void sleep(Doorbell& door, std::uint32_t ticket, Deadline deadline) {
  futex_sleep(door.bell, ticket, deadline);
}

inline void retract(Doorbell& door) {
  // relaxed: a waker that still sees the sleeper rings needlessly.
  door.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

// Wakes all sleepers unconditionally.
inline void ring(Doorbell& door) {
  // At least a release: orders the publication before the ticket of a sleeper that comes now, which looks
  // afterwards.
  door.bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(door.bell);
}

// Pre: what the sleepers wait for was published with a sequentially consistent operation. True when someone
// slept.
inline bool wake(Doorbell& door) {
  perturb();
  // seq_cst: after the publication, see above.
  if (door.sleepers.load(std::memory_order_seq_cst) == 0) return false;
  ring(door);
  return true;
}

// ---- one thread that waits in epoll ----

struct EventBell {
  std::atomic<std::uint32_t>&
      asleep;  // shared; 1: it sleeps, or is about to, and must be woken through the eventfd
  int eventfd;
};

// Wakes it unconditionally.
inline void ring(int eventfd) noexcept {
  const std::uint64_t one = 1;
  // A full counter means that it is already signalled.
  [[maybe_unused]] const auto written = ::write(eventfd, &one, sizeof one);
}

inline void announce(const EventBell& bell) {
  // seq_cst: before the look that follows, see above.
  bell.asleep.store(1, std::memory_order_seq_cst);
}

inline void retract(const EventBell& bell) {
  // Weaker would do, since a waker that still sees 1 rings needlessly; not hot, so like the rest.
  bell.asleep.store(0, std::memory_order_seq_cst);
}

// Pre: as for a Doorbell.
inline void wake(const EventBell& bell) {
  perturb();
  // The load (seq_cst: after the publication, see above) keeps the word in every waker's cache while nobody
  // sleeps; of many wakers the exchange picks one that pays for the system call. No order is needed between
  // them.
  if (bell.asleep.load(std::memory_order_seq_cst) == 1 &&
      bell.asleep.exchange(0, std::memory_order_seq_cst) == 1)
    ring(bell.eventfd);
}

}  // namespace lockstep::local
