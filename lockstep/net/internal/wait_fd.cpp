#include "lockstep/net/internal/wait_fd.h"

#include <poll.h>

#include <cerrno>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"

namespace lockstep::net::internal {

bool wait_fd(int fd, short events, Deadline deadline) {
  pollfd entry{.fd = fd, .events = events, .revents = 0};
  for (;;) {
    const int ready = ::poll(&entry, 1, deadline.poll_timeout_ms());
    if (ready > 0) return true;
    if (ready == 0 && deadline.expired()) return false;
    if (ready < 0 && errno != EINTR) base::raise(base::system_failure(errno, "poll", ErrorFamily::kNetwork));
  }
}

}  // namespace lockstep::net::internal
