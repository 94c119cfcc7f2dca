// Rate limit for log lines about unauthenticated connections: the first twenty, then one every ten seconds.
// Anyone can connect any number of times, and must not fill a disk that way.
// Thread safety: none; one per loop.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace lockstep::net {

class Complaints {
 public:
  using Clock = std::chrono::steady_clock;

  // Whether one more line may be written.
  bool allowed(Clock::time_point now = Clock::now()) {
    left_ = std::min<std::int64_t>(kMost, left_ + (now - since_) / kPeriod);
    since_ += (now - since_) / kPeriod * kPeriod;
    if (left_ > 0) {
      --left_;
      return true;
    }
    ++held_back_;
    return false;
  }
  // Suffix for a line that may be written: how many were suppressed before it. Empty when none.
  std::string held_back() {
    const auto n = std::exchange(held_back_, 0);
    return n == 0 ? std::string() : " (and " + std::to_string(n) + " like it before)";
  }

 private:
  static constexpr std::int64_t kMost = 20;
  static constexpr Clock::duration kPeriod = std::chrono::seconds(10);

  std::int64_t left_ = kMost;
  Clock::time_point since_ = Clock::now();
  std::uint64_t held_back_ = 0;
};

}  // namespace lockstep::net
