// For tests: how much time this run has for schedules and world sizes.
#pragma once

#include <cstdlib>
#include <cstring>

namespace lockstep::long_testing {

// The long schedules and every world size (`make test-long`).
inline bool enabled() {
  const char* value = std::getenv("LOCKSTEP_TEST_LONG");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

// TSan looks for races, in one process at a time, and makes memory accesses slow. Tests whose ranks are
// processes run under it for what only processes can show, kills and stops, with fewer ranks, rounds and
// bytes: their threads' siblings, and the other trees, have the rest.
#ifdef __SANITIZE_THREAD__
inline constexpr bool kUnderTsan = true;
#else
inline constexpr bool kUnderTsan = false;
#endif

}  // namespace lockstep::long_testing
