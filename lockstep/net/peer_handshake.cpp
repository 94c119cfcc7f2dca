#include "lockstep/net/peer_handshake.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::net {
namespace {

// Printable, so that a trace of a connection can be read. The version follows it, except in 'C', 'G' and 'X'.
// First byte of each message.
constexpr std::uint8_t kHello = 'H', kNoKey = 'N', kChallenge = 'C', kGoOn = 'G', kIntroduction = 'I',
                       kWelcome = 'W', kRefused = 'X';
// Text of a peer is bounded before it is stored or logged.
constexpr std::size_t kMaxText = 256;
constexpr const char* kUnknownAnswer = "it sent an unknown answer";

template <class Array>
std::optional<Array> get_array(base::ByteReader& in) {
  const auto raw = in.raw(Array{}.size());
  if (!raw) return std::nullopt;
  Array array;
  std::ranges::copy(*raw, array.begin());
  return array;
}

// So that a log or a terminal takes no harm.
std::string printable(std::string text) {
  std::ranges::replace_if(
      text, [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

Bytes rest_of(std::span<const std::uint8_t> message, const base::ByteReader& in) {
  const auto rest = message.subspan(in.position());
  return Bytes(rest.begin(), rest.end());
}

}  // namespace

void put_short_text(base::ByteWriter& out, std::string_view text) {
  text = text.substr(0, kMaxText);
  out.put(static_cast<std::uint16_t>(text.size()));
  out.raw({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

std::optional<std::string> get_short_text(base::ByteReader& in) {
  const auto n = in.get<std::uint16_t>();
  if (!n || *n > kMaxText) return std::nullopt;
  const auto text = in.raw(*n);
  if (!text) return std::nullopt;
  return to_text(*text);
}

Bytes encode_welcome(std::span<const std::uint8_t> welcome) {
  return base::ByteWriter().put(kWelcome).put(kPeerHandshakeVersion).raw(welcome).take();
}

Bytes encode_refusal(std::string_view why) {
  base::ByteWriter out;
  out.put(kRefused);
  put_short_text(out, why);
  return out.take();
}

HandshakeInitiator::HandshakeInitiator(const std::optional<JobSecret>& key, const Binding& binding,
                                       Bytes introduction)
    : introduction_(std::move(introduction)) {
  if (key) proof_.emplace(*key, binding);
}

// A side has keys only when it has seen the other's proof.
std::optional<SessionKeys> HandshakeInitiator::keys() const {
  if (!proof_ || !introduced_) return std::nullopt;
  return proof_->keys();
}

Bytes HandshakeInitiator::first() const {
  base::ByteWriter out;
  if (!proof_) return out.put(kNoKey).put(kPeerHandshakeVersion).take();
  return out.put(kHello).put(kPeerHandshakeVersion).raw(proof_->hello()).take();
}

// A state machine over whole messages: hello, then the introduction with the proof, then the welcome.
// Refusals may come at any step. Without a secret the same steps are taken with an empty proof.
HandshakeInitiator::Step HandshakeInitiator::next(std::span<const std::uint8_t> message) {
  base::ByteReader in(message);
  const auto what = in.get<std::uint8_t>();
  if (what == kRefused) {
    return {.refusal = base::cat("it refused the connection: ",
                                 printable(get_short_text(in).value_or("no reason given")))};
  }
  if (introduced_) {
    const auto version = in.get<std::uint8_t>();
    if (what != kWelcome || version != kPeerHandshakeVersion) return {.refusal = kUnknownAnswer};
    return {.welcome = rest_of(message, in)};
  }
  // Stays zero without a key: the message has the same layout in both cases.
  Proof proof{};
  if (proof_) {
    const auto challenge = get_array<Challenge>(in);
    if (what != kChallenge || !challenge || in.left() != 0) return {.refusal = kUnknownAnswer};
    const auto answer = proof_->answer(*challenge, introduction_);
    if (!answer) {
      return {
          .refusal =
              "it has another job secret (LOCKSTEP_SECRET_FD, LOCKSTEP_SECRET_FILE), or is another worker "
              "than the one called"};
    }
    proof = *answer;
  } else if (what != kGoOn || in.left() != 0) {
    return {.refusal = kUnknownAnswer};
  }
  introduced_ = true;
  return {.send = base::ByteWriter()
                      .put(kIntroduction)
                      .put(kPeerHandshakeVersion)
                      .raw(proof)
                      .raw(introduction_)
                      .take()};
}

HandshakeResponder::HandshakeResponder(const std::optional<JobSecret>& key, const Binding& binding) {
  if (key) proof_.emplace(*key, binding);
}

std::optional<SessionKeys> HandshakeResponder::keys() const {
  if (!proof_ || !proven_) return std::nullopt;
  return proof_->keys();
}

// The reason goes to the other side and to the log here. It says nothing about the secret.
HandshakeResponder::Step HandshakeResponder::refuse(std::string why) {
  Bytes told = encode_refusal(why);
  return {.send = std::move(told), .refusal = std::move(why)};
}

// Two messages in this order: the greeting (hello, or "no key"), then the introduction. `greeted_` and
// `proven_` only ever become true, so no message can take the conversation back a step. Whether a key is
// needed is decided by this side alone; a caller cannot avoid the proof.
HandshakeResponder::Step HandshakeResponder::next(std::span<const std::uint8_t> message) {
  base::ByteReader in(message);
  const auto what = in.get<std::uint8_t>();
  const auto version = in.get<std::uint8_t>();
  if (version != kPeerHandshakeVersion) return refuse("another version, or no lockstep");
  if (!greeted_) {
    if (what == kNoKey && proof_) return refuse("this job has a secret, and the caller has none");
    if (what == kHello && !proof_) return refuse("the caller has a job secret, and this worker has none");
    if (what != kNoKey && what != kHello) return refuse("no greeting");
    greeted_ = true;
    // Without a key the caller's user is what is checked, by the owner of the connection.
    if (!proof_) return {.send = base::ByteWriter().put(kGoOn).take()};
    const auto hello = get_array<Hello>(in);
    const auto challenge = hello ? proof_->challenge(*hello) : std::nullopt;
    if (!challenge) return refuse(hello ? proof_->why() : "no greeting");
    return {.send = base::ByteWriter().put(kChallenge).raw(*challenge).take()};
  }
  const auto proof = get_array<Proof>(in);
  if (what != kIntroduction || !proof) return refuse("no introduction");
  Bytes introduction = rest_of(message, in);
  // Before anything of the introduction is looked at: it is covered by the proof.
  if (proof_ && !proof_->accept(*proof, introduction)) return refuse("another job secret");
  proven_ = true;
  return {.introduction = std::move(introduction)};
}

}  // namespace lockstep::net
