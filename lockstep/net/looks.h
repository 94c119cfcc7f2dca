// Decides when polling for bytes beats blocking. Between two polls the core is yielded. When only the two
// ends of a connection need the cores, a yield costs a microsecond, while waking a core from sleep takes
// tens. When others compute, a yield lasts as long as their time slice, while a blocked thread is woken as
// soon as its bytes arrive. So a slow yield suspends polling for a while, each time for longer.
// Thread safety: none; one per polling thread.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>

namespace lockstep::net {

class Looks {
 public:
  using Clock = std::chrono::steady_clock;

  bool allowed(Clock::time_point now) const { return now >= again_; }
  // Yields the core; returns the time afterwards.
  Clock::time_point yield(Clock::time_point now) {
    ::sched_yield();
    const auto after = Clock::now();
    account(now, after);
    return after;
  }
  // Updates the state from the duration of a yield.
  void account(Clock::time_point now, Clock::time_point after) {
    if (after - now > kLong) {
      again_ = after + pause_;
      pause_ = std::min(pause_ * 2, kLongestPause);
      quick_ = 0;
    } else if (++quick_ == kQuickAgain) {
      pause_ = kShortestPause;
      quick_ = 0;
    }
  }

 private:
  static constexpr Clock::duration kLong = std::chrono::microseconds(200);
  static constexpr Clock::duration kShortestPause = std::chrono::milliseconds(10);
  static constexpr Clock::duration kLongestPause = std::chrono::seconds(1);
  static constexpr int kQuickAgain = 1000;  // consecutive quick yields after which the machine counts as idle

  Clock::time_point again_{};
  Clock::duration pause_ = kShortestPause;
  int quick_ = 0;
};

}  // namespace lockstep::net
