// When a worker sleeps and what wakes it: the inbox's `asleep` word, the bell, and the sockets.
//
// One thread may be in sleep(). While somebody polls all the time (begin_polling), senders see nobody asleep and do not
// ring, and sockets that somebody polls do not wake the sleeper either; when the last poller leaves, whatever came in
// between rings. Thread safety: every method, sleep() by one thread at a time.
#pragma once

#include <functional>
#include <mutex>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/transport/internal/inbox.h"

namespace lockstep::transport::internal {

class IdleWait {
 public:
  // `sockets` is an epoll descriptor that outlives this. `anything` tells whether something waits in process memory.
  IdleWait(Inbox inbox, int sockets, std::function<bool()> anything);

  // Until something may be there, the bell rang, or the deadline. True when a socket has something.
  bool sleep(Deadline until);
  void begin_polling() noexcept;
  void end_polling() noexcept;
  // Sockets carry messages (TCP): pollers ask them too, so they need not wake the sleeper meanwhile.
  void sockets_are_polled(bool polled);

  // For senders; stays owned.
  int bell() const { return bell_.get(); }
  void ring() const noexcept { local::ring(bell_.get()); }
  // Rings when somebody sleeps.
  void wake_if_asleep() const { local::wake(inbox_.bell(bell_.get())); }

 private:
  void watch_sockets(bool watch) noexcept;
  bool something() const { return inbox_.any_pending() || anything_(); }

  const Inbox inbox_;
  const int sockets_;
  const std::function<bool()> anything_;
  const base::Fd bell_;
  const base::Fd epoll_;
  std::mutex mutex_;
  // Guarded by mutex_.
  int pollers_ = 0;
  bool sleeping_ = false;
  bool sockets_polled_ = false;
  bool sockets_watched_ = true;
};

}  // namespace lockstep::transport::internal
