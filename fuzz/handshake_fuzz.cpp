// Random bytes in place of a handshake: nothing but the right proof may open the door. And random bytes after
// a good one, whole or in place of records that were really sealed: nothing but what the peer sealed, in its
// order, comes out.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "lockstep/net/handshake.h"
#include "lockstep/net/sealed.h"
#include "lockstep/store/internal/tcp_session.h"

namespace net = lockstep::net;

namespace {

const lockstep::TcpStoreLimits kLimits{.total_bytes = 1 << 20};

template <class Array>
bool take(std::span<const std::uint8_t>& bytes, Array& array) {
  if (bytes.size() < array.size()) return false;
  std::copy_n(bytes.begin(), array.size(), array.begin());
  bytes = bytes.subspan(array.size());
  return true;
}

const net::Binding kReached{.purpose = net::Purpose::kStoreTcp};

// The input says which of a few good records come, which are changed and where, and how they are cut.
void records(const net::SessionKeys& keys, std::span<const std::uint8_t> input) {
  net::Sealer sealer(keys.client, 4);
  net::Opener opener(keys.client, 4);
  lockstep::Bytes sealed[8];
  for (std::uint8_t i = 0; i < 8; ++i) sealer.seal(lockstep::Bytes(1 + i, i), sealed[i]);
  std::uint8_t expected = 0;
  bool tampered = false;
  while (input.size() >= 2 && !opener.failed()) {
    const std::uint8_t which = input[0] % 8, where = input[1];
    input = input.subspan(2);
    lockstep::Bytes record = sealed[which];
    if (where < 64) record[where % record.size()] ^= static_cast<std::uint8_t>(1 + where);
    tampered = tampered || where < 64 || which != expected;
    ++expected;
    const std::size_t step = 1 + where % 32;
    for (std::size_t at = 0; at < record.size() && !opener.failed(); at += step) {
      auto part = std::span<const std::uint8_t>(record).subspan(at, std::min(step, record.size() - at));
      while (!part.empty() && !opener.failed()) {
        const auto plain = opener.next(part);
        if (plain && (tampered || plain->size() != 1u + which || plain->front() != which)) std::abort();
      }
    }
    if (!tampered && (opener.failed() || !opener.between_records())) std::abort();
    if (expected == 8) return;
  }
}

// A client that knows the secret, and somebody else's bytes after its proof.
void after_a_good_proof(const lockstep::JobSecret& secret, std::span<const std::uint8_t> input) {
  lockstep::internal::TcpShared shared(kLimits, secret);
  lockstep::internal::TcpSession session(shared, nullptr, kReached);
  net::HandshakeClient client(secret, kReached);
  if (!session.feed(client.hello())) std::abort();
  net::Challenge challenge;
  std::span<const std::uint8_t> said = session.output();
  if (!take(said, challenge)) std::abort();
  session.output().clear();
  if (!session.feed(*client.answer(challenge))) std::abort();
  records(client.keys(), input);
  session.feed(input);
  if (session.validated() || shared.data.n_keys() != 0) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto secret = lockstep::JobSecret::mint();
  const std::span<const std::uint8_t> all(data, size);

  std::span<const std::uint8_t> rest = all;
  net::Hello hello;
  net::Proof proof;
  net::HandshakeServer server(secret, kReached);
  if (take(rest, hello)) server.challenge(hello);
  if (take(rest, proof) && server.accept(proof)) std::abort();

  rest = all;
  net::Challenge challenge;
  if (take(rest, challenge) && net::HandshakeClient(secret, kReached).answer(challenge)) std::abort();

  // And through the server's session, where a store request follows.
  lockstep::internal::TcpShared shared(kLimits, secret);
  lockstep::internal::TcpSession session(shared, nullptr, kReached);
  session.feed(all);
  if (session.validated() || shared.data.n_keys() != 0) std::abort();

  if (!all.empty() && all[0] % 4 == 0) after_a_good_proof(secret, all.subspan(1));
  return 0;
}
