#include "lockstep/net/handshake.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>

#include "lockstep/base/bytes.h"
#include "lockstep/base/call_testing.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/error.h"
#include "lockstep/net/internal/hmac.h"

namespace lockstep::net {
namespace {

using call_testing::patience;

const Binding kStore{.purpose = Purpose::kStoreTcp};

Binding at(const char* ip, std::uint16_t port) {
  return {.purpose = Purpose::kStoreTcp, .address = Address::parse(ip, port)->canonical()};
}

TEST(Handshake, TwoWhoKnowTheSecretAccept) {
  const JobSecret secret = JobSecret::mint();
  HandshakeClient client(secret, kStore);
  HandshakeServer server(secret, kStore);
  const auto challenge = server.challenge(client.hello());
  ASSERT_TRUE(challenge);
  const auto proof = client.answer(*challenge);
  ASSERT_TRUE(proof);
  EXPECT_TRUE(server.accept(*proof));
}

// What the header draws, byte by byte: peers of other builds compute the same.
TEST(Handshake, ItsBytesStayAsTheyAre) {
  const JobSecret secret = JobSecret::mint();
  const Binding binding{.purpose = Purpose::kTransportTcp,
                        .server = "you",
                        .address = Address::parse("10.0.0.1", 0x1234)->canonical()};
  HandshakeClient client(secret, binding);
  HandshakeServer server(secret, binding);
  const Hello hello = client.hello();
  const Challenge challenge = *server.challenge(hello);
  const Proof proof = *client.answer(challenge, to_bytes("hi"));
  EXPECT_EQ(to_text(std::span(hello).first(8)), "\xA7LOCKST\x02");
  EXPECT_EQ(to_text(std::span(hello).last(8)), std::string("\xFF\xFF\x0A\0\0\x01\x12\x34", 8));

  const auto transcript = [&](std::string_view label) {
    base::ByteWriter text;
    text.raw(to_bytes(label)).raw(Bytes{3, 3, 0, 0, 0, 0, 0, 0, 0, 'y', 'o', 'u'}).raw(hello);
    return text.raw(std::span(challenge).first(32)).take();
  };
  const auto append = [](Bytes text, const Bytes& more) {
    text.insert(text.end(), more.begin(), more.end());
    return text;
  };
  const auto by_server = internal::hmac(secret.bytes(), append(transcript("lockstep 2 server"), Bytes(8)));
  EXPECT_TRUE(std::ranges::equal(std::span(challenge).last(32), by_server));
  const auto by_client = internal::hmac(
      secret.bytes(), append(transcript("lockstep 2 client"), {2, 0, 0, 0, 0, 0, 0, 0, 'h', 'i'}));
  EXPECT_EQ(proof, by_client);
}

// RFC 4231, case 2.
TEST(Handshake, TheMacIsHmacSha256) {
  const Bytes mac{0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e, 0x6a, 0x04, 0x24,
                  0x26, 0x08, 0x95, 0x75, 0xc7, 0x5a, 0x00, 0x3f, 0x08, 0x9d, 0x27,
                  0x39, 0x83, 0x9d, 0xec, 0x58, 0xb9, 0x64, 0xec, 0x38, 0x43};
  EXPECT_TRUE(
      std::ranges::equal(internal::hmac(to_bytes("Jefe"), to_bytes("what do ya want for nothing?")), mac));
}

TEST(Handshake, AClientRefusesAServerWithAnotherSecret) {
  HandshakeClient client(JobSecret::mint(), kStore);
  HandshakeServer server(JobSecret::mint(), kStore);
  EXPECT_FALSE(client.answer(*server.challenge(client.hello())));
}

TEST(Handshake, AServerRefusesAClientWithAnotherSecret) {
  const JobSecret other = JobSecret::mint();
  HandshakeServer server(JobSecret::mint(), kStore);
  HandshakeServer same_as_client(other, kStore);
  HandshakeClient client(other, kStore);
  ASSERT_TRUE(server.challenge(client.hello()));
  EXPECT_FALSE(server.accept(*client.answer(*same_as_client.challenge(client.hello()))));
}

TEST(Handshake, AServersOwnProofSentBackIsRefused) {
  HandshakeServer server(JobSecret::mint(), kStore);
  HandshakeClient client(JobSecret::mint(), kStore);
  const auto challenge = *server.challenge(client.hello());
  Proof reflected;
  std::copy_n(challenge.begin() + kNonceBytes, kProofBytes, reflected.begin());
  EXPECT_FALSE(server.accept(reflected));
}

TEST(Handshake, AnOldProofIsRefusedInANewConversation) {
  const JobSecret secret = JobSecret::mint();
  HandshakeClient client(secret, kStore);
  HandshakeServer first(secret, kStore);
  const auto proof = client.answer(*first.challenge(client.hello()));
  ASSERT_TRUE(first.accept(*proof));
  HandshakeServer second(secret, kStore);
  ASSERT_TRUE(second.challenge(client.hello()));
  EXPECT_FALSE(second.accept(*proof));
}

TEST(Handshake, AnOldChallengeIsRefusedByANewClient) {
  const JobSecret secret = JobSecret::mint();
  HandshakeServer server(secret, kStore);
  const auto old = *server.challenge(HandshakeClient(secret, kStore).hello());
  EXPECT_FALSE(HandshakeClient(secret, kStore).answer(old));
}

TEST(Handshake, NoBitOfTheProofMayBeWrong) {
  const JobSecret secret = JobSecret::mint();
  HandshakeClient client(secret, kStore);
  HandshakeServer server(secret, kStore);
  const Proof good = *client.answer(*server.challenge(client.hello()));
  for (std::size_t bit = 0; bit < 8 * kProofBytes; ++bit) {
    Proof bad = good;
    bad[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    EXPECT_FALSE(server.accept(bad)) << bit;
  }
}

TEST(Handshake, NothingIsAcceptedBeforeTheChallenge) {
  const JobSecret secret = JobSecret::mint();
  EXPECT_FALSE(HandshakeServer(secret, kStore).accept(Proof{}));
}

TEST(Handshake, AnotherMagicOrVersionIsRejected) {
  const JobSecret secret = JobSecret::mint();
  for (std::size_t i = 0; i < kHandshakeMagic.size(); ++i) {
    Hello hello = HandshakeClient(secret, kStore).hello();
    ++hello[i];
    EXPECT_FALSE(HandshakeServer(secret, kStore).challenge(hello)) << i;
  }
}

// Whether a client and a server who know the same secret accept each other.
bool agree(const Binding& client_binding, const Binding& server_binding) {
  const JobSecret secret = JobSecret::mint();
  HandshakeClient client(secret, client_binding);
  HandshakeServer server(secret, server_binding);
  const auto challenge = server.challenge(client.hello());
  const auto proof = challenge ? client.answer(*challenge) : std::nullopt;
  return proof && server.accept(*proof);
}

TEST(Handshake, WhatWasMeantForOnePurposeOrServerIsRefusedByAnother) {
  const Binding store = at("10.0.0.1", 29500);
  EXPECT_TRUE(agree(store, store));
  Binding transport = store;
  transport.purpose = Purpose::kTransportTcp;
  EXPECT_FALSE(agree(transport, store));
  EXPECT_FALSE(agree(store, transport));
  const Binding one{.purpose = Purpose::kTransportLocal, .server = "one"};
  const Binding other{.purpose = Purpose::kTransportLocal, .server = "other"};
  EXPECT_TRUE(agree(one, one));
  EXPECT_FALSE(agree(one, other));
}

TEST(Handshake, AServerReachedOverLoopbackRequiresItsOwnAddress) {
  const Binding mine = at("127.0.0.1", 29500);
  EXPECT_TRUE(agree(mine, mine));
  EXPECT_TRUE(agree(at("127.0.0.1", 29500), at("::ffff:127.0.0.1", 29500))) << "a socket of both families";
  EXPECT_FALSE(agree(at("::1", 29500), mine));
  EXPECT_FALSE(agree(at("127.0.0.1", 29501), mine));
  EXPECT_FALSE(agree(at("10.0.0.1", 29500), at("::1", 29500)));
  EXPECT_TRUE(agree(at("10.96.0.7", 80), at("10.0.0.1", 29500))) << "addresses may be translated on the way";
}

TEST(Handshake, AnAddressChangedOnTheWayIsNoticedByTheClient) {
  const JobSecret secret = JobSecret::mint();
  HandshakeClient client(secret, at("::1", 29500));
  HandshakeServer server(secret, at("127.0.0.1", 29500));
  Hello changed = client.hello();
  std::ranges::copy(at("127.0.0.1", 29500).address, changed.end() - 18);
  const auto challenge = server.challenge(changed);
  ASSERT_TRUE(challenge) << "the server sees its own address";
  EXPECT_FALSE(client.answer(*challenge));
}

TEST(Handshake, AGreetingChangedOnTheWayIsRefused) {
  const JobSecret secret = JobSecret::mint();
  HandshakeClient client(secret, kStore);
  HandshakeServer server(secret, kStore);
  const Bytes said = to_bytes("worker 1"), heard = to_bytes("worker 2");
  const auto proof = *client.answer(*server.challenge(client.hello()), said);
  EXPECT_FALSE(server.accept(proof, heard));
  EXPECT_FALSE(server.accept(proof));
  EXPECT_TRUE(server.accept(proof, said));
}

TEST(Handshake, BothEndsHaveTheSameKeysAndEveryConversationOthers) {
  const JobSecret secret = JobSecret::mint();
  const auto talk = [&] {
    HandshakeClient client(secret, kStore);
    HandshakeServer server(secret, kStore);
    EXPECT_TRUE(server.accept(*client.answer(*server.challenge(client.hello()))));
    const SessionKeys a = client.keys(), b = server.keys();
    EXPECT_EQ(a.client.key, b.client.key);
    EXPECT_EQ(a.client.iv, b.client.iv);
    EXPECT_EQ(a.server.key, b.server.key);
    EXPECT_EQ(a.server.iv, b.server.iv);
    EXPECT_NE(a.client.key, a.server.key);
    EXPECT_NE(a.client.iv, a.server.iv);
    return a;
  };
  EXPECT_NE(talk().client.key, talk().client.key);
}

TEST(Handshake, RunsOverASocketAndNamesThePeerWhenSecretsDiffer) {
  const JobSecret secret = JobSecret::mint();
  for (const bool same : {true, false}) {
    Listener listener = Listener::listen(*Address::parse("127.0.0.1", 0), 1);
    auto server = std::async(std::launch::async, [&] {
      Socket socket = listener.accept(patience());
      handshake_as_server(socket, secret, kStore, patience());
    });
    auto client = std::async(std::launch::async, [&] {
      Socket socket = Socket::connect("127.0.0.1", listener.local().port(), patience());
      handshake_as_client(socket, same ? secret : JobSecret::mint(), kStore, patience());
    });
    if (same) {
      EXPECT_NO_THROW(client.get());
      EXPECT_NO_THROW(server.get());
      continue;
    }
    try {
      client.get();
      ADD_FAILURE() << "accepted another secret";
    } catch (const DistNetworkError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string_view(error.what()).find(listener.local().text()), std::string_view::npos)
          << error.what();
    }
    EXPECT_THROW(server.get(), DistNetworkError);
  }
}

}  // namespace
}  // namespace lockstep::net
