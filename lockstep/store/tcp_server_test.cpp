// A TcpStore's server against clients that are broken, slow or mean no good: they lose their connection,
// everybody else's store goes on. Talks to the server in raw bytes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <fstream>
#include <future>
#include <random>
#include <thread>

#include "lockstep/base/bytes.h"
#include "lockstep/base/call_testing.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/long_testing.h"
#include "lockstep/net/handshake.h"
#include "lockstep/net/sealed.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/internal/tcp_protocol.h"
#include "lockstep/store/internal/uv_view.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

using call_testing::patience;

using internal::Query;

const std::string kServerHost = "127.0.0.1";

base::ByteWriter request(Query query) {
  base::ByteWriter writer;
  writer.put(query);
  return writer;
}

Bytes validation() {
  return request(Query::kValidate).put(internal::kValidationMagic).take();
}

std::uint64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  std::uint64_t pages = 0;
  in >> pages >> pages;
  return pages * 4096;
}

class TcpServerTest : public testing::Test {
 protected:
  void start(TcpStoreOptions options = {}) {
    options.port = 0;
    options.is_master = true;
    store_ = TcpStore::open(kServerHost, options);
  }

  net::Socket connect() { return net::Socket::connect(kServerHost, store_->port(), patience()); }
  net::Socket connect_validated() {
    net::Socket socket = connect();
    socket.write_all(validation(), patience());
    return socket;
  }
  static void send(net::Socket& socket, const base::ByteWriter& bytes) {
    socket.write_all(bytes.view(), patience());
  }

  // Returns when the server has accepted the connection and executed what was sent.
  static void ping(net::Socket& socket) {
    send(socket, request(Query::kPing).put(std::uint32_t{5}));
    Bytes pong(4);
    socket.read_exact(pong, patience());
    EXPECT_EQ(base::ByteReader(pong).get<std::uint32_t>(), 5u);
  }

  // Reads until the server closes; fails the test when it does not.
  static Bytes read_to_end(net::Socket& socket) {
    Bytes all;
    Bytes part(4096);
    try {
      for (;;) {
        const std::size_t n = socket.read_some(part, patience());
        all.insert(all.end(), part.begin(), part.begin() + static_cast<std::ptrdiff_t>(n));
      }
    } catch (const DistNetworkError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
    }
    return all;
  }

  void expect_closed(const base::ByteWriter& bytes) {
    net::Socket socket = connect_validated();
    try {
      socket.write_all(bytes.view(), patience());
    } catch (const DistNetworkError&) {
      // Closed before it had read everything.
    }
    EXPECT_TRUE(read_to_end(socket).empty());
    expect_alive();
  }

  void expect_alive() {
    const std::int64_t n = store_->add("alive", 1);
    EXPECT_EQ(store_->add("alive", 1), n + 1);
  }

  std::unique_ptr<TcpStore> store_;
};

TEST_F(TcpServerTest, RequestsMayBePipelinedAndAreAnsweredInOrder) {
  start();
  net::Socket socket = connect_validated();
  base::ByteWriter all;
  for (int i = 0; i < 1000; ++i) {
    all.put(Query::kSet).sized("/key").sized(base::cat(i));
    all.put(Query::kGet).sized("/key");
    all.put(Query::kAdd).sized("/n").put(std::int64_t{1});
  }
  send(socket, all);
  for (int i = 0; i < 1000; ++i) {
    const std::string value = base::cat(i);
    Bytes reply(8 + value.size() + 8);
    socket.read_exact(reply, patience());
    base::ByteReader reader(reply);
    ASSERT_EQ(as_text(*reader.sized()), value);
    ASSERT_EQ(reader.get<std::int64_t>(), i + 1);
  }
}

TEST_F(TcpServerTest, ARequestMayComeByteByByte) {
  start();
  net::Socket socket = connect();
  base::ByteWriter all;
  all.raw(validation());
  all.put(Query::kMultiSet).put(std::uint64_t{2}).sized("/a").sized("1").sized("/b").sized("2");
  all.put(Query::kMultiGet).put(std::uint64_t{2}).sized("/b").sized("/a");
  for (const std::uint8_t byte : all.view()) socket.write_all({&byte, 1}, patience());
  Bytes reply(18);
  socket.read_exact(reply, patience());
  base::ByteReader reader(reply);
  EXPECT_EQ(as_text(*reader.sized()), "2");
  EXPECT_EQ(as_text(*reader.sized()), "1");
}

TEST_F(TcpServerTest, AWaitHoldsBackWhatFollowsItUntilItsKeyComes) {
  start();
  net::Socket socket = connect_validated();
  base::ByteWriter all;
  all.put(Query::kWait).put(std::uint64_t{1}).sized("/late");
  all.put(Query::kGet).sized("/late");
  send(socket, all);
  std::this_thread::sleep_for(Milliseconds(10));
  store_->set("late", "here");
  Bytes reply(1 + 8 + 4);
  socket.read_exact(reply, patience());
  EXPECT_EQ(reply[0], 0);
  EXPECT_EQ(to_text(std::span(reply).subspan(9)), "here");
}

TEST_F(TcpServerTest, CancelingAWaitLeavesTheConnectionUsableAndTheWaitForgotten) {
  start();
  net::Socket socket = connect_validated();
  send(socket, request(Query::kWait).put(std::uint64_t{1}).sized("/never"));
  send(socket, request(Query::kCancelWait));
  Bytes reply(1);
  socket.read_exact(reply, patience());
  EXPECT_EQ(reply[0], 1);
  store_->set("never", "x");
  send(socket, request(Query::kPing).put(std::uint32_t{77}));
  Bytes pong(4);
  socket.read_exact(pong, patience());
  EXPECT_EQ(base::ByteReader(pong).get<std::uint32_t>(), 77u) << "no wake-up slipped in before it";
}

TEST_F(TcpServerTest, OnePushWakesOneOfTorchsWaiters) {
  start();
  net::Socket first = connect_validated();
  net::Socket second = connect_validated();
  Bytes byte(1);
  for (net::Socket* socket : {&first, &second}) {
    send(*socket,
         request(Query::kCheck).put(std::uint64_t{1}).sized("/q"));  // so that they wait in this order
    socket->read_exact(byte, patience());
    send(*socket, request(Query::kWait).put(std::uint64_t{1}).sized("/q"));
    send(*socket, request(Query::kCheck).put(std::uint64_t{0}));  // held back
    EXPECT_EQ(TcpStore::open(kServerHost, {.port = store_->port()})->queue_len("q"), 0) << "time to arrive";
  }
  store_->queue_push("q", to_bytes("entry"));
  first.read_exact(byte, patience());
  first.read_exact(byte, patience());
  // The first went on without taking the entry, so it was passed on.
  second.read_exact(byte, patience());
  EXPECT_EQ(store_->queue_len("q"), 1);
}

TEST_F(TcpServerTest, TheSecondOfTwoWaitersSleepsOnWhileTheFirstTakesTheEntry) {
  start();
  net::Socket first = connect_validated();
  net::Socket second = connect_validated();
  Bytes byte(1);
  const auto wait_for_queue = request(Query::kWait).put(std::uint64_t{1}).sized("/q").take();
  for (net::Socket* socket : {&first, &second}) {
    ping(*socket);
    socket->write_all(wait_for_queue, patience());
    EXPECT_EQ(TcpStore::open(kServerHost, {.port = store_->port()})->queue_len("q"), 0) << "time to arrive";
  }
  store_->queue_push("q", to_bytes("entry"));
  first.read_exact(byte, patience());
  EXPECT_EQ(store_->queue_len("q"), 1);
  EXPECT_EQ(::recv(second.fd(), byte.data(), 1, MSG_DONTWAIT), -1);
  send(first, request(Query::kQueuePop).sized("/q"));
  Bytes entry(8 + 8 + 5);
  first.read_exact(entry, patience());
  EXPECT_EQ(::recv(second.fd(), byte.data(), 1, MSG_DONTWAIT), -1);
  store_->queue_push("q", to_bytes("next"));
  second.read_exact(byte, patience());
}

// ---- garbage ----

TEST_F(TcpServerTest, AConnectionThatDoesNotValidateIsClosedAndAffectsNoOther) {
  start();
  for (const std::string text :
       {"GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01\x02", "SSH-2.0-x\r\n", "\xff\xff\xff\xff\xff"}) {
    net::Socket socket = connect();
    socket.write_all(to_bytes(text), patience());
    EXPECT_TRUE(read_to_end(socket).empty());
  }
  net::Socket wrong_magic = connect();
  send(wrong_magic, request(Query::kValidate).put(std::uint32_t{1}));
  EXPECT_TRUE(read_to_end(wrong_magic).empty());
  net::Socket no_magic = connect();
  send(no_magic, request(Query::kSet).sized("/key").sized("value"));
  EXPECT_TRUE(read_to_end(no_magic).empty());
  EXPECT_FALSE(store_->check(std::vector<std::string>{"key"}));
  expect_alive();
}

TEST_F(TcpServerTest, UnknownRequestsCloseTheConnection) {
  start();
  for (const int query : {18, 19, 63, 69, 127, 200, 255}) {
    base::ByteWriter bytes;
    expect_closed(bytes.put(static_cast<std::uint8_t>(query)).put(std::uint64_t{1}));
  }
}

TEST_F(TcpServerTest, ATruncatedRequestThatEndsChangesNothing) {
  start();
  const auto whole = request(Query::kSet).sized("/key").sized("value").take();
  for (std::size_t n = 0; n < whole.size(); ++n) {
    net::Socket socket = connect_validated();
    socket.write_all(std::span(whole).first(n), patience());
  }
  expect_alive();
  EXPECT_FALSE(store_->check(std::vector<std::string>{"key"}));
}

TEST_F(TcpServerTest, LengthsBeyondTheLimitsAreRefusedBeforeMemoryIsTaken) {
  start();
  const std::uint64_t before = resident_bytes();
  const std::uint64_t lengths[] = {(4ull << 30), (1ull << 30) + 1, 1ull << 40, 1ull << 63, ~0ull, ~0ull - 8};
  for (const std::uint64_t n : lengths) {
    expect_closed(request(Query::kSet).sized("/key").put(n));
    expect_closed(request(Query::kSet).put(n));
    expect_closed(request(Query::kCompareSet).sized("/key").sized("").put(n));
    expect_closed(request(Query::kMultiSet).put(n));
    expect_closed(request(Query::kWait).put(n));
    expect_closed(request(Query::kCheck).put(std::uint64_t{2}).sized("/a").put(n));
    expect_closed(request(Query::kGetWait).put(n));
  }
  EXPECT_LT(resident_bytes(), before + (64 << 20));
}

TEST_F(TcpServerTest, AnAnnouncedGibibyteTakesNoMemoryUntilItComes) {
  start();
  const std::uint64_t before = resident_bytes();
  std::vector<net::Socket> sockets;
  for (int i = 0; i < 50; ++i) {
    sockets.push_back(connect_validated());
    send(sockets.back(), request(Query::kSet).sized("/key").put(std::uint64_t{1} << 30));
    send(sockets.back(), request(Query::kPing).put(0u));
  }
  expect_alive();
  EXPECT_LT(resident_bytes(), before + (64 << 20)) << "50 GiB announced";
}

TEST_F(TcpServerTest, TheQuotaBoundsWhatAllClientsTogetherStoreAndSend) {
  start({.limits = {.value_bytes = 4 << 20, .total_bytes = 8 << 20}});
  store_->set("a", Bytes(3 << 20));
  store_->set("b", Bytes(3 << 20));
  expect_alive();
  expect_closed(request(Query::kSet).sized("/c").sized(Bytes(3 << 20)));
  expect_closed(request(Query::kQueuePush).sized("/q").sized(Bytes(3 << 20)));
  EXPECT_EQ(store_->get("b").size(), 3u << 20) << "a full store can be read";
  EXPECT_TRUE(store_->delete_key("a"));
  store_->set("c", Bytes(3 << 20));
  EXPECT_EQ(store_->get("c").size(), 3u << 20) << "deleting makes room";
}

TEST_F(TcpServerTest, AThousandGarbageConnectionsDisturbNoClient) {
  start();
  const auto client = TcpStore::open(kServerHost, {.port = store_->port()});
  const std::uint64_t before = resident_bytes();
  std::atomic<bool> stop = false;
  auto worker = std::async(std::launch::async, [&] {
    std::int64_t n = 0;
    while (!stop) n = client->add("work", 1);
    return n;
  });
  std::minstd_rand random(7);
  for (int i = 0; i < 1000; ++i) {
    net::Socket socket = i % 2 == 0 ? connect() : connect_validated();
    Bytes garbage(random() % 300);
    for (auto& byte : garbage) byte = static_cast<std::uint8_t>(random());
    try {
      socket.write_all(garbage, patience());
    } catch (const DistNetworkError&) {
      // Closed already.
    }
  }
  stop = true;
  EXPECT_GT(worker.get(), 0);
  expect_alive();
  EXPECT_LT(resident_bytes(), before + (64 << 20));
}

// ---- peers that do nothing, or vanish ----

TEST_F(TcpServerTest, AConnectionThatSaysNothingIsClosedInTime) {
  start({.limits = {.validate_timeout = Milliseconds(40)}});
  net::Socket mute = connect();
  net::Socket half = connect();
  half.write_all(Bytes{0, 0xCE}, patience());
  EXPECT_TRUE(read_to_end(mute).empty());
  EXPECT_TRUE(read_to_end(half).empty());
  expect_alive();
}

TEST_F(TcpServerTest, ManyMuteConnectionsDoNotKeepOthersOut) {
  start();
  std::vector<net::Socket> mute;
  for (int i = 0; i < 200; ++i) mute.push_back(connect());
  EXPECT_EQ(TcpStore::open(kServerHost, {.port = store_->port()})->add("n", 1), 1);
}

TEST_F(TcpServerTest, StrangersWhoSayNothingMakeWayForOthersTheOldestFirst) {
  start({.limits = {.strangers = 4}});
  std::vector<net::Socket> mute;
  for (int i = 0; i < 12; ++i) mute.push_back(connect());
  EXPECT_TRUE(read_to_end(mute[0]).empty());
  EXPECT_TRUE(read_to_end(mute[7]).empty()) << "only the last four are left";
  EXPECT_EQ(TcpStore::open(kServerHost, {.port = store_->port()})->add("n", 1), 1);
  expect_alive();
}

TEST_F(TcpServerTest, WhoFloodsTheDoorPushesOutHisOwnConnectionsAndNotASlowClientFromElsewhere) {
  start({.limits = {.strangers = 4}});
  base::Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto elsewhere = *net::Address::parse("127.0.0.2", 0),
             there = *net::Address::parse(kServerHost, store_->port());
  ASSERT_EQ(::bind(fd.get(), elsewhere.get(), elsewhere.length()), 0);
  ASSERT_EQ(::connect(fd.get(), there.get(), there.length()), 0);
  net::Socket slow(std::move(fd));
  std::vector<net::Socket> mute;
  for (int i = 0; i < 12; ++i) mute.push_back(connect());
  for (const std::size_t i : {0u, 7u}) EXPECT_TRUE(read_to_end(mute[i]).empty());
  slow.write_all(validation(), patience());
  ping(slow);
}

TEST_F(TcpServerTest, ManyWhoComeAtOnceAreAllServedThoughPlacesForStrangersAreFew) {
  start({.limits = {.strangers = 4}});
  std::vector<net::Socket> sockets;
  for (int i = 0; i < 100; ++i) sockets.push_back(connect_validated());
  for (auto& socket : sockets) ping(socket);
}

TEST_F(TcpServerTest, TooManyConnectionsAreTurnedAwayAndTheFirstOnesStay) {
  start({.limits = {.connections = 4}});
  std::vector<net::Socket> sockets;
  for (int i = 0; i < 3; ++i) sockets.push_back(connect_validated());
  net::Socket late = connect();
  EXPECT_TRUE(read_to_end(late).empty());
  expect_alive();
}

TEST_F(TcpServerTest, AClientThatDoesNotReadStopsOnlyItself) {
  start();
  store_->set("large", Bytes(1 << 20));
  const std::uint64_t before = resident_bytes();
  net::Socket greedy = connect_validated();
  base::ByteWriter all;
  constexpr int kReplies = long_testing::kUnderTsan ? 150 : 500;
  for (int i = 0; i < kReplies; ++i) all.put(Query::kGet).sized("/large");
  send(greedy, all);
  expect_alive();
  EXPECT_LT(resident_bytes(), before + (64 << 20)) << kReplies << " MiB of replies were asked for";
  Bytes reply(8 + (1 << 20));
  for (int i = 0; i < kReplies; ++i) greedy.read_exact(reply, patience());
}

TEST_F(TcpServerTest, AVanishedWaiterIsForgottenAndTakesNoEntry) {
  start();
  {
    net::Socket ours = connect_validated();
    net::Socket torchs = connect_validated();
    for (net::Socket* socket : {&ours, &torchs}) ping(*socket);
    send(ours, request(Query::kQueuePopWait).sized("/q"));
    send(torchs, request(Query::kWait).put(std::uint64_t{1}).sized("/q"));
    for (int i = 0; i < 3; ++i) store_->queue_len("q");
  }
  // The server sees their end before this: it serves its connections in the order they have news.
  for (int i = 0; i < 3; ++i) store_->queue_len("q");
  store_->queue_push("q", to_bytes("entry"));
  EXPECT_EQ(to_text(store_->try_queue_pop("q").value()), "entry");
  expect_alive();
}

// Both waiters lose their connections: none of them sleeps beside a queue that is not empty.
TEST_F(TcpServerTest, AnEntryThatFitsInNoReplyStaysInItsQueue) {
  start({.limits = {.reply_bytes = 100 << 10}});
  store_->queue_push("q", Bytes(200 << 10));
  for (const Query query : {Query::kQueuePop, Query::kQueuePopWait}) {
    expect_closed(request(query).sized("/q"));
    EXPECT_EQ(store_->queue_len("q"), 1);
  }
  net::Socket first = connect_validated(), second = connect_validated();
  for (net::Socket* socket : {&first, &second}) {
    send(*socket, request(Query::kQueuePopWait).sized("/later"));
    for (int i = 0; i < 3; ++i) store_->queue_len("later");  // time to arrive
  }
  store_->queue_push("later", Bytes(200 << 10));
  EXPECT_TRUE(read_to_end(first).empty());
  EXPECT_TRUE(read_to_end(second).empty());
  EXPECT_EQ(store_->queue_len("later"), 1);
}

TEST_F(TcpServerTest, ACrashOfOneClientAmidAValueLeavesTheOldValue) {
  start();
  store_->set("key", "old");
  {
    net::Socket socket = connect_validated();
    base::ByteWriter half;
    send(socket, half.put(Query::kSet).sized("/key").put(std::uint64_t{1 << 20}).raw(Bytes(1000)));
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(socket.fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);  // reset, as kill -9 may
  }
  expect_alive();
  EXPECT_EQ(to_text(store_->get("key")), "old");
}

TEST_F(TcpServerTest, TorchsAddToAValueThatIsNotANumberClosesThatConnectionOnly) {
  start();
  store_->set("text", "forty-one");
  store_->num_keys();  // the set has no reply of its own
  expect_closed(request(Query::kAdd).sized("/text").put(std::int64_t{1}));
  EXPECT_EQ(to_text(store_->get("text")), "forty-one");
}

TEST_F(TcpServerTest, TorchsGetOfAnAbsentKeyClosesThatConnectionOnly) {
  start();
  expect_closed(request(Query::kGet).sized("/absent"));
  expect_closed(request(Query::kMultiGet).put(std::uint64_t{1}).sized("/absent"));
}

TEST_F(TcpServerTest, ABufferForLibuvKeepsAllBitsOfItsLength) {
  std::uint8_t byte = 0;
  const std::size_t five_gib = std::size_t{5} << 30;  // never touched
  EXPECT_EQ(internal::uv_view({&byte, five_gib}).len, five_gib);
}

// ---- the secret ----

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
