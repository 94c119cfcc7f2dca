// Logs a long wait once, at warn level: who waits for whom, where and until when. By default ten seconds into
// the wait (LOCKSTEP_SLOW_WAIT). Used wherever a rank or a launcher waits for another process.
//
//   SlowWait slow(deadline);
//   while (!there()) {
//     if (deadline.expired()) raise(...);
//     sleep_until(slow.next());
//     slow.say_if_due([&] { return cat("rank 0 waits for rank 1 in ..."); });
//   }
//
// Construction reads the clock, so construct it only when the caller is about to sleep. Thread safety: a
// SlowWait belongs to one thread; the free functions may be called from any thread.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/base/deadline.h"

namespace lockstep::base {

// LOCKSTEP_SLOW_WAIT, read once by the first wait; zero means never.
Milliseconds slow_wait_time();
// Overrides the variable; for tests.
void set_slow_wait_time(Milliseconds time);

// What is waited for, with the deadline of the awaited operation when that is earlier than the waiter's own.
struct Awaited {
  std::string text{};
  Deadline deadline = Deadline::never();
};

class SlowWait {
 public:
  // The wait starts now.
  explicit SlowWait(Deadline deadline) : deadline_(deadline), due_(Deadline::after(slow_wait_time())) {}

  // The next time to wake up: for the log line, then for the deadline.
  Deadline next() const { return std::min(due_, deadline_); }
  // How long a nested wait that logs such lines itself may last without logging one, since this level
  // describes the wait better. At least a millisecond.
  Milliseconds quiet_slice() const;
  // Logs the result of describe(), a string or an Awaited, once the line is due; at most once.
  template <class Describe>
  void say_if_due(Describe&& describe) {
    if (due_.is_never() || !due_.expired()) return;
    due_ = Deadline::never();
    if (deadline_.expired()) return;
    if constexpr (std::is_same_v<std::invoke_result_t<Describe>, Awaited>) {
      const Awaited awaited = std::forward<Describe>(describe)();
      say(awaited.text, std::min(awaited.deadline, deadline_));
    } else {
      say(std::forward<Describe>(describe)(), deadline_);
    }
  }

 private:
  static void say(const std::string& text, Deadline until);

  Deadline deadline_;
  Deadline due_;  // never, once it is logged
};

}  // namespace lockstep::base
