// Gradients above malloc's thresholds are mapped and unmapped at every step; the page faults would move the
// result by 30 %, in either mode.
#pragma once

#include <malloc.h>

#include <stdexcept>

namespace bench {

inline void raise_malloc_thresholds() {
  // 32 MiB is the highest mmap threshold glibc takes.
  if (::mallopt(M_MMAP_THRESHOLD, 32 << 20) != 1 || ::mallopt(M_TRIM_THRESHOLD, 2147483647) != 1)
    throw std::runtime_error("malloc refused its thresholds");
}

}  // namespace bench
