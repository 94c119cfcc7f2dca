#include "lockstep/base/detail/slow_wait.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <ctime>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"

namespace lockstep::base {
namespace {

constexpr Milliseconds kDefault{10'000};

Milliseconds from_environment() {
  const auto text = environment(EnvVar::kLockstepSlowWait);
  if (!text) return kDefault;
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  if (*end == '\0' && seconds >= 0 && seconds < 1e9) return Milliseconds(std::llround(seconds * 1000));
  log(LogLevel::kWarn, cat(name_of(EnvVar::kLockstepSlowWait), " must be a number of seconds, but is \"",
                           *text, "\"; 10 is used"));
  return kDefault;
}

std::atomic<Milliseconds>& cell() {
  static std::atomic<Milliseconds> time{from_environment()};
  return time;
}

// "until 12:03:44 (in 290 s)", or "without a deadline".
std::string end_of_wait(Deadline deadline) {
  if (deadline.is_never()) return "without a deadline";
  const auto left = std::chrono::ceil<std::chrono::seconds>(deadline.remaining());
  const std::time_t at = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now() + left);
  std::tm local{};
  ::localtime_r(&at, &local);
  char clock[16];
  std::strftime(clock, sizeof clock, "%T", &local);
  return cat("until ", clock, " (in ", left.count(), " s)");
}

}  // namespace

Milliseconds slow_wait_time() {
  return cell().load(std::memory_order_relaxed);
}

void set_slow_wait_time(Milliseconds time) {
  cell().store(time, std::memory_order_relaxed);
}

Milliseconds SlowWait::quiet_slice() const {
  constexpr Milliseconds kLeast{1};
  // Rounded down: the nested wait starts a little later and must end before its own line is due.
  const auto left = std::chrono::floor<Milliseconds>(next().remaining());
  const Milliseconds time = slow_wait_time();
  return std::max(kLeast, time.count() == 0 ? left : std::min(left, time - kLeast));
}

void SlowWait::say(const std::string& text, Deadline until) {
  log(LogLevel::kWarn, cat("slow: ", text, "; waiting continues ", end_of_wait(until)));
}

}  // namespace lockstep::base
