// Random bytes in place of a handshake: nothing but the right proof may open the door.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "lockstep/net/handshake.h"
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

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto secret = lockstep::JobSecret::mint();
  const std::span<const std::uint8_t> all(data, size);

  std::span<const std::uint8_t> rest = all;
  net::Hello hello;
  net::Proof proof;
  net::HandshakeServer server(secret);
  if (take(rest, hello)) server.challenge(hello);
  if (take(rest, proof) && server.accept(proof)) std::abort();

  rest = all;
  net::Challenge challenge;
  if (take(rest, challenge) && net::HandshakeClient(secret).answer(challenge)) std::abort();

  // And through the server's session, where a store request follows.
  lockstep::internal::TcpShared shared(kLimits, secret);
  lockstep::internal::TcpSession session(shared);
  session.feed(all);
  if (session.validated() || shared.data.n_keys() != 0) std::abort();
  return 0;
}
