// How two processes of one job introduce themselves on a new connection: the messages around the proofs of
// handshake.h. The initiator identifies itself and is welcomed, or refused with a reason. No I/O: the owner
// of the connection transfers the messages, as packets (local sockets) or length-prefixed (TCP), so that a
// non-blocking server, a blocking rank and the fuzzer run the same code.
//
//   initiator                                   responder
//   'H' version hello, or 'N' version   --->                        with a key; without
//                                       <---    'C' challenge, or 'G'
//   'I' version proof introduction      --->
//                                       <---    'W' version welcome
//                                               or, at any time, 'X' reason: the end
//
// The contents of introduction and welcome are defined by the caller; the initiator's proof covers the
// introduction. Descriptors may accompany these two messages but no earlier one: by then each side has proven
// that it knows the key, and on a local socket the peer's user has been checked (UnixSocket::trust_own_user).
// Without a key, that check is the only authentication.
//
// Input to next() is untrusted: it is bounds-checked, and refused with a reason. Thread safety: none; one
// object per connection.
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
// Version of these messages; the proofs have their own.
inline constexpr std::uint8_t kPeerHandshakeVersion = 2;

Bytes encode_welcome(std::span<const std::uint8_t> welcome);
// `why` is truncated to a short text.
Bytes encode_refusal(std::string_view why);

// u16 length and at most 256 bytes: the encoding of text in introductions and refusals. put_ truncates longer
// text.
void put_short_text(base::ByteWriter& out, std::string_view text);
std::optional<std::string> get_short_text(base::ByteReader& in);

class HandshakeInitiator {
 public:
  // `binding` describes the connection and the server.
  HandshakeInitiator(const std::optional<JobSecret>& key, const Binding& binding, Bytes introduction);
  Bytes first() const;

  struct Step {
    Bytes send{};                    // not empty: the introduction, descriptors may accompany it
    std::optional<Bytes> welcome{};  // final
    std::string refusal{};           // final: the reason, in printable characters
  };
  Step next(std::span<const std::uint8_t> message);
  // With a key, once next() returned the introduction: the keys that seal everything after it on TCP.
  std::optional<SessionKeys> keys() const;

 private:
  std::optional<HandshakeClient> proof_;
  const Bytes introduction_;
  bool introduced_ = false;
};

class HandshakeResponder {
 public:
  // `binding` describes the connection; its `server` is this process's own name.
  HandshakeResponder(const std::optional<JobSecret>& key, const Binding& binding);

  struct Step {
    Bytes send{};
    std::optional<Bytes> introduction{};  // final: answer with a welcome or a refusal
    std::string refusal{};                // final: already encoded in `send`
  };
  Step next(std::span<const std::uint8_t> message);
  // With a key, once the introduction was received: the keys that seal everything after it on TCP.
  std::optional<SessionKeys> keys() const;
  // The peer has proven that it knows the key, or no key is required.
  bool proven() const { return proven_; }

  static Step refuse(std::string why);

 private:
  std::optional<HandshakeServer> proof_;
  bool greeted_ = false;
  bool proven_ = false;
};

}  // namespace lockstep::net
