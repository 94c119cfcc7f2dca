// An absolute point on the monotonic clock. Blocking calls take one and pass it down unchanged, so a call
// that consists of many waits still ends when its caller asked. Thread safety: a value, no shared state.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>

namespace lockstep {

using Milliseconds = std::chrono::milliseconds;

// As a timeout: the wait has no end of its own.
inline constexpr Milliseconds kNoTimeout = Milliseconds::max();

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // A deadline that never passes.
  static constexpr Deadline never() { return Deadline(kNever); }
  static Deadline now() { return Deadline(Clock::now().time_since_epoch().count()); }
  // `timeout` from now. Zero and negative timeouts mean never, as in torch's stores, and so does
  // Milliseconds::max().
  template <class Rep, class Period>
  static Deadline after(std::chrono::duration<Rep, Period> timeout) {
    using Nanoseconds = std::chrono::nanoseconds;
    const auto longest = std::chrono::duration_cast<std::chrono::duration<Rep, Period>>(Nanoseconds::max());
    if (timeout.count() <= 0 || timeout.count() >= longest.count()) return never();
    const std::int64_t ns = std::chrono::duration_cast<Nanoseconds>(timeout).count();
    const std::int64_t now = Clock::now().time_since_epoch().count();
    return Deadline(ns >= kNever - now ? kNever : now + ns);
  }
  // From nanoseconds of CLOCK_MONOTONIC, the form used in the engine ABI.
  static constexpr Deadline from_monotonic_ns(std::int64_t ns) { return Deadline(ns); }

  constexpr bool is_never() const { return ns_ == kNever; }
  constexpr std::int64_t monotonic_ns() const { return ns_; }
  bool expired() const { return !is_never() && Clock::now().time_since_epoch().count() >= ns_; }
  // Time left, zero when passed. For never: the largest duration.
  std::chrono::nanoseconds remaining() const {
    if (is_never()) return std::chrono::nanoseconds(kNever);
    const std::int64_t left = ns_ - Clock::now().time_since_epoch().count();
    return std::chrono::nanoseconds(left > 0 ? left : 0);
  }
  // For poll(2): -1 for never, else milliseconds rounded up.
  int poll_timeout_ms() const {
    if (is_never()) return -1;
    const std::int64_t ms = (remaining().count() + 999'999) / 1'000'000;
    return ms > std::numeric_limits<int>::max() ? std::numeric_limits<int>::max() : static_cast<int>(ms);
  }
  // For condition variables; never() becomes a distant point that does not overflow.
  Clock::time_point time_point() const {
    return is_never() ? Clock::now() + std::chrono::hours(24 * 365)
                      : Clock::time_point(std::chrono::nanoseconds(ns_));
  }
  friend constexpr auto operator<=>(Deadline, Deadline) = default;

 private:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  explicit constexpr Deadline(std::int64_t ns) : ns_(ns) {}
  std::int64_t ns_;
};

}  // namespace lockstep
