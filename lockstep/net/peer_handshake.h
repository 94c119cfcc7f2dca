// How two processes of one job meet on a new connection: the messages around the proofs of handshake.h. One initiates,
// says who it is, and is welcomed or refused with a reason. No I/O: whoever has the connection carries the messages, as
// packets (local sockets) or with a length before each (TCP), so that a server that must not block, a rank that may
// and the fuzzer run the same code.
//
//   initiator                                   responder
//   'H' version hello, or 'N' version   --->                        with a key; without
//                                       <---    'C' challenge, or 'G'
//   'I' version proof introduction      --->
//                                       <---    'W' version welcome
//                                               or, at any time, 'X' reason: the end
//
// Introduction and welcome are the caller's bytes; the initiator's proof covers the introduction. Descriptors go with
// these two messages and no earlier: by then each side has proven that it knows the key, and a local socket has been
// asked for its peer's user (UnixSocket::trust_own_user). Without a key that user is all the proof there is.
//
// Everything that next() takes may come from anybody: it is bounded by its decoder, and refused with a reason. Thread
// safety: none needed, one object per connection.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/net/handshake.h"
#include "lockstep/net/secret.h"

namespace lockstep::net {

// The longest message, introduction and welcome included.
inline constexpr std::size_t kMaxPeerMessage = 1024;
// Of these messages; the proofs have a version of their own.
inline constexpr std::uint8_t kPeerHandshakeVersion = 2;

Bytes encode_welcome(std::span<const std::uint8_t> welcome);
// Cut to what fits into a short text.
Bytes encode_refusal(std::string_view why);

// u16 length and bytes, 256 at most: how text lies in introductions and refusals. put_ cuts what is longer.
void put_short_text(base::ByteWriter& out, std::string_view text);
std::optional<std::string> get_short_text(base::ByteReader& in);

class HandshakeInitiator {
 public:
  // `binding` says over what it calls whom.
  HandshakeInitiator(const std::optional<JobSecret>& key, const Binding& binding, Bytes introduction);
  Bytes first() const;

  struct Step {
    Bytes send{};                    // not empty: the introduction, and descriptors with it
    std::optional<Bytes> welcome{};  // the end
    std::string refusal{};           // the end: why not, in printable characters
  };
  Step next(std::span<const std::uint8_t> message);
  // With a key, once the introduction is to be sent: what seals everything after it on TCP.
  std::optional<SessionKeys> keys() const;

 private:
  std::optional<HandshakeClient> proof_;
  const Bytes introduction_;
  bool introduced_ = false;
};

class HandshakeResponder {
 public:
  // `binding` says over what it was called; its `server` is its own name.
  HandshakeResponder(const std::optional<JobSecret>& key, const Binding& binding);

  struct Step {
    Bytes send{};
    std::optional<Bytes> introduction{};  // the end: answer with a welcome or a refusal
    std::string refusal{};                // the end: said already in `send`
  };
  Step next(std::span<const std::uint8_t> message);
  // With a key, once there was an introduction: what seals everything after it on TCP.
  std::optional<SessionKeys> keys() const;
  // It knows the key, or none was asked for: no stranger any more.
  bool proven() const { return proven_; }

  static Step refuse(std::string why);

 private:
  std::optional<HandshakeServer> proof_;
  bool greeted_ = false;
  bool proven_ = false;
};

}  // namespace lockstep::net
