// How two couriers meet on a new connection, and what an address holds. No I/O: the connections carry the messages, as
// packets (local sockets) or with a length before each (TCP).
//
//   caller -> callee   hello of the handshake, or "no secret here"
//   callee -> caller   challenge, or "go on", or a refusal with its reason
//   caller -> callee   proof and introduction: who calls, and the size of its outbox
//   callee -> caller   welcome: the slot of the callee's inbox, or a refusal
//
// With a job secret the proofs cover the callee's token, the transport and the introduction, and on TCP everything
// after the proof is sealed with the keys that both sides have then.
//
// Everything decoded here may come from anybody: bounded, and refused with a reason. Thread safety: none needed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "lockstep/base/bytes.h"
#include "lockstep/courier/message.h"
#include "lockstep/net/handshake.h"
#include "lockstep/net/secret.h"

namespace lockstep::courier::internal {

inline constexpr std::size_t kMaxGreeting = 1024;

// Where a worker is: what Courier::address holds.
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
  std::string token{};             // the caller's; must be the one its address has
  std::string to{};                // the callee's: whoever got an address of an earlier job hears so
  std::uint64_t outbox_bytes = 0;  // 0: none comes along
};
struct Welcome {
  std::uint32_t slot = 0;
  std::uint64_t inbox_bytes = 0;
};
Bytes encode_welcome(const Welcome& welcome);
Bytes encode_refusal(std::string_view why);

class GreetingClient {
 public:
  // `binding` says over what it calls whom; its `server` is intro.to.
  GreetingClient(const std::optional<JobSecret>& secret, const Intro& intro, const net::Binding& binding);
  Bytes first() const;

  struct Step {
    Bytes send{};                      // not empty: to be sent, and the descriptors with it
    std::optional<Welcome> welcome{};  // the end
    std::string refusal{};             // the end: why not
  };
  Step next(std::span<const std::uint8_t> message);
  // With a secret, once the introduction is to be sent: what seals everything after it on TCP.
  std::optional<net::SessionKeys> keys() const;

 private:
  std::optional<net::HandshakeClient> handshake_;
  const Intro intro_;
  bool introduced_ = false;
};

class GreetingServer {
 public:
  // `binding` says over what it was called; its `server` is the own token.
  GreetingServer(const std::optional<JobSecret>& secret, const net::Binding& binding);

  struct Step {
    Bytes send{};
    std::optional<Intro> intro{};  // the end: answer with a welcome or a refusal
    std::string refusal{};         // the end: sent already in `send`
  };
  Step next(std::span<const std::uint8_t> message);
  // With a secret, once there was an introduction: what seals everything after it on TCP.
  std::optional<net::SessionKeys> keys() const;
  bool proven() const { return proven_; }

 private:
  Step refuse(std::string why) const;

  std::optional<net::HandshakeServer> handshake_;
  const std::string own_token_;
  bool greeted_ = false;
  bool proven_ = false;
};

}  // namespace lockstep::courier::internal
