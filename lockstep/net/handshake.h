// Mutual proof that both sides know the job secret, and derivation of the session keys. HMAC-SHA256 over
// fresh random nonces of both sides and over everything both sides must agree on:
//
//   client -> server   hello      magic[8], client_nonce[32], dialled[18]
//   server -> client   challenge  server_nonce[32], HMAC(secret, "lockstep 2 server" transcript)
//   client -> server   proof      HMAC(secret, "lockstep 2 client" transcript greeting)
//   transcript := purpose, who the server is, hello, server_nonce
//
// - Each side uses its own label, so a proof cannot be reflected; the nonces of both sides are included, so
//   an old session cannot be replayed.
// - The purpose and the server's identity (a transport's token, a local socket's name) are included, so a
//   session with one server cannot be relayed to another that has the same secret.
// - The address that the client dialled is included. A server reached over loopback requires it to be its
//   own: whatever forwards loopback connections is a man in the middle. Beyond loopback, addresses are
//   translated (NAT, container and service addresses), so there it is authenticated but not compared.
// - The greeting (a transport's introduction) is covered by the client's proof.
//
// A relay of the handshake learns no key: what follows on TCP is sealed (sealed.h) with keys derived from the
// secret and this transcript. Proofs are compared in constant time. There is no forward secrecy: an attacker
// who obtains the secret can decrypt recorded traffic.
//
// The classes do no I/O (the store's server runs them from its loop, the fuzzer from a file); the two
// functions run a whole handshake over a socket. Thread safety: none; one object per connection.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/net/address.h"
#include "lockstep/net/secret.h"
#include "lockstep/net/socket.h"

namespace lockstep::net {

// The first byte is not a query id of torch's TCPStore; the last one is the version.
inline constexpr std::array<std::uint8_t, 8> kHandshakeMagic = {0xA7, 'L', 'O', 'C', 'K', 'S', 'T', 2};
inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kProofBytes = 32;

using Nonce = std::array<std::uint8_t, kNonceBytes>;
using Proof = std::array<std::uint8_t, kProofBytes>;
using Hello = std::array<std::uint8_t, kHandshakeMagic.size() + kNonceBytes + Address::Canonical{}.size()>;
using Challenge = std::array<std::uint8_t, kNonceBytes + kProofBytes>;

// What a connection is for. Numbers are on the wire (inside the proofs): never reuse one.
enum class Purpose : std::uint8_t {
  kStoreTcp = 1,
  kStoreLocal = 2,
  kTransportTcp = 3,
  kTransportLocal = 4,
  kHostLocal = 5,
};

// What both sides must agree on.
struct Binding {
  Purpose purpose = Purpose::kStoreTcp;
  // The server's identity, as far as the client knows it in advance: a transport's token, a local socket's
  // name. Empty for a store on TCP, where the client knows only the address.
  std::string server{};
  // Client: the address it dialled. Server: the local address of the connection. Zeros on local sockets.
  Address::Canonical address{};
};

// One direction of a sealed connection.
struct DirectionKey {
  std::array<std::uint8_t, 32> key{};
  std::array<std::uint8_t, 12> iv{};
  DirectionKey() = default;
  DirectionKey(const DirectionKey&) = default;
  DirectionKey& operator=(const DirectionKey&) = default;
  ~DirectionKey();  // wiped
};
struct SessionKeys {
  DirectionKey client;  // seals what the client sends
  DirectionKey server;
};

class HandshakeClient {
 public:
  HandshakeClient(const JobSecret& secret, Binding binding);
  const Hello& hello() const { return hello_; }
  // The proof, or nothing when the server did not prove that it knows the secret and agrees on the binding.
  // `greeting` is sent beside the proof and authenticated by it.
  std::optional<Proof> answer(const Challenge& challenge, std::span<const std::uint8_t> greeting = {});
  // After answer().
  SessionKeys keys() const;

 private:
  const JobSecret secret_;
  const Binding binding_;
  Hello hello_;
  Nonce server_nonce_{};
  Proof proof_{};
};

class HandshakeServer {
 public:
  HandshakeServer(const JobSecret& secret, Binding binding);
  // The challenge for a hello, or nothing when its magic is wrong or it names another loopback address; why()
  // says which.
  std::optional<Challenge> challenge(const Hello& hello);
  // True when the client knows the secret and sent `greeting`. False before challenge().
  bool accept(const Proof& proof, std::span<const std::uint8_t> greeting = {});
  // After accept() returned true.
  SessionKeys keys() const;
  const char* why() const { return why_; }

 private:
  const JobSecret secret_;
  const Binding binding_;
  Hello hello_{};
  Nonce server_nonce_{};
  Proof proof_{};
  const char* why_ = "";
  bool challenged_ = false;
};

// Raise DistNetworkError as Socket does, with kind kUsage when the secrets differ. The client raises
// kPeerLost when the server closed the connection before answering (it has no secret, is not lockstep, or has
// no slot left for unauthenticated connections), kSystem when it closed later.
SessionKeys handshake_as_client(Socket& socket, const JobSecret& secret, const Binding& binding,
                                Deadline deadline);
SessionKeys handshake_as_server(Socket& socket, const JobSecret& secret, const Binding& binding,
                                Deadline deadline);

}  // namespace lockstep::net
