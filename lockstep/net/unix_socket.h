// Local sockets with abstract names: they leave nothing in the file system, tell who the peer is
// (SO_PEERCRED) and carry descriptors (SCM_RIGHTS). Messages keep their borders and arrive whole
// (SOCK_SEQPACKET).
//
// Thread safety: one thread may send while another receives. Blocking: every call ends at its deadline.
// Errors: DistNetworkError; kTimeout at the deadline, kPeerLost when the peer closed, kSystem otherwise.
//
// Abstract names are per network namespace and open to every user, and a descriptor is a weapon: whoever closes the last
// one of a TCP socket with unsent data that lingers sleeps in the kernel for as long as its maker likes, whether it
// was asked for or not. So a socket that was reached by name takes no descriptors until trust_own_user() (Linux 6.16 and
// later; earlier kernels have no way to refuse them).
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
  pid_t pid = -1;
  uid_t uid = 0;
  gid_t gid = 0;
};

// Most bytes and descriptors in one message.
inline constexpr std::size_t kMaxUnixMessage = 64 << 10;
inline constexpr std::size_t kMaxUnixFds = 64;

class UnixSocket {
 public:
  // Connects to the abstract name, trying again until the deadline while nobody listens there.
  static UnixSocket connect(const std::string& name, Deadline deadline);
  // Once, without waiting. Nothing: `code` is the errno value.
  static std::optional<UnixSocket> try_connect(const std::string& name, int& code);
  // Two ends connected with each other.
  static std::pair<UnixSocket, UnixSocket> pair();

  // Who connected or accepted, as the kernel saw it at that moment.
  PeerCredentials peer() const;
  // False when the peer runs as another user. Else it may pass descriptors from now on. Neither end of a pair() needs it.
  bool trust_own_user();
  // 1 to kMaxUnixMessage bytes, and up to kMaxUnixFds descriptors, which stay the caller's. Waits while the peer takes no
  // descriptors yet.
  void send(std::span<const std::uint8_t> message, Deadline deadline, std::span<const int> fds = {});
  // One message into `buffer`; returns its length. Descriptors go to `fds`, close-on-exec, or are closed when
  // it is null. A message longer than the buffer raises kSystem.
  std::size_t receive(std::span<std::uint8_t> buffer, Deadline deadline,
                      std::vector<base::Fd>* fds = nullptr);
  // True when the peer has closed its end; never blocks and takes nothing.
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
  // Takes the abstract name, without the leading zero byte; raises kUsage when it is taken. "" lets the
  // kernel choose.
  static UnixListener listen(const std::string& name = "");
  UnixSocket accept(Deadline deadline);
  // Nothing when nobody waits.
  std::optional<UnixSocket> try_accept();
  const std::string& name() const { return name_; }
  int fd() const { return fd_.get(); }

 private:
  UnixListener(base::Fd fd, std::string name) : fd_(std::move(fd)), name_(std::move(name)) {}
  base::Fd fd_;
  std::string name_;
};

}  // namespace lockstep::net
