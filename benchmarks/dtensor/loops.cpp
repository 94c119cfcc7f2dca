#include "benchmarks/dtensor/loops.h"

#include <algorithm>
#include <sstream>

#include "benchmarks/common/clock.h"

namespace bench {
namespace {

constexpr std::int64_t kParts = 9;

std::int64_t took_ns(const Loop& loop, std::int64_t n) {
  const std::int64_t start = now_ns();
  loop.run(n);
  return std::max<std::int64_t>(now_ns() - start, 1);
}

// How many turns fill about `goal_ns`; also warms up. Rank 0's clock decides.
std::int64_t turns_for(Link& link, const Loop& loop, std::int64_t goal_ns) {
  loop.run(3);  // caches of decisions, memory that is kept
  for (std::int64_t n = 1;; n *= 4) {
    const std::int64_t took = link.share_number(std::min(took_ns(loop, n), took_ns(loop, n)));
    if (took * 4 >= goal_ns) return std::max<std::int64_t>(1, goal_ns * n / took);
  }
}

}  // namespace

std::string measure_loops(Link& link, const Request& request, const std::vector<Loop>& loops) {
  const auto n_loops = static_cast<std::int64_t>(loops.size());
  const std::int64_t goal_ns = request.number("budget_ms") * 1'000'000 / (kParts * n_loops);
  std::vector<std::int64_t> turns;
  for (const Loop& loop : loops) turns.push_back(turns_for(link, loop, goal_ns));
  std::vector<std::vector<double>> us(loops.size());
  for (std::int64_t part = 0; part < kParts; ++part) {
    for (std::size_t i = 0; i < loops.size(); ++i) {
      us[i].push_back(static_cast<double>(took_ns(loops[i], turns[i])) / 1e3 / static_cast<double>(turns[i]));
    }
  }
  std::ostringstream text;
  text.precision(9);
  for (std::size_t i = 0; i < loops.size(); ++i) {
    const std::string key = loops[i].name.empty() ? "us" : loops[i].name + "_us";
    text << (i == 0 ? "{\"" : ",\"") << key << "\":" << median(us[i]);
  }
  text << ",\"iterations\":" << turns[0] * kParts << "}";
  return text.str();
}

}  // namespace bench
