// For tests: whether this run has time for the long schedules and every world size (`make test-long`).
#pragma once

#include <cstdlib>
#include <cstring>

namespace lockstep::long_testing {

inline bool enabled() {
  const char* value = std::getenv("LOCKSTEP_TEST_LONG");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

}  // namespace lockstep::long_testing
