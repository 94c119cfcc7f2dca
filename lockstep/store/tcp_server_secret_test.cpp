// A TcpStore's server with a secret: nothing is executed before the right proof, and nothing unsealed after
// it.
#include <gtest/gtest.h>

#include <algorithm>
#include <span>

#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/net/address.h"
#include "lockstep/net/handshake.h"
#include "lockstep/net/sealed.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/tcp_server_testing.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

using namespace tcp_server_testing;

class TcpServerSecretTest : public TcpServerTest {
 protected:
  TcpServerSecretTest() { start({.secret = secret_}); }
  net::Binding dialled() const {
    return {.purpose = net::Purpose::kStoreTcp,
            .address = net::Address::parse(kServerHost, store_->port())->canonical()};
  }
  const JobSecret secret_ = JobSecret::mint();
};

TEST_F(TcpServerSecretTest, NoRequestIsAcceptedBeforeTheHandshake) {
  net::Socket socket = connect();
  base::ByteWriter bytes;
  bytes.raw(validation()).put(Query::kSet).sized("/key").sized("value").put(Query::kPing).put(1u);
  send(socket, bytes);
  EXPECT_TRUE(read_to_end(socket).empty());
  EXPECT_FALSE(store_->check(std::vector<std::string>{"key"}));
}

TEST_F(TcpServerSecretTest, AnythingButTheRightProofIsClosedWithoutAnAnswer) {
  net::Proof reflected{};
  for (const bool reflect : {false, true}) {
    net::Socket socket = connect();
    const net::HandshakeClient client(JobSecret::mint(), dialled());
    socket.write_all(client.hello(), patience());
    net::Challenge challenge;
    socket.read_exact(challenge, patience());
    if (reflect) std::copy_n(challenge.begin() + net::kNonceBytes, net::kProofBytes, reflected.begin());
    base::ByteWriter bytes;
    bytes.raw(reflected).raw(validation()).put(Query::kPing).put(1u);
    send(socket, bytes);
    EXPECT_TRUE(read_to_end(socket).empty());
  }
  expect_alive();
}

TEST_F(TcpServerSecretTest, AReplayedConversationIsRefused) {
  // What an eavesdropper saw of a good client.
  net::HandshakeClient client(secret_, dialled());
  net::Challenge challenge;
  base::ByteWriter heard;
  {
    net::Socket socket = connect();
    socket.write_all(client.hello(), patience());
    socket.read_exact(challenge, patience());
    const auto proof = client.answer(challenge);
    ASSERT_TRUE(proof);
    base::ByteWriter requests;
    requests.raw(validation()).put(Query::kSet).sized("/key").sized("once").put(Query::kPing).put(5u);
    Bytes sealed;
    net::Sealer(client.keys().client).seal(requests.view(), sealed);
    heard.raw(client.hello()).raw(*proof).raw(sealed);
    base::ByteWriter rest;
    send(socket, rest.raw(*proof).raw(sealed));
    Bytes pong(net::kRecordHead + 4 + net::kRecordTag);
    socket.read_exact(pong, patience());
    std::span<const std::uint8_t> record(pong);
    const auto plain = net::Opener(client.keys().server).next(record);
    ASSERT_TRUE(plain) << "the first time it was good";
    ASSERT_EQ(base::ByteReader(*plain).get<std::uint32_t>(), 5u);
  }
  net::Socket replay = connect();
  send(replay, heard);
  EXPECT_EQ(read_to_end(replay).size(), sizeof(net::Challenge))
      << "a challenge, and nothing after the old proof";
  expect_alive();
}

TEST_F(TcpServerSecretTest, UnsealedDataAfterTheProofIsRejected) {
  net::Socket socket = connect();
  net::HandshakeClient client(secret_, dialled());
  net::Challenge challenge;
  socket.write_all(client.hello(), patience());
  socket.read_exact(challenge, patience());
  base::ByteWriter clear;
  clear.raw(*client.answer(challenge)).raw(validation()).put(Query::kSet).sized("/key").sized("value");
  send(socket, clear);
  EXPECT_TRUE(read_to_end(socket).empty());
  EXPECT_FALSE(store_->check(std::vector<std::string>{"key"}));
}

TEST_F(TcpServerSecretTest, AProofForAnotherPurposeIsRefused) {
  net::Socket socket = connect();
  net::Binding transport = dialled();
  transport.purpose = net::Purpose::kTransportTcp;
  transport.server = "token";
  net::HandshakeClient client(secret_, transport);
  net::Challenge challenge;
  socket.write_all(client.hello(), patience());
  socket.read_exact(challenge, patience());
  EXPECT_FALSE(client.answer(challenge)) << "and the transport does not take it for one of its own";
}

}  // namespace
}  // namespace lockstep
