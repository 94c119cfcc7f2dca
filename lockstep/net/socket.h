// A connected stream socket, TCP or local, and a listening one. TCP_NODELAY, close-on-exec, no SIGPIPE.
//
// Thread safety: one thread may write while another reads; everything else from one thread at a time.
// Blocking: every call ends at its deadline. Errors: DistNetworkError naming the peer; kTimeout at the
// deadline, kPeerLost when the peer closed, kSystem otherwise. After an error in the middle of a read or
// write the stream position is unknown: close it.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/net/address.h"
#include "lockstep/net/looks.h"

namespace lockstep::net {

class Socket {
 public:
  // Tries each address of `host` once. Raises DistNetworkError naming host, port and cause.
  static Socket connect(const std::string& host, std::uint16_t port, Deadline deadline);
  // To one address; tries once.
  static Socket connect(const Address& address, Deadline deadline);
  // To an abstract local name; tries once.
  static Socket connect_local(std::string_view name, Deadline deadline);
  // Takes over a connected socket.
  explicit Socket(base::Fd fd);
  Socket(Socket&&) = default;
  Socket& operator=(Socket&&) = default;

  void write_all(std::span<const std::uint8_t> bytes, Deadline deadline);
  // Fills the buffer.
  void read_exact(std::span<std::uint8_t> buffer, Deadline deadline);
  // At least one byte, at most the buffer.
  std::size_t read_some(std::span<std::uint8_t> buffer, Deadline deadline);
  // Before blocking, a read polls for bytes this long, yielding the core between polls. Waking a core from
  // sleep takes tens of microseconds, many times what a nearby peer needs to answer. When other threads
  // compete for the cores it blocks nevertheless (looks.h). Default 0: block at once.
  void set_look_before_sleep(std::chrono::microseconds time) { look_ = time; }
  // Shuts down both directions; a blocked call in another thread fails with an error.
  void shut_down() noexcept;

  const Address& local() const { return local_; }
  const Address& peer() const { return peer_; }
  int fd() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }

 private:
  void set_receive_timeout(Deadline deadline);
  std::size_t look(std::span<std::uint8_t> buffer);
  [[noreturn]] void fail(int code, const char* what) const;
  [[noreturn]] void fail_timeout(const char* what) const;
  [[noreturn]] void fail_closed() const;

  base::Fd fd_;
  Address local_;
  Address peer_;
  std::chrono::microseconds look_{0};
  Looks looks_;
  std::int64_t receive_timeout_us_ = 0;  // as set in the kernel; 0: none
};

class Listener {
 public:
  // Enough for all workers of a large job, which may all connect before the first accept; the kernel caps it
  // at net.core.somaxconn.
  static constexpr int kBacklog = 4096;

  // Port 0 picks a free port. Raises DistNetworkError; the message says EADDRINUSE when the port is in use.
  static Listener listen(const Address& address, int backlog);
  // On every interface, IPv6 and IPv4 where the machine has both.
  static Listener listen_everywhere(std::uint16_t port, int backlog);
  // Takes over a bound stream socket; call start() if it may not be listening yet. Raises kUsage for any
  // other descriptor.
  static Listener adopt(base::Fd fd);
  // Starts listening, unless it already is. Raises DistNetworkError.
  void start(int backlog);

  Socket accept(Deadline deadline);
  const Address& local() const { return local_; }
  int fd() const { return fd_.get(); }
  base::Fd release() { return std::move(fd_); }

 private:
  explicit Listener(base::Fd fd) : fd_(std::move(fd)), local_(Address::local_of(fd_.get())) {}
  base::Fd fd_;
  Address local_;
};

}  // namespace lockstep::net
