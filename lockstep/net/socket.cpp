#include "lockstep/net/socket.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/net/internal/take_descriptors.h"
#include "lockstep/net/internal/wait_fd.h"

namespace lockstep::net {

namespace {

using internal::wait_fd;

std::string error_text(int code) {
  return std::generic_category().message(code);
}

void set_flag(int fd, int level, int option) {
  const int on = 1;
  // A hint for speed or reuse; the socket works without it.
  ::setsockopt(fd, level, option, &on, sizeof on);
}

// Blocking mode: reads wait in the kernel under SO_RCVTIMEO, one call instead of poll and recv.
void set_blocking(int fd, bool blocking) {
  const int flags = ::fcntl(fd, F_GETFL);
  const int wanted = blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK;
  if (flags < 0 || (wanted != flags && ::fcntl(fd, F_SETFL, wanted) != 0)) {
    base::raise(base::system_failure(errno, "fcntl", ErrorFamily::kNetwork));
  }
}

// 0, or the errno of the failure.
int connect_one(const Address& address, Deadline deadline, base::Fd& out) {
  base::Fd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return errno;
  if (address.family() == AF_UNIX) internal::take_descriptors(fd.get(), false);
  if (::connect(fd.get(), address.get(), address.length()) != 0) {
    // After EINTR the connection goes on being made; a second connect() would fail with EALREADY.
    if (errno != EINPROGRESS && errno != EINTR) return errno;
    if (!wait_fd(fd.get(), POLLOUT, deadline)) return ETIMEDOUT;
    int code = 0;
    socklen_t length = sizeof code;
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &code, &length) != 0) return errno;
    if (code != 0) return code;
  }
  // On one host a connect to a free port of the dynamic range can meet itself.
  if (address.family() != AF_UNIX && Address::local_of(fd.get()) == Address::peer_of(fd.get()))
    return ECONNREFUSED;
  out = std::move(fd);
  return 0;
}

}  // namespace

Socket Socket::connect(const std::string& host, std::uint16_t port, Deadline deadline) {
  const auto addresses = Address::resolve(host, port);
  std::string tried;
  int code = 0;
  for (const Address& address : addresses) {
    base::Fd fd;
    code = connect_one(address, deadline, fd);
    if (code == 0) return Socket(std::move(fd));
    tried += base::cat(tried.empty() ? "" : "; ", address.text(), ": ", error_text(code));
    if (deadline.expired()) break;
  }
  base::raise({.kind = code == ETIMEDOUT ? ErrorKind::kTimeout : ErrorKind::kSystem,
               .message = base::cat("cannot connect to ", host_and_port(host, port), " (", tried, ")"),
               .family = ErrorFamily::kNetwork});
}

Socket Socket::connect(const Address& address, Deadline deadline) {
  base::Fd fd;
  const int code = connect_one(address, deadline, fd);
  if (code == 0) return Socket(std::move(fd));
  base::raise(code == ETIMEDOUT ? ErrorKind::kTimeout : ErrorKind::kSystem,
              base::cat("cannot connect to ", address.text(), ": ", error_text(code)), ErrorFamily::kNetwork);
}

Socket Socket::connect_local(std::string_view name, Deadline deadline) {
  return connect(Address::local_name(name), deadline);
}

// Requests and replies are small and wait for each other: without TCP_NODELAY the kernel would hold a short
// segment back until the last one is acknowledged.
Socket::Socket(base::Fd fd)
    : fd_(std::move(fd)), local_(Address::local_of(fd_.get())), peer_(Address::peer_of(fd_.get())) {
  set_blocking(fd_.get(), true);
  set_flag(fd_.get(), IPPROTO_TCP, TCP_NODELAY);
  set_flag(fd_.get(), SOL_SOCKET, SO_KEEPALIVE);
}

// Not blocking in the kernel (MSG_DONTWAIT): SO_SNDTIMEO is per call, the deadline absolute.
void Socket::write_all(std::span<const std::uint8_t> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {
      if (!wait_fd(fd_.get(), POLLOUT, deadline)) fail_timeout("write");
    } else if (errno != EINTR) {
      fail(errno, "write");
    }
  }
}

// The kernel's timeout is per call and the deadline is absolute. Setting it costs a system call, so one that
// is neither longer than the time left nor much shorter stays: a read that wakes too early goes round again.
void Socket::set_receive_timeout(Deadline deadline) {
  std::int64_t wanted = 0;
  if (!deadline.is_never()) {
    // Microseconds. Below it the timeout is set exactly, so that a wait does not end late; above it three
    // quarters of the time left, which stays usable for later reads.
    constexpr std::int64_t kExact = 20'000;
    const std::int64_t left = deadline.remaining().count() / 1000 + 1;
    if (left > kExact && receive_timeout_us_ > left / 2 && receive_timeout_us_ <= left) return;
    wanted = left > kExact ? left / 4 * 3 : left;
  }
  if (wanted == receive_timeout_us_) return;
  const timeval value{.tv_sec = wanted / 1'000'000, .tv_usec = wanted % 1'000'000};
  if (::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &value, sizeof value) != 0) fail(errno, "set timeout");
  receive_timeout_us_ = wanted;
}

// 0 when nothing arrived, or on an error, which the read that follows reports.
std::size_t Socket::look(std::span<std::uint8_t> buffer) {
  auto now = Looks::Clock::now();
  const auto until = now + look_;
  while (now < until && looks_.allowed(now)) {
    // First of all: right after a request there is no reply yet, and whoever makes it may want this core.
    now = looks_.yield(now);
    const ssize_t n = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (n > 0) return static_cast<std::size_t>(n);
    if (n == 0 || errno != EAGAIN) return 0;
  }
  return 0;
}

// Polls first, if that was asked for, then sleeps in the kernel. A timeout of the kernel's own only makes the
// loop look at the deadline again.
std::size_t Socket::read_some(std::span<std::uint8_t> buffer, Deadline deadline) {
  if (look_.count() > 0) {
    if (const std::size_t n = look(buffer)) return n;
  }
  for (;;) {
    set_receive_timeout(deadline);
    const ssize_t n = ::recv(fd_.get(), buffer.data(), buffer.size(), 0);
    if (n > 0) return static_cast<std::size_t>(n);
    if (n == 0) fail_closed();
    if (errno != EAGAIN && errno != EINTR) fail(errno, "read");
    if (deadline.expired()) fail_timeout("read");
  }
}

void Socket::read_exact(std::span<std::uint8_t> buffer, Deadline deadline) {
  while (!buffer.empty()) buffer = buffer.subspan(read_some(buffer, deadline));
}

void Socket::shut_down() noexcept {
  ::shutdown(fd_.get(), SHUT_RDWR);
}

void Socket::fail(int code, const char* what) const {
  if (code == ECONNRESET || code == EPIPE) fail_closed();
  base::raise(base::system_failure(code, base::cat("connection to ", peer_.text(), ": ", what),
                                   ErrorFamily::kNetwork));
}

void Socket::fail_timeout(const char* what) const {
  base::raise(ErrorKind::kTimeout,
              base::cat("connection to ", peer_.text(), ": ", what, " did not end before the deadline"),
              ErrorFamily::kNetwork);
}

void Socket::fail_closed() const {
  base::raise({.kind = ErrorKind::kPeerLost,
               .message = base::cat("connection to ", peer_.text(), " was closed by the other side"),
               .family = ErrorFamily::kNetwork,
               .peer = LostPeer{.cause = "closed the connection"}});
}

Listener Listener::listen(const Address& address, int backlog) {
  const auto check = [&](int result, const char* what) {
    if (result == 0) return;
    const int code = errno;
    base::raise(base::system_failure(
        code, base::cat(what, ' ', address.text(), code == EADDRINUSE ? " (EADDRINUSE)" : ""),
        ErrorFamily::kNetwork));
  };
  base::Fd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) check(-1, "make a socket for");
  set_flag(fd.get(), SOL_SOCKET, SO_REUSEADDR);  // ports of connections that ended lately
  if (address.family() == AF_UNIX) internal::take_descriptors(fd.get(), false);  // unix_socket.h says why
  if (address.family() == AF_INET6) {
    // Both families on one socket; an IPv4 peer appears as a mapped address.
    const int off = 0;
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  }
  check(::bind(fd.get(), address.get(), address.length()), "cannot listen on");
  check(::listen(fd.get(), backlog), "cannot listen on");
  return Listener(std::move(fd));
}

Listener Listener::listen_everywhere(std::uint16_t port, int backlog) {
  try {
    return listen(Address::any(AF_INET6, port), backlog);
  } catch (const DistNetworkError& error) {
    // Machines without IPv6 say so in several ways; a taken port is final.
    if (std::string_view(error.what()).find("EADDRINUSE") != std::string_view::npos) throw;
    return listen(Address::any(AF_INET, port), backlog);
  }
}

Listener Listener::adopt(base::Fd fd) {
  int type = 0;
  socklen_t length = sizeof type;
  sockaddr_storage address{};
  socklen_t address_length = sizeof address;
  // Without a port of its own listen() would give it one on every interface; a connected one cannot listen.
  const bool good = ::getsockopt(fd.get(), SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_STREAM &&
                    ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &address_length) == 0 &&
                    (address.ss_family == AF_INET || address.ss_family == AF_INET6) &&
                    Address::local_of(fd.get()).port() != 0 &&
                    ::getpeername(fd.get(), reinterpret_cast<sockaddr*>(&address), &address_length) != 0;
  if (!good) {
    const int number = fd.release();  // the caller's still
    base::raise(ErrorKind::kUsage,
                base::cat("descriptor ", number, " is not a bound or listening TCP socket"),
                ErrorFamily::kNetwork);
  }
  set_blocking(fd.get(), false);
  ::fcntl(fd.get(), F_SETFD, FD_CLOEXEC);
  return Listener(std::move(fd));
}

void Listener::start(int backlog) {
  if (::listen(fd_.get(), backlog) != 0)
    base::raise(
        base::system_failure(errno, base::cat("cannot listen on ", local_.text()), ErrorFamily::kNetwork));
}

Socket Listener::accept(Deadline deadline) {
  for (;;) {
    // The listener does not block, so a connection that another thread took first costs one more turn.
    base::Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fd) return Socket(std::move(fd));
    if (errno == EAGAIN) {
      if (wait_fd(fd_.get(), POLLIN, deadline)) continue;
      base::raise(ErrorKind::kTimeout,
                  base::cat("nobody connected to ", local_.text(), " before the deadline"),
                  ErrorFamily::kNetwork);
    }
    if (errno != EINTR && errno != ECONNABORTED) {
      base::raise(base::system_failure(errno, base::cat("accept on ", local_.text()), ErrorFamily::kNetwork));
    }
  }
}

}  // namespace lockstep::net
