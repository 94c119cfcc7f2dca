#include "lockstep/net/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/net/internal/take_descriptors.h"
#include "lockstep/net/internal/wait_fd.h"

namespace lockstep::net {

namespace {

using internal::take_descriptors;
using internal::wait_fd;

// Linux's abstract namespace: a zero byte and then the name, no file. The length is part of the address, so
// the name may contain anything.
struct AbstractAddress {
  sockaddr_un address{};
  socklen_t length = 0;

  explicit AbstractAddress(const std::string& name) {
    address.sun_family = AF_UNIX;
    if (name.size() > sizeof address.sun_path - 1) {
      base::raise(ErrorKind::kUsage, base::cat("local socket name of ", name.size(), " bytes is too long"));
    }
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    // The family alone makes bind(2) choose a free name.
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + (name.empty() ? 0 : 1 + name.size()));
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

// What is accepted from a listening socket has its setting. Descriptors are not accepted until the peer's
// user was checked (trust_own_user): they would be installed in this process before anybody looks at them.
// Packets, not a stream: a message arrives whole, with its descriptors.
base::Fd new_socket() {
  base::Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) base::raise(base::system_failure(errno, "local socket", ErrorFamily::kNetwork));
  take_descriptors(fd.get(), false);
  return fd;
}

[[noreturn]] void raise_timeout(const char* what) {
  base::raise(ErrorKind::kTimeout, base::cat("local socket: ", what, " did not end before the deadline"),
              ErrorFamily::kNetwork);
}

[[noreturn]] void raise_gone(const char* what) {
  base::raise({.kind = ErrorKind::kPeerLost,
               .message = base::cat("local socket: the peer closed the connection (", what, ")"),
               .family = ErrorFamily::kNetwork,
               .peer = LostPeer{.cause = "closed the connection"}});
}

[[noreturn]] void raise_errno(int code, const char* what) {
  if (code == ECONNRESET || code == EPIPE || code == ENOTCONN) raise_gone(what);
  base::raise(base::system_failure(code, base::cat("local socket: ", what), ErrorFamily::kNetwork));
}

using ControlBuffer = std::array<std::uint8_t, CMSG_SPACE(kMaxUnixFds * sizeof(int))>;

// Every descriptor that the kernel installed gets an owner, also those of a message that is refused
// afterwards.
std::vector<base::Fd> take_fds(msghdr& header) {
  std::vector<base::Fd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

UnixSocket UnixSocket::connect(const std::string& name, Deadline deadline) {
  // Polled with growing pauses: connect() on a local socket never waits, and nothing tells when a listener
  // appears.
  auto pause = std::chrono::milliseconds(1);
  for (;;) {
    int code = 0;
    if (auto socket = try_connect(name, code)) return std::move(*socket);
    // Nothing listens yet, or the listener's backlog is full.
    if (code != ECONNREFUSED && code != EAGAIN && code != EINTR) raise_errno(code, "connect");
    if (deadline.expired()) {
      base::raise(ErrorKind::kTimeout, base::cat("local socket: nobody listens at @", name),
                  ErrorFamily::kNetwork);
    }
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline.remaining()));
    pause = std::min(pause * 2, std::chrono::milliseconds(20));
  }
}

std::optional<UnixSocket> UnixSocket::try_connect(const std::string& name, int& code) {
  const AbstractAddress address(name);
  base::Fd fd = new_socket();
  if (::connect(fd.get(), address.get(), address.length) == 0) return UnixSocket(std::move(fd));
  code = errno;
  return std::nullopt;
}

std::pair<UnixSocket, UnixSocket> UnixSocket::pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    base::raise(base::system_failure(errno, "socketpair", ErrorFamily::kNetwork));
  }
  return {UnixSocket(base::Fd(ends[0])), UnixSocket(base::Fd(ends[1]))};
}

PeerCredentials UnixSocket::peer() const {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    raise_errno(errno, "peer credentials");
  }
  return {.pid = credentials.pid, .uid = credentials.uid, .gid = credentials.gid};
}

// The kernel vouches for the user as of the time of connect(); a process cannot forge it.
bool UnixSocket::trust_own_user() {
  if (peer().uid != ::geteuid()) return false;
  take_descriptors(fd_.get(), true);
  return true;
}

void UnixSocket::send(std::span<const std::uint8_t> message, Deadline deadline, std::span<const int> fds) {
  // An empty message would read as the end of the connection.
  if (message.empty() || message.size() > kMaxUnixMessage || fds.size() > kMaxUnixFds) {
    base::raise(ErrorKind::kUsage,
                base::cat("a local message of ", message.size(), " bytes and ", fds.size(), " descriptors"));
  }
  iovec body{.iov_base = const_cast<std::uint8_t*>(message.data()), .iov_len = message.size()};
  msghdr header{};
  header.msg_iov = &body;
  header.msg_iovlen = 1;
  alignas(cmsghdr) ControlBuffer control{};
  if (!fds.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(part), fds.data(), fds.size_bytes());
  }
  while (::sendmsg(fd_.get(), &header, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if ((errno == EPERM || errno == ETOOMANYREFS) && !fds.empty()) {
      // The peer takes no descriptors, or not yet; or this user's descriptors that are sent and not yet
      // received are as many as its limit of open files allows. The kernel does not notify when that changes.
      constexpr std::chrono::microseconds kPause{200};
      if (deadline.expired()) raise_timeout("send of descriptors");
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(kPause, deadline.remaining()));
      continue;
    }
    if (errno != EAGAIN) raise_errno(errno, "send");
    if (!wait_fd(fd_.get(), POLLOUT, deadline)) raise_timeout("send");
  }
}

std::size_t UnixSocket::receive(std::span<std::uint8_t> buffer, Deadline deadline,
                                std::vector<base::Fd>* fds) {
  iovec body{.iov_base = buffer.data(), .iov_len = buffer.size()};
  // Not initialised: the kernel writes the part that is read.
  alignas(cmsghdr) ControlBuffer control;
  msghdr header{};
  header.msg_iov = &body;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  ssize_t n = 0;
  for (;;) {
    // recvmsg() overwrites it.
    header.msg_controllen = control.size();
    n = ::recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC);
    if (n >= 0) break;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) raise_errno(errno, "receive");
    if (!wait_fd(fd_.get(), POLLIN, deadline)) raise_timeout("receive");
  }
  // Taken before anything is refused, so that they are closed then.
  std::vector<base::Fd> taken = take_fds(header);
  if (n == 0) raise_gone("receive");
  if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    base::raise(ErrorKind::kSystem,
                base::cat("local socket: a message is longer than the ", buffer.size(),
                          " bytes expected, or carries too many descriptors"),
                ErrorFamily::kNetwork);
  }
  if (fds != nullptr) *fds = std::move(taken);
  return static_cast<std::size_t>(n);
}

// A byte in the queue means "open", whatever comes after it: the end is only seen when everything before it
// was read.
bool UnixSocket::peer_closed() const {
  std::uint8_t byte = 0;
  const ssize_t n = ::recv(fd_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

UnixListener UnixListener::listen(const std::string& name) {
  const AbstractAddress wanted(name);
  base::Fd fd = new_socket();
  if (::bind(fd.get(), wanted.get(), wanted.length) != 0) {
    if (errno == EADDRINUSE) {
      base::raise(ErrorKind::kUsage, base::cat("local socket name @", name, " is taken"),
                  ErrorFamily::kNetwork);
    }
    raise_errno(errno, "bind");
  }
  if (::listen(fd.get(), 1024) != 0) raise_errno(errno, "listen");
  sockaddr_un bound{};
  socklen_t length = sizeof bound;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0)
    raise_errno(errno, "getsockname");
  // The kernel chose the name where none was given.
  const std::size_t n = length - offsetof(sockaddr_un, sun_path) - 1;
  return UnixListener(std::move(fd), std::string(bound.sun_path + 1, n));
}

std::optional<UnixSocket> UnixListener::try_accept() {
  for (;;) {
    base::Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) return UnixSocket(std::move(fd));
    if (errno == EAGAIN) return std::nullopt;
    // A connection that ended before it was accepted is not a failure of the listener.
    if (errno != EINTR && errno != ECONNABORTED) raise_errno(errno, "accept");
  }
}

UnixSocket UnixListener::accept(Deadline deadline) {
  for (;;) {
    if (auto socket = try_accept()) return std::move(*socket);
    if (!wait_fd(fd_.get(), POLLIN, deadline)) raise_timeout("accept");
  }
}

}  // namespace lockstep::net
