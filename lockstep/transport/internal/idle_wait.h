// When a worker sleeps and what wakes it: the inbox's `asleep` word, the bell (an eventfd), and the sockets.
//
//   pollers  sleeping   asleep word   sockets wake the sleeper
//   none     no         0             -
//   none     yes        1             yes
//   some     yes or no  0             no, if pollers ask them too (TCP); otherwise yes
//
// While some thread polls continuously (begin_polling), senders find nobody asleep and do not ring. When the
// last poller leaves, the sleeper is announced again and whatever arrived in between rings for it. mutex_
// keeps word and counts consistent; it is not held while sleeping. Thread safety: every method, sleep() by
// one thread at a time.
#pragma once

#include <functional>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/transport/internal/inbox.h"

namespace lockstep::transport::internal {

class IdleWait {
 public:
  // `sockets` is an epoll descriptor that outlives this. `anything` returns whether an event is queued in
  // process memory.
  IdleWait(Inbox inbox, int sockets, std::function<bool()> anything);

  // Until something may have arrived, the bell rang, or the deadline. True when a socket is ready.
  bool sleep(Deadline until);
  void begin_polling() noexcept;
  void end_polling() noexcept;
  // Sockets carry messages (TCP): pollers poll them too, so they need not wake the sleeper meanwhile.
  void sockets_are_polled(bool polled);

  // For senders; stays owned.
  int bell() const { return bell_.get(); }
  void ring() const noexcept { local::ring(bell_.get()); }
  // Rings when somebody sleeps.
  void wake_if_asleep() const { local::wake(inbox_.bell(bell_.get())); }

 private:
  void watch_sockets(bool watch) noexcept LOCKSTEP_REQUIRES(mutex_);
  bool something() const { return inbox_.any_pending() || anything_(); }

  const Inbox inbox_;
  const int sockets_;
  const std::function<bool()> anything_;
  const base::Fd bell_;
  const base::Fd epoll_;
  base::Mutex mutex_;
  int pollers_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  bool sleeping_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool sockets_polled_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool sockets_watched_ LOCKSTEP_GUARDED_BY(mutex_) = true;
};

}  // namespace lockstep::transport::internal
