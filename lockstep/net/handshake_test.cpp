#include "lockstep/net/handshake.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>

#include "lockstep/base/error.h"

namespace lockstep::net {
namespace {

Deadline patience() {
  return Deadline::after(Milliseconds(60'000));
}

TEST(Handshake, TwoWhoKnowTheSecretAccept) {
  const JobSecret secret = JobSecret::mint();
  const HandshakeClient client(secret);
  HandshakeServer server(secret);
  const auto challenge = server.challenge(client.hello());
  ASSERT_TRUE(challenge);
  const auto proof = client.answer(*challenge);
  ASSERT_TRUE(proof);
  EXPECT_TRUE(server.accept(*proof));
}

TEST(Handshake, AClientRefusesAServerWithAnotherSecret) {
  const HandshakeClient client(JobSecret::mint());
  HandshakeServer server(JobSecret::mint());
  EXPECT_FALSE(client.answer(*server.challenge(client.hello())));
}

TEST(Handshake, AServerRefusesAClientWithAnotherSecret) {
  const JobSecret other = JobSecret::mint();
  HandshakeServer server(JobSecret::mint());
  HandshakeServer same_as_client(other);
  const HandshakeClient client(other);
  ASSERT_TRUE(server.challenge(client.hello()));
  EXPECT_FALSE(server.accept(*client.answer(*same_as_client.challenge(client.hello()))));
}

TEST(Handshake, AServersOwnProofSentBackIsRefused) {
  HandshakeServer server(JobSecret::mint());
  const HandshakeClient client(JobSecret::mint());
  const auto challenge = *server.challenge(client.hello());
  Proof reflected;
  std::copy_n(challenge.begin() + kNonceBytes, kProofBytes, reflected.begin());
  EXPECT_FALSE(server.accept(reflected));
}

TEST(Handshake, AnOldProofIsRefusedInANewConversation) {
  const JobSecret secret = JobSecret::mint();
  const HandshakeClient client(secret);
  HandshakeServer first(secret);
  const auto proof = client.answer(*first.challenge(client.hello()));
  ASSERT_TRUE(first.accept(*proof));
  HandshakeServer second(secret);
  ASSERT_TRUE(second.challenge(client.hello()));
  EXPECT_FALSE(second.accept(*proof));
}

TEST(Handshake, AnOldChallengeIsRefusedByANewClient) {
  const JobSecret secret = JobSecret::mint();
  HandshakeServer server(secret);
  const auto old = *server.challenge(HandshakeClient(secret).hello());
  EXPECT_FALSE(HandshakeClient(secret).answer(old));
}

TEST(Handshake, NoBitOfTheProofMayBeWrong) {
  const JobSecret secret = JobSecret::mint();
  const HandshakeClient client(secret);
  HandshakeServer server(secret);
  const Proof good = *client.answer(*server.challenge(client.hello()));
  for (std::size_t bit = 0; bit < 8 * kProofBytes; ++bit) {
    Proof bad = good;
    bad[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    EXPECT_FALSE(server.accept(bad)) << bit;
  }
}

TEST(Handshake, NothingIsAcceptedBeforeTheChallenge) {
  const JobSecret secret = JobSecret::mint();
  EXPECT_FALSE(HandshakeServer(secret).accept(Proof{}));
}

TEST(Handshake, AnotherMagicOrVersionIsNoHello) {
  const JobSecret secret = JobSecret::mint();
  for (std::size_t i = 0; i < kHandshakeMagic.size(); ++i) {
    Hello hello = HandshakeClient(secret).hello();
    ++hello[i];
    EXPECT_FALSE(HandshakeServer(secret).challenge(hello)) << i;
  }
}

TEST(Handshake, RunsOverASocketAndNamesThePeerWhenSecretsDiffer) {
  const JobSecret secret = JobSecret::mint();
  for (const bool same : {true, false}) {
    Listener listener = Listener::listen(*Address::parse("127.0.0.1", 0), 1);
    auto server = std::async(std::launch::async, [&] {
      Socket socket = listener.accept(patience());
      handshake_as_server(socket, secret, patience());
    });
    auto client = std::async(std::launch::async, [&] {
      Socket socket = Socket::connect("127.0.0.1", listener.local().port(), patience());
      handshake_as_client(socket, same ? secret : JobSecret::mint(), patience());
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
