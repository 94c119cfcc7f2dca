#include "lockstep/transport/internal/tcp_link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::transport::internal {

void set_tcp_options(int fd) {
  const auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof value);
  };
  // A call is one small message and its answer: waiting to fill a segment would add a delay to each.
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  // Keepalive finds a host that is gone while nothing is sent (10 s + 3 probes, 3 s apart), the user timeout
  // one that does not acknowledge what is sent. Both end the connection with ETIMEDOUT.
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 3);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 20'000);
}

Bytes with_length(std::span<const std::uint8_t> greeting) {
  return base::ByteWriter().put(static_cast<std::uint16_t>(greeting.size())).raw(greeting).take();
}

std::optional<Bytes> GreetingReader::feed(std::span<const std::uint8_t> bytes) {
  held_.insert(held_.end(), bytes.begin(), bytes.end());
  if (!have_length() || broken() || held_.size() < 2 + length()) return std::nullopt;
  Bytes message(held_.begin() + 2, held_.end());
  held_.clear();
  return message;
}

std::string tcp_end(int code) {
  if (code == 0) return "its connection ended";
  if (code == ETIMEDOUT) return "its host does not answer (ETIMEDOUT)";
  return base::cat("its connection broke (", ::strerrorname_np(code), ")");
}

}  // namespace lockstep::transport::internal
