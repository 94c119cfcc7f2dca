#include "lockstep/transport/internal/idle_wait.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"

namespace lockstep::transport::internal {
namespace {

constexpr std::uint64_t kBell = 0, kSockets = 1;

base::Fd make_bell() {
  base::Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) base::raise(base::system_failure(errno, "eventfd"));
  return fd;
}

base::Fd make_epoll(int bell, int sockets) {
  base::Fd fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!fd) base::raise(base::system_failure(errno, "epoll"));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kBell}};
  bool good = ::epoll_ctl(fd.get(), EPOLL_CTL_ADD, bell, &event) == 0;
  event.data.u64 = kSockets;
  good = good && ::epoll_ctl(fd.get(), EPOLL_CTL_ADD, sockets, &event) == 0;
  if (!good) base::raise(base::system_failure(errno, "epoll"));
  return fd;
}

}  // namespace

IdleWait::IdleWait(Inbox inbox, int sockets, std::function<bool()> anything)
    : inbox_(std::move(inbox)),
      sockets_(sockets),
      anything_(std::move(anything)),
      bell_(make_bell()),
      epoll_(make_epoll(bell_.get(), sockets)) {}

//   asleep, nobody polls    announced: senders ring the bell
//   asleep, somebody polls  not announced: the poller finds what arrives, and senders save the system call
//   the last poller stops   end_polling() announces in the sleeper's place, and rings if something is there
//                           already
//
// Threads that poll and one that sleeps thus never both rely on the other. mutex_ makes the change from one
// row to the next atomic.
bool IdleWait::sleep(Deadline until) {
  bool look = false;
  {
    const base::MutexLock lock(mutex_);
    sleeping_ = true;
    look = pollers_ == 0;
    if (look) local::announce(inbox_.bell(bell()));
  }
  epoll_event events[2];
  // After the announcement (seq_cst), so that an event that is missed here rings. With pollers nothing is
  // announced: end_polling() looks instead.
  const int timeout = look && something() ? 0 : until.poll_timeout_ms();
  const int n = ::epoll_wait(epoll_.get(), events, 2, timeout);
  {
    const base::MutexLock lock(mutex_);
    sleeping_ = false;
    local::retract(inbox_.bell(bell()));
  }
  bool sockets = false;
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kSockets) {
      sockets = true;
      continue;
    }
    std::uint64_t rung = 0;
    [[maybe_unused]] const auto got = ::read(bell_.get(), &rung, sizeof rung);
  }
  return sockets;
}

void IdleWait::begin_polling() noexcept {
  const base::MutexLock lock(mutex_);
  if (pollers_++ != 0) return;
  if (sleeping_) local::retract(inbox_.bell(bell()));
  if (sockets_polled_) watch_sockets(false);
}

void IdleWait::end_polling() noexcept {
  const base::MutexLock lock(mutex_);
  if (--pollers_ != 0) return;
  watch_sockets(true);
  if (!sleeping_) return;
  local::announce(inbox_.bell(bell()));
  if (something()) ring();
}

void IdleWait::sockets_are_polled(bool polled) {
  const base::MutexLock lock(mutex_);
  sockets_polled_ = polled;
  watch_sockets(pollers_ == 0 || !polled);
}

// Pre: mutex_ is held, or nothing runs yet. While pollers read the sockets themselves, their readiness must
// not wake the sleeper.
void IdleWait::watch_sockets(bool watch) noexcept {
  if (sockets_watched_ == watch) return;
  epoll_event event{.events = watch ? static_cast<std::uint32_t>(EPOLLIN) : 0u, .data = {.u64 = kSockets}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, sockets_, &event) == 0) sockets_watched_ = watch;
}

}  // namespace lockstep::transport::internal
