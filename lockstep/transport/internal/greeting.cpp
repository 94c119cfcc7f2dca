#include "lockstep/transport/internal/greeting.h"
#include "lockstep/base/detail/byte_io.h"

#include <algorithm>
#include <array>
#include <utility>

namespace lockstep::transport::internal {
namespace {

using net::get_short_text;
using net::put_short_text;

constexpr std::uint8_t kVersion = 2;
constexpr std::array<std::uint8_t, 4> kAddressMagic = {'L', 'S', 'C', kVersion};

Bytes encode_intro(const Intro& intro) {
  base::ByteWriter out;
  out.put(intro.id);
  put_short_text(out, intro.token);
  put_short_text(out, intro.to);
  out.put(intro.heap_bytes);
  return out.take();
}

std::optional<Intro> decode_intro(std::span<const std::uint8_t> bytes) {
  base::ByteReader in(bytes);
  const auto id = in.get<WorkerId>();
  auto token = get_short_text(in);
  auto to = get_short_text(in);
  const auto heap = in.get<std::uint64_t>();
  if (!id || !token || !to || !heap || in.left() != 0) return std::nullopt;
  return Intro{.id = *id, .token = std::move(*token), .to = std::move(*to), .heap_bytes = *heap};
}

}  // namespace

Bytes encode_endpoint(const Endpoint& endpoint) {
  base::ByteWriter out;
  out.raw(kAddressMagic);
  put_short_text(out, endpoint.host);
  put_short_text(out, endpoint.token);
  put_short_text(out, endpoint.tcp_host);
  out.put(endpoint.tcp_port).put(endpoint.pid);
  return out.take();
}

std::optional<Endpoint> decode_endpoint(std::span<const std::uint8_t> bytes) {
  base::ByteReader in(bytes);
  const auto magic = in.raw(kAddressMagic.size());
  if (!magic || !std::ranges::equal(*magic, kAddressMagic)) return std::nullopt;
  auto host = get_short_text(in), token = get_short_text(in), tcp_host = get_short_text(in);
  const auto port = in.get<std::uint16_t>();
  const auto pid = in.get<std::int64_t>();
  // A token is the name of a local socket: 107 bytes at most.
  if (!host || !token || !tcp_host || !port || !pid || in.left() != 0) return std::nullopt;
  if (token->empty() || token->size() > 100 || (!tcp_host->empty() && *port == 0)) return std::nullopt;
  return Endpoint{.host = std::move(*host),
                  .token = std::move(*token),
                  .tcp_host = std::move(*tcp_host),
                  .tcp_port = *port,
                  .pid = *pid};
}

Bytes encode_welcome(const Welcome& welcome) {
  return net::encode_welcome(base::ByteWriter().put(welcome.slot).put(welcome.inbox_bytes).view());
}

GreetingClient::GreetingClient(const std::optional<JobSecret>& secret, const Intro& intro,
                               const net::Binding& binding)
    : handshake_(secret, binding, encode_intro(intro)) {}

GreetingClient::Step GreetingClient::next(std::span<const std::uint8_t> message) {
  auto step = handshake_.next(message);
  if (!step.welcome) return {.send = std::move(step.send), .refusal = std::move(step.refusal)};
  base::ByteReader in(*step.welcome);
  const auto slot = in.get<std::uint32_t>();
  const auto inbox = in.get<std::uint64_t>();
  if (!slot || !inbox || in.left() != 0) return {.refusal = "it sent an unknown answer"};
  return {.welcome = Welcome{.slot = *slot, .inbox_bytes = *inbox}};
}

GreetingServer::Step GreetingServer::next(std::span<const std::uint8_t> message) {
  auto step = handshake_.next(message);
  const auto refuse = [](std::string why) {
    auto refusal = net::HandshakeResponder::refuse(std::move(why));
    return Step{.send = std::move(refusal.send), .refusal = std::move(refusal.refusal)};
  };
  if (!step.introduction) return {.send = std::move(step.send), .refusal = std::move(step.refusal)};
  auto intro = decode_intro(*step.introduction);
  if (!intro) return refuse("no introduction");
  if (intro->to != own_token_) return refuse("it is another worker than the one called");
  return {.intro = std::move(intro)};
}

}  // namespace lockstep::transport::internal
