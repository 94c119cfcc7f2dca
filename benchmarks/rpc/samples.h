// Repeating something for a while, and what it took.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "benchmarks/common/clock.h"
#include "benchmarks/common/request.h"

namespace bench {

// Microseconds.
template <class Function>
double timed(Function&& function) {
  const std::int64_t start = now_ns();
  std::forward<Function>(function)();
  return static_cast<double>(now_ns() - start) / 1e3;
}

// What `take()` gives, at least five times, until the request's time is over.
template <class Take>
auto samples(const Request& request, Take take) {
  const std::int64_t end = now_ns() + request.number("budget_ms") * 1'000'000;
  std::vector<decltype(take())> taken;
  while (taken.size() < 5 || now_ns() < end) taken.push_back(take());
  return taken;
}

}  // namespace bench
