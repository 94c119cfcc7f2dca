// A client's socket, in plaintext until both ends have keys, sealed afterwards (sealed.h); without a job
// secret it stays in plaintext. Thread safety, blocking and errors as Socket. A read that finds bytes the
// peer did not seal raises kSystem, and so does every later read.
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
  // Seals everything from here on, with the client's keys.
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
  Bytes out_;                 // records being sent
  Bytes in_;                  // bytes read last; empty while in plaintext
  std::size_t in_begin_ = 0;  // start of the bytes not yet passed to the opener
  std::size_t in_end_ = 0;
  Bytes plain_;  // opened, not yet returned
  std::size_t plain_begin_ = 0;
};

}  // namespace lockstep::net
