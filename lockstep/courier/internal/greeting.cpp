#include "lockstep/courier/internal/greeting.h"

#include <algorithm>
#include <array>

#include "lockstep/base/text.h"

namespace lockstep::courier::internal {
namespace {

// First byte of each message.
constexpr std::uint8_t kHello = 'H', kNoSecret = 'N', kChallenge = 'C', kGoOn = 'G', kIntro = 'I',
                       kWelcome = 'W', kRefused = 'X';
constexpr std::uint8_t kVersion = 2;
constexpr std::array<std::uint8_t, 4> kAddressMagic = {'L', 'S', 'C', kVersion};
constexpr std::size_t kMaxText = 256;

std::optional<std::string> short_text(ByteReader& in) {
  const auto n = in.get<std::uint16_t>();
  if (!n || *n > kMaxText) return std::nullopt;
  const auto text = in.raw(*n);
  if (!text) return std::nullopt;
  return to_text(*text);
}

void put_text(ByteWriter& out, std::string_view text) {
  text = text.substr(0, kMaxText);
  out.put(static_cast<std::uint16_t>(text.size()));
  out.raw({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

Bytes encode_intro(const Intro& intro) {
  ByteWriter out;
  out.put(intro.id);
  put_text(out, intro.token);
  put_text(out, intro.to);
  out.put(intro.outbox_bytes);
  return out.take();
}

std::optional<Intro> decode_intro(ByteReader& in) {
  Intro intro;
  const auto id = in.get<WorkerId>();
  auto token = short_text(in);
  auto to = short_text(in);
  const auto outbox = in.get<std::uint64_t>();
  if (!id || !token || !to || !outbox || in.left() != 0) return std::nullopt;
  return Intro{.id = *id, .token = std::move(*token), .to = std::move(*to), .outbox_bytes = *outbox};
}

template <class Array>
std::optional<Array> array_of(ByteReader& in) {
  const auto raw = in.raw(Array{}.size());
  if (!raw) return std::nullopt;
  Array array;
  std::ranges::copy(*raw, array.begin());
  return array;
}

// Printable, so that a log or a terminal takes no harm.
std::string printable(std::string text) {
  std::ranges::replace_if(
      text, [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

}  // namespace

Bytes encode_endpoint(const Endpoint& endpoint) {
  ByteWriter out;
  out.raw(kAddressMagic);
  put_text(out, endpoint.host);
  put_text(out, endpoint.token);
  put_text(out, endpoint.tcp_host);
  out.put(endpoint.tcp_port).put(endpoint.pid);
  return out.take();
}

std::optional<Endpoint> decode_endpoint(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  const auto magic = in.raw(kAddressMagic.size());
  if (!magic || !std::ranges::equal(*magic, kAddressMagic)) return std::nullopt;
  auto host = short_text(in), token = short_text(in), tcp_host = short_text(in);
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
  return ByteWriter().put(kWelcome).put(kVersion).put(welcome.slot).put(welcome.inbox_bytes).take();
}

Bytes encode_refusal(std::string_view why) {
  ByteWriter out;
  out.put(kRefused);
  put_text(out, why);
  return out.take();
}

GreetingClient::GreetingClient(const std::optional<JobSecret>& secret, const Intro& intro,
                               const net::Binding& binding)
    : intro_(intro) {
  if (secret) handshake_.emplace(*secret, binding);
}

std::optional<net::SessionKeys> GreetingClient::keys() const {
  if (!handshake_ || !introduced_) return std::nullopt;
  return handshake_->keys();
}

Bytes GreetingClient::first() const {
  ByteWriter out;
  if (!handshake_) return out.put(kNoSecret).put(kVersion).take();
  return out.put(kHello).put(kVersion).raw(handshake_->hello()).take();
}

GreetingClient::Step GreetingClient::next(std::span<const std::uint8_t> message) {
  ByteReader in(message);
  const auto what = in.get<std::uint8_t>();
  if (what == kRefused)
    return {.refusal =
                cat("it refused the connection: ", printable(short_text(in).value_or("no reason given")))};
  if (introduced_) {
    const auto version = in.get<std::uint8_t>();
    const auto slot = in.get<std::uint32_t>();
    const auto inbox = in.get<std::uint64_t>();
    if (what != kWelcome || version != kVersion || !inbox || in.left() != 0)
      return {.refusal = "it answered with something unknown"};
    return {.welcome = Welcome{.slot = *slot, .inbox_bytes = *inbox}};
  }
  const Bytes intro = encode_intro(intro_);
  net::Proof proof{};
  if (handshake_) {
    const auto challenge = array_of<net::Challenge>(in);
    if (what != kChallenge || !challenge || in.left() != 0)
      return {.refusal = "it answered with something unknown"};
    const auto answer = handshake_->answer(*challenge, intro);
    if (!answer) {
      return {
          .refusal =
              "it has another job secret (LOCKSTEP_SECRET_FD, LOCKSTEP_SECRET_FILE), or is another worker "
              "than the one called"};
    }
    proof = *answer;
  } else if (what != kGoOn || in.left() != 0) {
    return {.refusal = "it answered with something unknown"};
  }
  introduced_ = true;
  ByteWriter out;
  out.put(kIntro).put(kVersion).raw(proof).raw(intro);
  return {.send = out.take()};
}

GreetingServer::GreetingServer(const std::optional<JobSecret>& secret, const net::Binding& binding)
    : own_token_(binding.server) {
  if (secret) handshake_.emplace(*secret, binding);
}

std::optional<net::SessionKeys> GreetingServer::keys() const {
  if (!handshake_ || !proven_) return std::nullopt;
  return handshake_->keys();
}

GreetingServer::Step GreetingServer::refuse(std::string why) const {
  Bytes told = encode_refusal(why);
  return {.send = std::move(told), .refusal = std::move(why)};
}

GreetingServer::Step GreetingServer::next(std::span<const std::uint8_t> message) {
  ByteReader in(message);
  const auto what = in.get<std::uint8_t>();
  const auto version = in.get<std::uint8_t>();
  if (version != kVersion) return refuse("another version, or no lockstep");
  if (!greeted_) {
    if (what == kNoSecret && handshake_) return refuse("this job has a secret, and the caller has none");
    if (what == kHello && !handshake_) return refuse("the caller has a job secret, and this worker has none");
    if (what != kNoSecret && what != kHello) return refuse("no greeting");
    greeted_ = true;
    if (!handshake_) return {.send = ByteWriter().put(kGoOn).take()};
    const auto hello = array_of<net::Hello>(in);
    const auto challenge = hello ? handshake_->challenge(*hello) : std::nullopt;
    if (!challenge) return refuse(hello ? handshake_->why() : "no greeting");
    return {.send = ByteWriter().put(kChallenge).raw(*challenge).take()};
  }
  const auto proof = array_of<net::Proof>(in);
  if (what != kIntro || !proof) return refuse("no introduction");
  const auto said = message.subspan(in.position());
  if (handshake_ && !handshake_->accept(*proof, said)) return refuse("another job secret");
  proven_ = true;
  auto intro = decode_intro(in);
  if (!intro) return refuse("no introduction");
  if (intro->to != own_token_) return refuse("it is another worker than the one called");
  return {.intro = std::move(intro)};
}

}  // namespace lockstep::courier::internal
