// Where ranks publish to each other and look at each other, perturb() stands. It is nothing, but for the copy of this
// library that stress_test.cpp is linked with (LOCKSTEP_PERTURB): there it yields or sleeps at random, so that the
// orders a quiet machine never shows come up. before_touch() stands where a rank is about to read or write the memory of
// another one, and there the process can be made to stop, as a debugger or a frozen control group stops it.
#pragma once

#ifdef LOCKSTEP_PERTURB

#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace lockstep::comm::internal {

// Threads take their seeds from here, in the order they first come by.
inline std::atomic<std::uint64_t> perturb_seed{1};
// Makes rank threads take the ways of ranks in different processes, over the memory they share all the same.
inline std::atomic<bool> pretend_processes{false};

inline void perturb() {
  thread_local std::uint64_t state = perturb_seed.fetch_add(0x9e3779b97f4a7c15) | 1;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  if (state % 512 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(1 + state / 512 % 60));
  } else if (state % 16 == 0) {
    ::sched_yield();
  }
}

// Counts down at every touch; the process stops at the one that makes it 0, after saying so in *stopped.
inline std::atomic<int> stop_at_touch{0};
inline std::atomic<std::uint64_t>* stopped = nullptr;

inline void before_touch() {
  perturb();
  if (stop_at_touch.load(std::memory_order_relaxed) <= 0 || stop_at_touch.fetch_sub(1) != 1) return;
  if (stopped != nullptr) stopped->fetch_add(1);
  ::raise(SIGSTOP);
}

// How long a rank that failed waits for another process to be out of its buffers.
inline std::atomic<int> patience_ms{250};
inline std::chrono::milliseconds process_patience() {
  return std::chrono::milliseconds(patience_ms.load());
}

inline bool may_share_process() {
  return !pretend_processes.load(std::memory_order_relaxed);
}

}  // namespace lockstep::comm::internal

#else

#include <chrono>

namespace lockstep::comm::internal {

inline void perturb() {}
inline void before_touch() {}
constexpr std::chrono::milliseconds process_patience() {
  return std::chrono::milliseconds(250);
}
constexpr bool may_share_process() {
  return true;
}

}  // namespace lockstep::comm::internal

#endif
