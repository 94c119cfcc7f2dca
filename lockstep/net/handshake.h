// Proof, in both directions, that a peer knows the job secret. HMAC-SHA256 over fresh random nonces of both sides:
//
//   client -> server   hello      magic[8], client_nonce[32]
//   server -> client   challenge  server_nonce[32], HMAC(secret, "lockstep 1 server" client_nonce server_nonce)
//   client -> server   proof      HMAC(secret, "lockstep 1 client" client_nonce server_nonce)
//
// Each side's words differ, so an answer cannot be sent back as one's own; nonces of both sides enter, so an old
// conversation cannot be played again. Compared in constant time. The handshake proves who is there at the start; it
// does not encrypt what follows.
//
// The classes do no I/O (the store's server runs them from its loop, the fuzzer from a file); the two functions
// run a whole handshake over a socket. Thread safety: none needed, one object per connection.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "lockstep/base/deadline.h"
#include "lockstep/net/secret.h"
#include "lockstep/net/socket.h"

namespace lockstep::net {

// First byte is no query id of torch's TCPStore; the last one is the version.
inline constexpr std::array<std::uint8_t, 8> kHandshakeMagic = {0xA7, 'L', 'O', 'C', 'K', 'S', 'T', 1};
inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kProofBytes = 32;

using Nonce = std::array<std::uint8_t, kNonceBytes>;
using Proof = std::array<std::uint8_t, kProofBytes>;
using Hello = std::array<std::uint8_t, kHandshakeMagic.size() + kNonceBytes>;
using Challenge = std::array<std::uint8_t, kNonceBytes + kProofBytes>;

class HandshakeClient {
 public:
  explicit HandshakeClient(const JobSecret& secret);
  const Hello& hello() const { return hello_; }
  // The answer, or nothing when the server did not prove that it knows the secret.
  std::optional<Proof> answer(const Challenge& challenge) const;

 private:
  const JobSecret secret_;
  Hello hello_;
};

class HandshakeServer {
 public:
  explicit HandshakeServer(const JobSecret& secret);
  // The challenge for a hello, or nothing when its magic is wrong.
  std::optional<Challenge> challenge(const Hello& hello);
  // True when the client knows the secret. False before challenge().
  bool accept(const Proof& proof) const;

 private:
  const JobSecret secret_;
  Nonce client_nonce_{};
  Nonce server_nonce_{};
  bool challenged_ = false;
};

// Raise DistNetworkError of kind kUsage when the secrets differ, as Socket does otherwise.
void handshake_as_client(Socket& socket, const JobSecret& secret, Deadline deadline);
void handshake_as_server(Socket& socket, const JobSecret& secret, Deadline deadline);

}  // namespace lockstep::net
