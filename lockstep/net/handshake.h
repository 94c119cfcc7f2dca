// Proof, in both directions, that a peer knows the job secret, and the keys for what follows. HMAC-SHA256 over fresh
// random nonces of both sides and over everything both sides must agree on:
//
//   client -> server   hello      magic[8], client_nonce[32], dialled[18]
//   server -> client   challenge  server_nonce[32], HMAC(secret, "lockstep 2 server" transcript)
//   client -> server   proof      HMAC(secret, "lockstep 2 client" transcript greeting)
//   transcript := purpose, who the server is, hello, server_nonce
//
// - Each side's words differ, so an answer cannot be sent back as one's own; nonces of both sides enter, so an old
//   conversation cannot be played again.
// - The purpose and the server's identity (a transport's token, a local socket's name) enter, so a conversation with
//   one server cannot be passed on to another that has the same secret.
// - The address that the client dialled enters. A server that was reached over loopback insists that it is its own:
//   whatever forwards loopback connections is a process in between. Beyond loopback addresses are translated (NAT,
//   container and service addresses), so there it is agreed on, not compared.
// - The greeting (a transport's introduction) enters the client's proof.
//
// Whoever merely passes the handshake on learns no key: what follows on TCP is sealed (sealed.h) with keys derived from
// the secret and this conversation. Proofs are compared in constant time. There is no forward secrecy: whoever gets
// the secret can read what he recorded.
//
// The classes do no I/O (the store's server runs them from its loop, the fuzzer from a file); the two functions
// run a whole handshake over a socket. Thread safety: none needed, one object per connection.
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

// First byte is no query id of torch's TCPStore; the last one is the version.
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

// What both sides must agree on before they speak.
struct Binding {
  Purpose purpose = Purpose::kStoreTcp;
  // Who the server is, as far as the client knows beforehand: a transport's token, a local socket's name. Empty for a
  // store on TCP, of which the client knows the address only.
  std::string server{};
  // Client: the address it dialled. Server: the one it was reached at. Zeros on local sockets.
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
  // The answer, or nothing when the server did not prove that it knows the secret and means the same connection.
  // `greeting` travels beside it and is vouched for by it.
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
  // The challenge for a hello, or nothing when its magic is wrong or it was meant for another loopback address: why()
  // says which.
  std::optional<Challenge> challenge(const Hello& hello);
  // True when the client knows the secret and said `greeting`. False before challenge().
  bool accept(const Proof& proof, std::span<const std::uint8_t> greeting = {});
  // After accept() said true.
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

// Raise DistNetworkError as Socket does: of kind kUsage when the secrets differ. As client kPeerLost when the server
// closed the connection before it answered: it has no secret, is no lockstep, or has no room for strangers just now. kSystem when
// it closed it later.
SessionKeys handshake_as_client(Socket& socket, const JobSecret& secret, const Binding& binding,
                                Deadline deadline);
SessionKeys handshake_as_server(Socket& socket, const JobSecret& secret, const Binding& binding,
                                Deadline deadline);

}  // namespace lockstep::net
