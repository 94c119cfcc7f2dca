// perturb() is called where processes publish to each other and read what others published. It does nothing,
// except in the copy of the host engine that its stress test is linked with (LOCKSTEP_PERTURB): there it
// yields or sleeps at random, so that interleavings occur that an idle machine never shows.
// Thread safety: may be called from any thread; the random state is per thread.
#pragma once

#ifdef LOCKSTEP_PERTURB

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace lockstep::local {

// Threads take their seeds from here, in the order of their first calls.
inline std::atomic<std::uint64_t> perturb_seed{1};

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

}  // namespace lockstep::local

#else

namespace lockstep::local {

inline void perturb() {}

}  // namespace lockstep::local

#endif
