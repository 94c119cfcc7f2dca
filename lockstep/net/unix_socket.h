// Local sockets with abstract names: they leave nothing in the file system, identify the peer (SO_PEERCRED)
// and pass descriptors (SCM_RIGHTS). Message boundaries are preserved (SOCK_SEQPACKET).
//
// Thread safety: one thread may send while another receives. Blocking: every call ends at its deadline.
// Errors: DistNetworkError; kTimeout at the deadline, kPeerLost when the peer closed, kSystem otherwise.
//
// Abstract names are per network namespace and open to every user, and receiving a descriptor is dangerous:
// closing the last reference to a TCP socket with unsent data and SO_LINGER blocks in the kernel as long as
// its creator chose, whether the descriptor was wanted or not. So a socket that was reached by name accepts
// no descriptors until trust_own_user() (Linux 6.16 and later; earlier kernels cannot refuse them).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/fd.h"

namespace lockstep::net {

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};

// Limits on bytes and descriptors per message.
inline constexpr std::size_t kMaxUnixMessage = 64 << 10;
inline constexpr std::size_t kMaxUnixFds = 64;

class UnixSocket {
 public:
  // Connects to the abstract name, retrying until the deadline while nothing listens there.
  static UnixSocket connect(const std::string& name, Deadline deadline);
  // Tries once, without waiting. On failure returns nothing and sets `code` to errno.
  static std::optional<UnixSocket> try_connect(const std::string& name, int& code);
  // A connected pair.
  static std::pair<UnixSocket, UnixSocket> pair();

  // The peer's credentials at the time of connect or accept, from the kernel.
  PeerCredentials peer() const;
  // False when the peer runs as another user; otherwise it may pass descriptors from now on. Not needed for
  // pair().
  bool trust_own_user();
  // 1 to kMaxUnixMessage bytes, and up to kMaxUnixFds descriptors, which the caller keeps owning. Waits until
  // the peer accepts descriptors.
  void send(std::span<const std::uint8_t> message, Deadline deadline, std::span<const int> fds = {});
  // One message into `buffer`; returns its length. Descriptors go to `fds`, close-on-exec, or are closed when
  // it is null. A message longer than the buffer raises kSystem.
  std::size_t receive(std::span<std::uint8_t> buffer, Deadline deadline,
                      std::vector<base::Fd>* fds = nullptr);
  // True when the peer has closed its end; never blocks and consumes nothing.
  bool peer_closed() const;

  // For poll(2); stays owned.
  int fd() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }

  UnixSocket() = default;
  explicit UnixSocket(base::Fd fd) : fd_(std::move(fd)) {}

 private:
  base::Fd fd_;
};

class UnixListener {
 public:
  // Binds the abstract name, without the leading zero byte; raises kUsage when it is in use. "" lets the
  // kernel choose.
  static UnixListener listen(const std::string& name = "");
  UnixSocket accept(Deadline deadline);
  // Nothing when no connection is pending.
  std::optional<UnixSocket> try_accept();
  const std::string& name() const { return name_; }
  int fd() const { return fd_.get(); }

 private:
  UnixListener(base::Fd fd, std::string name) : fd_(std::move(fd)), name_(std::move(name)) {}
  base::Fd fd_;
  std::string name_;
};

}  // namespace lockstep::net
