// A connected stream socket, TCP or local, and a listening one. No small-packet delay, close-on-exec, no SIGPIPE.
//
// Thread safety: one thread may write while another reads; everything else from one thread at a time.
// Blocking: every call ends at its deadline. Errors: DistNetworkError naming the peer; kTimeout at the deadline,
// kPeerLost when the peer closed, kSystem otherwise. After an error in the middle of a read or write the stream's
// place is unknown: close it.
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
  // Before a read sleeps it looks for bytes this long, yielding the core in between. A core that is woken from sleep
  // takes tens of microseconds, many times what a nearby peer needs to answer. Where others want the cores it sleeps
  // nevertheless (looks.h). 0 at first: sleep at once.
  void set_look_before_sleep(std::chrono::microseconds time) { look_ = time; }
  // Ends the stream in both directions; a blocked call of another thread returns with an error.
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
  std::int64_t receive_timeout_us_ = 0;  // as the kernel has it; 0: none
};

class Listener {
 public:
  // Port 0 takes a free one. `backlog` is cut by net.core.somaxconn. Raises DistNetworkError; the text says EADDRINUSE
  // when the port is taken.
  // As many as a large job's workers, who may all connect before anybody accepts; the kernel cuts it to net.core.somaxconn.
  static constexpr int kBacklog = 4096;

  static Listener listen(const Address& address, int backlog);
  // On every interface, IPv6 and IPv4 where the machine has both.
  static Listener listen_everywhere(std::uint16_t port, int backlog);
  // Takes over a stream socket that is bound; start() it when it may not listen yet. Raises kUsage for any other.
  static Listener adopt(base::Fd fd);
  // Listens, if it did not. Raises DistNetworkError.
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
