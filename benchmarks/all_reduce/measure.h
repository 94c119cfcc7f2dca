// The measured loop, the same for every all-reduce contender: sum of float32, in place.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/common/clock.h"
#include "benchmarks/common/link.h"
#include "benchmarks/common/request.h"

namespace bench {

// Small whole numbers, other ones on each rank and at each place: their sum is exact in float32.
inline float pattern(int rank, std::size_t i) {
  return static_cast<float>((i * 7 + static_cast<std::size_t>(rank) * 13) % 1021);
}

template <class Contender>
void check_result(Contender& contender, Link& link) {
  const std::span<float> values = contender.buffer(0);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = pattern(link.rank(), i);
  contender.all_reduce(0);
  bool right = true;
  for (std::size_t i = 0; i < values.size() && right; ++i) {
    float expected = 0;
    for (int rank = 0; rank < link.size(); ++rank) expected += pattern(rank, i);
    right = values[i] == expected;
  }
  if (!link.all(right)) throw std::runtime_error("the all-reduce gave a wrong sum");
}

// Runs `n` all-reduces, going through the buffers in turn from buffer `from` on; returns the next buffer.
template <class Contender>
std::size_t run_loop(Contender& contender, std::int64_t n, std::size_t n_buffers, std::size_t from) {
  for (std::int64_t k = 0; k < n; ++k) {
    contender.all_reduce(from);
    if (++from == n_buffers) from = 0;
  }
  return from;
}

// How many all-reduces fill about `goal_ns`; also warms up. Rank 0's clock decides.
template <class Contender>
std::int64_t calibrate(Contender& contender, Link& link, std::size_t n_buffers, std::int64_t goal_ns) {
  run_loop(contender, static_cast<std::int64_t>(n_buffers), n_buffers, 0);
  for (std::int64_t n = 1;; n *= 4) {
    std::int64_t took = goal_ns;
    for (int k = 0; k < 2; ++k) {  // the better of two: one descheduling must not end the search
      contender.all_reduce(0);     // the others may still be waking up
      const std::int64_t start = now_ns();
      run_loop(contender, n, n_buffers, 0);
      took = std::min(took, now_ns() - start);
    }
    took = std::max<std::int64_t>(link.share_number(took), 1);
    if (took * 10 >= goal_ns) return std::max<std::int64_t>(1, goal_ns * n / took);
  }
}

// Contender: prepare(place, n_bytes, n_buffers) on every rank; buffer(i), this rank's i-th buffer;
// all_reduce(i). Request: place, bytes, buffers, budget_ms. The answer is the median of five parts of the
// loop, so that one descheduling does not speak for all of it.
template <class Contender>
std::string measure_all_reduce(Contender& contender, Link& link, const Request& request) {
  constexpr int kParts = 5;
  const auto n_bytes = static_cast<std::size_t>(request.number("bytes"));
  const auto n_buffers = static_cast<std::size_t>(request.number("buffers"));
  contender.prepare(request.text("place"), n_bytes, n_buffers);
  check_result(contender, link);
  // Zeros stay zeros when summed; anything else would run into infinity.
  for (std::size_t i = 0; i < n_buffers; ++i) {
    std::memset(contender.buffer(i).data(), 0, contender.buffer(i).size_bytes());
  }
  link.all(true);
  link.share("filled");

  const std::int64_t part =
      calibrate(contender, link, n_buffers, request.number("budget_ms") * 1'000'000 / kParts);
  std::vector<double> us;
  std::size_t next = run_loop(contender, 1, n_buffers, 0);  // as in calibrate
  for (int k = 0; k < kParts; ++k) {
    const std::int64_t start = now_ns();
    next = run_loop(contender, part, n_buffers, next);
    us.push_back(static_cast<double>(now_ns() - start) / 1e3 / static_cast<double>(part));
  }
  std::ostringstream answer;
  answer.precision(9);
  answer << "{\"us\":" << median(us) << ",\"iterations\":" << part * kParts << "}";
  return answer.str();
}

}  // namespace bench
