#include "engines/gloo/slow_wait.h"

#include <cstdlib>

#include "engines/gloo/failure.h"

namespace lockstep::gloo_plugin {
namespace {

constexpr double kDefaultSeconds = 10;

// lockstep itself has reported a value that is not a number.
std::int64_t slow_ns() {
  static const std::int64_t ns = [] {
    const char* const text = std::getenv("LOCKSTEP_SLOW_WAIT");
    if (text == nullptr) return static_cast<std::int64_t>(kDefaultSeconds * 1e9);
    char* end = nullptr;
    const double seconds = std::strtod(text, &end);
    const bool good = end != text && *end == '\0' && seconds >= 0 && seconds < 1e9;
    return static_cast<std::int64_t>((good ? seconds : kDefaultSeconds) * 1e9);
  }();
  return ns;
}

}  // namespace

std::int64_t slow_from_now() {
  return slow_ns() == 0 ? LOCKSTEP_NEVER : now_ns() + slow_ns();
}

std::string slow_line(const std::string& text, std::int64_t deadline_ns) {
  if (deadline_ns == LOCKSTEP_NEVER) return cat("slow: ", text, "; waiting continues without a deadline");
  const std::int64_t left = (deadline_ns - now_ns() + 999'999'999) / 1'000'000'000;
  const std::time_t at = std::time(nullptr) + left;
  std::tm local{};
  ::localtime_r(&at, &local);
  char clock[16];
  std::strftime(clock, sizeof clock, "%T", &local);
  return cat("slow: ", text, "; waiting continues until ", clock, " (in ", left, " s)");
}

}  // namespace lockstep::gloo_plugin
