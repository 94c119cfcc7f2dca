// Whether a local socket takes descriptors that its peer passes (SCM_RIGHTS): while it does not, the peer's sendmsg fails
// with EPERM. What is accepted from a listening socket begins with that one's setting. Does nothing on kernels before Linux 6.16.
#pragma once

namespace lockstep::net::internal {

void take_descriptors(int fd, bool take) noexcept;

}  // namespace lockstep::net::internal
