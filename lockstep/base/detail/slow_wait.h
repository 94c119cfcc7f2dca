// A wait that lasts says once who waits for whom, where and until when: a line at warn level, ten seconds into the wait
// (LOCKSTEP_SLOW_WAIT). Used wherever a rank or a launcher waits for another process.
//
//   SlowWait slow(deadline);
//   while (!there()) {
//     if (deadline.expired()) raise(...);
//     sleep_until(slow.next());
//     slow.say_if_due([&] { return cat("rank 0 waits for rank 1 in ..."); });
//   }
//
// Costs one look at the clock, so it is made when the caller is about to sleep and not before. Value type.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/base/deadline.h"

namespace lockstep::base {

// LOCKSTEP_SLOW_WAIT, read by the first wait; zero means never.
Milliseconds slow_wait_time();
// Instead of the variable; for tests.
void set_slow_wait_time(Milliseconds time);

// What is waited for, when that ends by itself before the waiter's patience does.
struct Awaited {
  std::string words{};
  Deadline deadline = Deadline::never();
};

class SlowWait {
 public:
  // Begins now.
  explicit SlowWait(Deadline deadline) : deadline_(deadline), due_(Deadline::after(slow_wait_time())) {}

  // The next moment something is to be done: the line, then the deadline.
  Deadline next() const { return std::min(due_, deadline_); }
  // How long to ask something below to wait that says such lines itself, so that it stays silent: what it waits for is
  // better said here. At least a millisecond.
  Milliseconds quiet_slice() const;
  // Says words(), a text or an Awaited, when the line is due, the first time only.
  template <class Words>
  void say_if_due(Words&& words) {
    if (due_.is_never() || !due_.expired()) return;
    due_ = Deadline::never();
    if (deadline_.expired()) return;
    if constexpr (std::is_same_v<std::invoke_result_t<Words>, Awaited>) {
      const Awaited awaited = std::forward<Words>(words)();
      say(awaited.words, std::min(awaited.deadline, deadline_));
    } else {
      say(std::forward<Words>(words)(), deadline_);
    }
  }

 private:
  static void say(const std::string& words, Deadline until);

  Deadline deadline_;
  Deadline due_;  // never, once it is said
};

}  // namespace lockstep::base
