#include "lockstep/net/handshake.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/net/internal/hmac.h"

namespace lockstep::net {

namespace {

using internal::hmac;

// Equal length, so that no label with what follows it is a prefix of another.
constexpr std::string_view kServerLabel = "lockstep 2 server";
constexpr std::string_view kClientLabel = "lockstep 2 client";
constexpr std::string_view kKeysLabel = "lockstep 2 keys  ";
static_assert(kServerLabel.size() == kClientLabel.size() && kServerLabel.size() == kKeysLabel.size());

// Offsets of the parts of a hello.
constexpr std::size_t kNonceAt = kHandshakeMagic.size();
constexpr std::size_t kAddressAt = kNonceAt + kNonceBytes;

Nonce fresh_nonce() {
  Nonce nonce;
  if (RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) != 1) {
    base::raise(ErrorKind::kSystem, "the random generator returned no bytes for a handshake",
                ErrorFamily::kNetwork);
  }
  return nonce;
}

bool is_loopback(const Address::Canonical& address) {
  constexpr std::array<std::uint8_t, 13> kMappedLoopback = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 127};
  constexpr std::array<std::uint8_t, 16> kLoopback = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  return std::ranges::equal(std::span(address).first<kMappedLoopback.size()>(), kMappedLoopback) ||
         std::ranges::equal(std::span(address).first<kLoopback.size()>(), kLoopback);
}

std::span<const std::uint8_t> raw(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

// Every part has a fixed length or its length before it: two different conversations never give the same
// bytes.
Proof prove(const JobSecret& secret, std::string_view label, const Binding& binding, const Hello& hello,
            const Nonce& server_nonce, std::span<const std::uint8_t> greeting) {
  base::ByteWriter text;
  text.raw(raw(label))
      .put(binding.purpose)
      .sized(binding.server)
      .raw(hello)
      .raw(server_nonce)
      .sized(greeting);
  return hmac(secret.bytes(), text.view());
}

// In constant time: how long a comparison takes must not tell how much of a guess was right.
bool same(std::span<const std::uint8_t, kProofBytes> a, const Proof& b) {
  return CRYPTO_memcmp(a.data(), b.data(), b.size()) == 0;
}

// HKDF (RFC 5869) with SHA-256. The nonces are the salt; the client's proof, which covers the whole
// conversation, is the context, so that two ends that do not agree on every word of it have no key in common.
SessionKeys derive(const JobSecret& secret, const Hello& hello, const Nonce& server_nonce,
                   const Proof& proof) {
  base::ByteWriter salt;
  salt.raw(std::span(hello).subspan<kNonceAt, kNonceBytes>()).raw(server_nonce);
  Proof prk = hmac(salt.view(), secret.bytes());
  SessionKeys keys;
  Proof block{};
  std::uint8_t counter = 0;
  // One block of output per value; an iv takes the first 12 bytes of its block.
  const auto next = [&](std::span<std::uint8_t> into) {
    base::ByteWriter info;
    if (counter > 0) info.raw(block);
    info.raw(raw(kKeysLabel)).raw(proof).put(++counter);
    block = hmac(prk, info.view());
    std::copy_n(block.begin(), into.size(), into.begin());
  };
  next(keys.client.key);
  next(keys.client.iv);
  next(keys.server.key);
  next(keys.server.iv);
  OPENSSL_cleanse(prk.data(), prk.size());
  OPENSSL_cleanse(block.data(), block.size());
  return keys;
}

[[noreturn]] void refuse(const Socket& socket, std::string_view why) {
  base::raise(ErrorKind::kUsage, base::cat("handshake with ", socket.peer().text(), " failed: ", why),
              ErrorFamily::kNetwork);
}

}  // namespace

DirectionKey::~DirectionKey() {
  OPENSSL_cleanse(key.data(), key.size());
  OPENSSL_cleanse(iv.data(), iv.size());
}

HandshakeClient::HandshakeClient(const JobSecret& secret, Binding binding)
    : secret_(secret), binding_(std::move(binding)) {
  const Nonce nonce = fresh_nonce();
  auto at = std::ranges::copy(kHandshakeMagic, hello_.begin()).out;
  at = std::ranges::copy(nonce, at).out;
  std::ranges::copy(binding_.address, at);
}

//   client                                   server
//   hello: nonce, address it dialled   --->
//                                      <---  challenge: nonce, proof of the server
//   proof of the client, greeting      --->
//
// The server proves itself first: a client does not answer an impostor, who could otherwise relay the proof.
// Both nonces are in both proofs, so no old message fits a new conversation; purpose, server name and address
// are too, so none fits another connection.
std::optional<Proof> HandshakeClient::answer(const Challenge& challenge,
                                             std::span<const std::uint8_t> greeting) {
  std::copy_n(challenge.begin(), kNonceBytes, server_nonce_.begin());
  const auto proof = std::span(challenge).last<kProofBytes>();
  if (!same(proof, prove(secret_, kServerLabel, binding_, hello_, server_nonce_, {}))) return std::nullopt;
  proof_ = prove(secret_, kClientLabel, binding_, hello_, server_nonce_, greeting);
  return proof_;
}

SessionKeys HandshakeClient::keys() const {
  return derive(secret_, hello_, server_nonce_, proof_);
}

HandshakeServer::HandshakeServer(const JobSecret& secret, Binding binding)
    : secret_(secret), binding_(std::move(binding)) {}

// A fresh nonce for every hello, so a second hello on the same connection gains nothing.
std::optional<Challenge> HandshakeServer::challenge(const Hello& hello) {
  if (!std::equal(kHandshakeMagic.begin(), kHandshakeMagic.end(), hello.begin())) {
    why_ = "its first bytes are no handshake of this version";
    return std::nullopt;
  }
  const auto dialled = std::span(hello).subspan<kAddressAt>();
  // Only there can the server be sure which address the client must have dialled; elsewhere addresses are
  // translated on the way.
  if (is_loopback(binding_.address) && !std::ranges::equal(dialled, binding_.address)) {
    why_ = "it meant another address; something between the two passes its bytes on";
    return std::nullopt;
  }
  hello_ = hello;
  server_nonce_ = fresh_nonce();
  const Proof proof = prove(secret_, kServerLabel, binding_, hello_, server_nonce_, {});
  Challenge challenge;
  std::ranges::copy(proof, std::ranges::copy(server_nonce_, challenge.begin()).out);
  challenged_ = true;
  return challenge;
}

bool HandshakeServer::accept(const Proof& proof, std::span<const std::uint8_t> greeting) {
  if (!challenged_) return false;
  proof_ = prove(secret_, kClientLabel, binding_, hello_, server_nonce_, greeting);
  return same(proof, proof_);
}

SessionKeys HandshakeServer::keys() const {
  return derive(secret_, hello_, server_nonce_, proof_);
}

SessionKeys handshake_as_client(Socket& socket, const JobSecret& secret, const Binding& binding,
                                Deadline deadline) {
  HandshakeClient client(secret, binding);
  Challenge challenge;
  socket.write_all(client.hello(), deadline);
  socket.read_exact(challenge, deadline);
  const auto proof = client.answer(challenge);
  if (!proof) {
    refuse(socket,
           "it has another job secret (LOCKSTEP_SECRET_FD, LOCKSTEP_SECRET_FILE), or relays the messages of "
           "another connection");
  }
  try {
    socket.write_all(*proof, deadline);
  } catch (const DistNetworkError& error) {
    // Not for want of the secret.
    if (error.kind() != ErrorKind::kPeerLost) throw;
    base::raise(ErrorKind::kSystem, base::cat(error.what(), " after it proved that it has the job secret"),
                ErrorFamily::kNetwork);
  }
  return client.keys();
}

SessionKeys handshake_as_server(Socket& socket, const JobSecret& secret, const Binding& binding,
                                Deadline deadline) {
  HandshakeServer server(secret, binding);
  Hello hello;
  socket.read_exact(hello, deadline);
  const auto challenge = server.challenge(hello);
  if (!challenge) refuse(socket, server.why());
  socket.write_all(*challenge, deadline);
  Proof proof;
  try {
    socket.read_exact(proof, deadline);
  } catch (const DistNetworkError& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    // A client that finds the server's proof wrong closes without a message.
    refuse(socket, "it left after our proof; it has another job secret");
  }
  if (!server.accept(proof)) refuse(socket, "it has another job secret");
  return server.keys();
}

}  // namespace lockstep::net
