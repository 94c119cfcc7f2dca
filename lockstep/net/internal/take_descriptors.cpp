#include "lockstep/net/internal/take_descriptors.h"

#include <sys/socket.h>

namespace lockstep::net::internal {

namespace {

// Newer than the headers of Debian 12; the same number on every architecture that lockstep runs on.
#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

}  // namespace

void take_descriptors(int fd, bool take) noexcept {
  const int value = take ? 1 : 0;
  ::setsockopt(fd, SOL_SOCKET, SO_PASSRIGHTS, &value, sizeof value);
}

}  // namespace lockstep::net::internal
