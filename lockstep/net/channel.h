// A socket whose bytes are sealed once both ends have keys (sealed.h), in the clear before: what a client with or
// without a job secret reads and writes. Thread safety, blocking and errors as Socket; one that finds bytes the peer
// did not seal raises kSystem, and from then on nothing can be read.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "lockstep/base/bytes.h"
#include "lockstep/net/sealed.h"
#include "lockstep/net/socket.h"

namespace lockstep::net {

class Channel {
 public:
  explicit Channel(Socket socket) : socket_(std::move(socket)) {}
  // From here on everything is sealed, as this client's.
  void seal_as_client(const SessionKeys& keys);
  bool sealed() const { return opener_.has_value(); }

  void write_all(std::span<const std::uint8_t> bytes, Deadline deadline);
  void read_exact(std::span<std::uint8_t> buffer, Deadline deadline);
  // At least one byte, at most the buffer.
  std::size_t read_some(std::span<std::uint8_t> buffer, Deadline deadline);

  Socket& socket() { return socket_; }
  const Socket& socket() const { return socket_; }

 private:
  std::size_t take_plain(std::span<std::uint8_t> buffer);
  void read_record(Deadline deadline);

  Socket socket_;
  std::optional<Sealer> sealer_;
  std::optional<Opener> opener_;
  Bytes out_;                 // records on their way
  Bytes in_;                  // what was read last; empty while in the clear
  std::size_t in_begin_ = 0;  // not yet given to the opener
  std::size_t in_end_ = 0;
  Bytes plain_;  // opened, not yet asked for
  std::size_t plain_begin_ = 0;
};

}  // namespace lockstep::net
