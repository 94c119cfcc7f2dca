// A worker's address, and what transports exchange on top of the handshake (net/peer_handshake.h): who
// connects, and where its messages go. No I/O. Everything decoded here may come from a stranger: it is
// bounded, and refused with a reason. Thread safety: none needed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "lockstep/base/bytes.h"
#include "lockstep/net/peer_handshake.h"
#include "lockstep/net/secret.h"
#include "lockstep/transport/message.h"

namespace lockstep::transport::internal {

// Where a worker is: what Transport::address holds.
struct Endpoint {
  std::string host{};      // host_identity()
  std::string token{};     // random; also the abstract name of its local socket
  std::string tcp_host{};  // a literal address; empty: not reachable by TCP
  std::uint16_t tcp_port = 0;
  std::int64_t pid = -1;
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};
Bytes encode_endpoint(const Endpoint& endpoint);
// Nothing for bytes that are no endpoint.
std::optional<Endpoint> decode_endpoint(std::span<const std::uint8_t> bytes);

struct Intro {
  WorkerId id = 0;
  std::string token{};           // the caller's; must be the one its address has
  std::string to{};              // the callee's: a stale address is refused with an error
  std::uint64_t heap_bytes = 0;  // 0: none comes along
};
struct Welcome {
  std::uint32_t slot = 0;
  std::uint64_t inbox_bytes = 0;
};
Bytes encode_welcome(const Welcome& welcome);

// The caller's side: net::HandshakeInitiator with this introduction and this welcome.
class GreetingClient {
 public:
  // `binding`: the kind of connection and its target; its `server` is intro.to.
  GreetingClient(const std::optional<JobSecret>& secret, const Intro& intro, const net::Binding& binding);
  Bytes first() const { return handshake_.first(); }

  struct Step {
    Bytes send{};                      // not empty: to be sent, and the descriptors with it
    std::optional<Welcome> welcome{};  // the end
    std::string refusal{};             // the end: why not
  };
  Step next(std::span<const std::uint8_t> message);
  std::optional<net::SessionKeys> keys() const { return handshake_.keys(); }

 private:
  net::HandshakeInitiator handshake_;
};

// The callee's. An introduction that was meant for another worker is refused.
class GreetingServer {
 public:
  // `binding`: the kind of connection; its `server` is the own token.
  GreetingServer(const std::optional<JobSecret>& secret, const net::Binding& binding)
      : handshake_(secret, binding), own_token_(binding.server) {}

  struct Step {
    Bytes send{};
    std::optional<Intro> intro{};  // the end: answer with a welcome or a refusal
    std::string refusal{};         // the end: sent already in `send`
  };
  Step next(std::span<const std::uint8_t> message);
  std::optional<net::SessionKeys> keys() const { return handshake_.keys(); }
  bool proven() const { return handshake_.proven(); }

 private:
  net::HandshakeResponder handshake_;
  const std::string own_token_;
};

}  // namespace lockstep::transport::internal
