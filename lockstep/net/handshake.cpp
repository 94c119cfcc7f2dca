#include "lockstep/net/handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <algorithm>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep::net {

namespace {

// Equal length, so that no label with its nonces is a prefix of another.
constexpr std::string_view kServerLabel = "lockstep 1 server";
constexpr std::string_view kClientLabel = "lockstep 1 client";
static_assert(kServerLabel.size() == kClientLabel.size());

Nonce fresh_nonce() {
  Nonce nonce;
  if (RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) != 1) {
    raise(ErrorKind::kSystem, "the random generator gave no bytes for a handshake", ErrorFamily::kNetwork);
  }
  return nonce;
}

Proof prove(const JobSecret& secret, std::string_view label, const Nonce& client, const Nonce& server) {
  std::array<std::uint8_t, kServerLabel.size() + 2 * kNonceBytes> text;
  auto at = std::copy(label.begin(), label.end(), text.begin());
  at = std::copy(client.begin(), client.end(), at);
  std::copy(server.begin(), server.end(), at);
  Proof proof;
  unsigned length = 0;
  const auto key = secret.bytes();
  if (::HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), text.data(), text.size(), proof.data(),
             &length) == nullptr ||
      length != proof.size()) {
    raise(ErrorKind::kInternal, "HMAC-SHA256 failed", ErrorFamily::kNetwork);
  }
  return proof;
}

bool same(std::span<const std::uint8_t, kProofBytes> a, const Proof& b) {
  return CRYPTO_memcmp(a.data(), b.data(), b.size()) == 0;
}

[[noreturn]] void refuse(const Socket& socket, std::string_view why) {
  raise(ErrorKind::kUsage, cat("handshake with ", socket.peer().text(), " failed: ", why),
        ErrorFamily::kNetwork);
}

}  // namespace

HandshakeClient::HandshakeClient(const JobSecret& secret) : secret_(secret) {
  const Nonce nonce = fresh_nonce();
  std::copy(nonce.begin(), nonce.end(),
            std::copy(kHandshakeMagic.begin(), kHandshakeMagic.end(), hello_.begin()));
}

std::optional<Proof> HandshakeClient::answer(const Challenge& challenge) const {
  Nonce client;
  Nonce server;
  std::copy_n(hello_.begin() + kHandshakeMagic.size(), kNonceBytes, client.begin());
  std::copy_n(challenge.begin(), kNonceBytes, server.begin());
  const auto proof = std::span(challenge).last<kProofBytes>();
  if (!same(proof, prove(secret_, kServerLabel, client, server))) return std::nullopt;
  return prove(secret_, kClientLabel, client, server);
}

HandshakeServer::HandshakeServer(const JobSecret& secret) : secret_(secret) {}

std::optional<Challenge> HandshakeServer::challenge(const Hello& hello) {
  if (!std::equal(kHandshakeMagic.begin(), kHandshakeMagic.end(), hello.begin())) return std::nullopt;
  std::copy_n(hello.begin() + kHandshakeMagic.size(), kNonceBytes, client_nonce_.begin());
  server_nonce_ = fresh_nonce();
  const Proof proof = prove(secret_, kServerLabel, client_nonce_, server_nonce_);
  Challenge challenge;
  std::copy(proof.begin(), proof.end(),
            std::copy(server_nonce_.begin(), server_nonce_.end(), challenge.begin()));
  challenged_ = true;
  return challenge;
}

bool HandshakeServer::accept(const Proof& proof) const {
  return challenged_ && same(proof, prove(secret_, kClientLabel, client_nonce_, server_nonce_));
}

void handshake_as_client(Socket& socket, const JobSecret& secret, Deadline deadline) {
  const HandshakeClient client(secret);
  Challenge challenge;
  try {
    socket.write_all(client.hello(), deadline);
    socket.read_exact(challenge, deadline);
  } catch (const DistNetworkError& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    refuse(socket, "it closed the connection; it has no job secret, or is no lockstep");
  }
  const auto proof = client.answer(challenge);
  if (!proof) refuse(socket, "it has another job secret (LOCKSTEP_SECRET_FD, LOCKSTEP_SECRET_FILE)");
  socket.write_all(*proof, deadline);
}

void handshake_as_server(Socket& socket, const JobSecret& secret, Deadline deadline) {
  HandshakeServer server(secret);
  Hello hello;
  socket.read_exact(hello, deadline);
  const auto challenge = server.challenge(hello);
  if (!challenge) refuse(socket, "its first bytes are no handshake; it has no job secret, or is no lockstep");
  socket.write_all(*challenge, deadline);
  Proof proof;
  try {
    socket.read_exact(proof, deadline);
  } catch (const DistNetworkError& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    refuse(socket, "it left after our proof; it has another job secret");
  }
  if (!server.accept(proof)) refuse(socket, "it has another job secret");
}

}  // namespace lockstep::net
