// Several loops measured in turns within one request, so that a machine that slows down slows all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "benchmarks/common/link.h"
#include "benchmarks/common/request.h"

namespace bench {

struct Loop {
  std::string name;  // of its number in the answer: "plain" is "plain_us"; "" is "us"
  std::function<void(std::int64_t n)> run{};  // n turns
};

// On every rank, with the same loops. Each gets its share of budget_ms; its number is the median of its
// parts, in microseconds for one turn, by rank 0's clock.
std::string measure_loops(Link& link, const Request& request, const std::vector<Loop>& loops);

}  // namespace bench
