// A TcpStore's server against clients that are slow, do not read, vanish, or are too many: they lose their
// connection, everybody else's store goes on.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/base/long_testing.h"
#include "lockstep/net/address.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/tcp_server_testing.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

using namespace tcp_server_testing;

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

}  // namespace
}  // namespace lockstep
