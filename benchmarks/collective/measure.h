// The measured loop, the same for every operation and every contender.
//
// Contender, on every rank:
//   prepare(case)      makes the buffers and returns true, or keeps those it has and returns false
//   send(i), recv(i)   this rank's i-th buffers, std::span<float>; the same one for operations in place,
//                      empty where there is none
//   run(i)             one turn on the i-th buffers; blocks
//   barrier()
#pragma once

#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "benchmarks/collective/case.h"
#include "benchmarks/collective/check.h"
#include "benchmarks/common/clock.h"
#include "benchmarks/common/link.h"
#include "benchmarks/common/request.h"

namespace bench {

// Runs `n` turns, going through the buffers one after the other from buffer `from` on; returns the next
// buffer. The barrier at the end lets what is still on its way count: a root that only sends may be far ahead
// of the others.
template <class Contender>
std::size_t run_loop(Contender& contender, std::int64_t n, std::size_t n_buffers, std::size_t from) {
  for (std::int64_t k = 0; k < n; ++k) {
    contender.run(from);
    if (++from == n_buffers) from = 0;
  }
  contender.barrier();
  return from;
}

// How many turns fill about `goal_ns`; also warms up. Rank 0's clock decides.
template <class Contender>
std::int64_t calibrate(Contender& contender, Link& link, std::size_t n_buffers, std::int64_t goal_ns) {
  const auto once = static_cast<std::int64_t>(n_buffers);
  const std::int64_t begin = now_ns();
  run_loop(contender, once, n_buffers, 0);
  if (link.share_number(now_ns() - begin) >= 4 * goal_ns * once) return 1;  // far too slow for more
  for (std::int64_t n = 1;; n *= 4) {
    std::int64_t took = goal_ns;
    for (int k = 0; k < 3; ++k) {  // the best of three: one descheduling must not end the search
      contender.run(0);            // the others may still be waking up
      const std::int64_t start = now_ns();
      run_loop(contender, n, n_buffers, 0);
      took = std::min(took, now_ns() - start);
    }
    took = std::max<std::int64_t>(link.share_number(took), 1);
    if (took * 4 >= goal_ns) return std::max<std::int64_t>(1, goal_ns * n / took);
  }
}

// Request: as case_of, and budget_ms. The answer is the median of five parts of the loop, so that one
// descheduling does not speak for all of it.
template <class Contender>
std::string measure(Contender& contender, Link& link, const Request& request) {
  constexpr int kParts = 5;
  const Case which = case_of(request, link);
  const bool fresh = contender.prepare(which);
  check_result(contender, which, link);
  // Zeros stay zeros when summed; anything else would run into infinity. Only the check leaves others.
  for (std::size_t i = 0; i < (fresh ? which.n_buffers : 1); ++i) {
    for (const std::span<float> buffer : {contender.send(i), contender.recv(i)}) {
      if (!buffer.empty()) std::memset(buffer.data(), 0, buffer.size_bytes());
    }
  }
  link.all(true);
  link.share("filled");

  const std::int64_t part =
      calibrate(contender, link, which.n_buffers, request.number("budget_ms") * 1'000'000 / kParts);
  std::vector<double> us;
  std::size_t next = run_loop(contender, 1, which.n_buffers, 0);  // as in calibrate
  for (int k = 0; k < kParts; ++k) {
    const std::int64_t start = now_ns();
    next = run_loop(contender, part, which.n_buffers, next);
    us.push_back(static_cast<double>(now_ns() - start) / 1e3 /
                 static_cast<double>(part * which.operations()));
  }
  std::ostringstream answer;
  answer.precision(9);
  answer << "{\"us\":" << median(us) << ",\"iterations\":" << part * kParts << "}";
  return answer.str();
}

}  // namespace bench
