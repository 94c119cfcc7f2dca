// What both ends of a TCP connection between workers share: options, and greetings as pieces of a stream.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "lockstep/base/bytes.h"
#include "lockstep/transport/internal/greeting.h"

namespace lockstep::transport::internal {

// No delay; a host that falls silent is given up after about 20 seconds.
void set_tcp_options(int fd);

// u16 length, then the message.
Bytes with_length(std::span<const std::uint8_t> greeting);

// Takes greetings out of a stream, byte by byte as they are needed: what follows the last one stays unread.
class GreetingReader {
 public:
  // Bytes to read next; at least 1.
  std::size_t wanted() const { return have_length() ? 2u + length() - held_.size() : 2u - held_.size(); }
  // Takes what was read. The message when it is complete; broken() when its length cannot be.
  std::optional<Bytes> feed(std::span<const std::uint8_t> bytes);
  bool broken() const { return have_length() && (length() == 0 || length() > net::kMaxPeerMessage); }

 private:
  bool have_length() const { return held_.size() >= 2; }
  std::size_t length() const { return held_[0] | static_cast<std::size_t>(held_[1]) << 8; }
  Bytes held_;
};

// What an errno value or an end of a connection means for the worker behind it.
std::string tcp_end(int code);

}  // namespace lockstep::transport::internal
