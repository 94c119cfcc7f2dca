// The requests of a TcpStore's server in raw bytes. In whatever pieces they arrive, they are answered in
// order; a sender of anything else, or of more than the limits allow, loses its connection, and everybody
// else's store goes on.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <future>
#include <random>
#include <thread>

#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/internal/uv_view.h"
#include "lockstep/store/tcp_server_testing.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

using namespace tcp_server_testing;

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

// ---- garbage, and more than is allowed ----

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

}  // namespace
}  // namespace lockstep
