// Whether a local socket accepts descriptors from its peer (SCM_RIGHTS): while it does not, the peer's
// sendmsg fails with EPERM. Accepted sockets inherit the listening socket's setting. No-op on kernels before
// Linux 6.16.
#pragma once

namespace lockstep::net::internal {

void take_descriptors(int fd, bool take) noexcept;

}  // namespace lockstep::net::internal
