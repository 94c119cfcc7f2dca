#include "lockstep/net/peer_handshake.h"

#include <gtest/gtest.h>

namespace lockstep::net {
namespace {

const Binding kLocal{.purpose = Purpose::kTransportLocal, .server = "callee"};
const Bytes kIntroduction = to_bytes("who I am");

struct Met {
  std::optional<Bytes> introduction, welcome;
  std::string refused_by_responder, refused_by_initiator;
};

// Both to the end; the responder welcomes whoever proves itself.
Met meet(HandshakeInitiator initiator, HandshakeResponder responder) {
  Met met;
  Bytes next = initiator.first();
  for (int i = 0; i < 3; ++i) {
    auto answer = responder.next(next);
    met.refused_by_responder = answer.refusal;
    met.introduction = answer.introduction;
    if (met.introduction) answer.send = encode_welcome(to_bytes("come in"));
    auto step = initiator.next(answer.send);
    met.refused_by_initiator = step.refusal;
    met.welcome = step.welcome;
    if (!step.refusal.empty() || step.welcome) break;
    next = step.send;
  }
  return met;
}

Met meet(const std::optional<JobSecret>& caller, const std::optional<JobSecret>& callee,
         const Binding& called = kLocal) {
  return meet(HandshakeInitiator(caller, called, kIntroduction), HandshakeResponder(callee, kLocal));
}

TEST(PeerHandshake, TwoOfOneJobMeetWithOrWithoutAKey) {
  const auto key = std::optional(JobSecret::mint());
  for (const auto& both : {key, std::optional<JobSecret>()}) {
    const Met met = meet(both, both);
    EXPECT_EQ(met.introduction, kIntroduction) << met.refused_by_responder;
    EXPECT_EQ(met.welcome, to_bytes("come in")) << met.refused_by_initiator;
  }
}

TEST(PeerHandshake, AMissingOrDifferentKeyIsRejectedWithAReason) {
  const auto key = std::optional(JobSecret::mint()), other = std::optional(JobSecret::mint());
  EXPECT_NE(meet(key, other).refused_by_initiator.find("another job secret"), std::string::npos);
  EXPECT_NE(meet(std::nullopt, key).refused_by_initiator.find("this job has a secret"), std::string::npos);
  EXPECT_NE(meet(key, std::nullopt).refused_by_initiator.find("this worker has none"), std::string::npos);
}

TEST(PeerHandshake, ARelayToAnotherServerOrOverAnotherTransportIsRefused) {
  const auto key = std::optional(JobSecret::mint());
  EXPECT_TRUE(meet(key, key, kLocal).welcome);
  for (const Binding& meant : {Binding{.purpose = Purpose::kTransportLocal, .server = "other"},
                               Binding{.purpose = Purpose::kTransportTcp, .server = "callee"}}) {
    const Met met = meet(key, key, meant);
    EXPECT_FALSE(met.introduction);
    EXPECT_FALSE(met.refused_by_initiator.empty());
  }
}

TEST(PeerHandshake, NoByteOfProofAndIntroductionMayBeChangedOnTheWay) {
  const JobSecret key = JobSecret::mint();
  for (std::size_t i = 0;; ++i) {
    HandshakeResponder responder(key, kLocal);
    HandshakeInitiator initiator(key, kLocal, kIntroduction);
    auto step = initiator.next(responder.next(initiator.first()).send);
    if (i == step.send.size()) break;
    step.send[i] ^= 1;
    EXPECT_FALSE(responder.next(step.send).introduction) << i;
    EXPECT_FALSE(responder.proven()) << i;
    EXPECT_FALSE(responder.keys()) << i;
  }
}

TEST(PeerHandshake, AnotherVersionIsRefusedAtEveryStep) {
  for (const bool with_key : {false, true}) {
    const auto key = with_key ? std::optional(JobSecret::mint()) : std::nullopt;
    HandshakeInitiator initiator(key, kLocal, kIntroduction);
    Bytes first = initiator.first();
    ++first[1];
    EXPECT_NE(HandshakeResponder(key, kLocal).next(first).refusal.find("version"), std::string::npos);
    HandshakeResponder responder(key, kLocal);
    Bytes introduction = initiator.next(responder.next(initiator.first()).send).send;
    ++introduction[1];
    EXPECT_NE(responder.next(introduction).refusal.find("version"), std::string::npos);
    Bytes welcome = encode_welcome({});
    ++welcome[1];
    EXPECT_FALSE(initiator.next(welcome).refusal.empty());
  }
}

TEST(PeerHandshake, AWelcomeBeforeTheIntroductionIsRefused) {
  HandshakeInitiator initiator(std::nullopt, kLocal, kIntroduction);
  EXPECT_FALSE(initiator.next(encode_welcome({})).refusal.empty());
}

TEST(PeerHandshake, AReasonIsBoundedAndPrintable) {
  const std::string why = HandshakeInitiator(std::nullopt, kLocal, {})
                              .next(encode_refusal("\x1b[2J" + std::string(1000, 'x')))
                              .refusal;
  EXPECT_NE(why.find("?[2Jxxx"), std::string::npos) << why;
  EXPECT_LT(why.size(), 400u);
}

TEST(PeerHandshake, BothHaveTheSameKeysOnceIntroducedAndNoneWithoutAKey) {
  for (const bool with_key : {false, true}) {
    const auto key = with_key ? std::optional(JobSecret::mint()) : std::nullopt;
    HandshakeResponder responder(key, kLocal);
    HandshakeInitiator initiator(key, kLocal, kIntroduction);
    const auto challenge = responder.next(initiator.first());
    EXPECT_FALSE(initiator.keys() || responder.keys());
    ASSERT_TRUE(responder.next(initiator.next(challenge.send).send).introduction);
    ASSERT_EQ(initiator.keys().has_value(), with_key);
    ASSERT_EQ(responder.keys().has_value(), with_key);
    if (with_key) {
      EXPECT_EQ(initiator.keys()->client.key, responder.keys()->client.key);
    }
  }
}

}  // namespace
}  // namespace lockstep::net
