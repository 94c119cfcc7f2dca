// In addition to local/perturb.h: before_touch() is called where a rank is about to read or write the memory
// of another one, and can stop the process there, as a debugger or a frozen control group does. It does
// nothing, except in the copy of this library that stress_test.cpp and stopped_test.cpp are linked with
// (LOCKSTEP_PERTURB).
#pragma once

#include "lockstep/local/perturb.h"

#ifdef LOCKSTEP_PERTURB

#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep::comm::internal {

using local::perturb;
using local::perturb_seed;

// Makes rank threads take the ways of ranks in different processes, over the memory they share all the same.
inline std::atomic<bool> pretend_processes{false};

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

using local::perturb;
inline void before_touch() {}
constexpr std::chrono::milliseconds process_patience() {
  return std::chrono::milliseconds(250);
}
constexpr bool may_share_process() {
  return true;
}

}  // namespace lockstep::comm::internal

#endif
