// Waiting for one descriptor until a deadline.
#pragma once

#include "lockstep/base/deadline.h"

namespace lockstep::net::internal {

// True when one of `events` (POLLIN, POLLOUT) or an error is pending, false at the deadline. Raises kSystem
// when poll(2) itself fails.
bool wait_fd(int fd, short events, Deadline deadline);

}  // namespace lockstep::net::internal
