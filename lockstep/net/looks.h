// When looking again for bytes beats sleeping until they come. Between two looks the core is yielded. Where only the two
// ends of a conversation want the cores that costs a microsecond, and a core that is woken from sleep takes tens of them.
// Where others compute, a yield lasts as long as their time slice, while a sleeper is woken as soon as its bytes
// are there. So a yield that took long ends the looking for a while, each time for longer.
// Thread safety: none, one per thread that looks.
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
  // What yield() learns from how long it took.
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
  static constexpr int kQuickAgain = 1000;  // quick yields in a row that count as a quiet machine

  Clock::time_point again_{};
  Clock::duration pause_ = kShortestPause;
  int quick_ = 0;
};

}  // namespace lockstep::net
