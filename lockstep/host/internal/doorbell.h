// Sleeping and waking across processes: a futex in each rank's arena. A rank that publishes something rings the
// others; ringing costs a look at a cached word unless someone sleeps.
//
//   sleeper:  ticket = arm(bell)                  publisher:  publish (sequentially consistent)
//             if nothing to do yet: sleep(ticket)             ring(bell)
//             disarm(bell)
//
// The sleeper announces itself before it looks for the last time, the publisher looks for sleepers after it has
// published: one of them sees the other.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include "lockstep/base/deadline.h"
#include "lockstep/host/internal/layout.h"
#include "lockstep/host/internal/perturb.h"

namespace lockstep::comm::internal {

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

inline std::uint32_t arm(Doorbell& door) {
  door.sleepers.fetch_add(1, std::memory_order_seq_cst);
  perturb();
  return door.bell.load(std::memory_order_seq_cst);
}
inline void sleep(Doorbell& door, std::uint32_t ticket, Deadline deadline) {
  futex_sleep(door.bell, ticket, deadline);
}
inline void disarm(Doorbell& door) {
  door.sleepers.fetch_sub(1, std::memory_order_relaxed);
}
// Pre: what the sleeper waits for was published with a sequentially consistent operation. True when someone slept.
inline bool ring(Doorbell& door) {
  perturb();
  if (door.sleepers.load(std::memory_order_seq_cst) == 0) return false;
  door.bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(door.bell);
  return true;
}

}  // namespace lockstep::comm::internal
