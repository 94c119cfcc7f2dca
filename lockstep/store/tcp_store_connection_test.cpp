// A TcpStore's connection: writes that have no reply, forked children, servers that end.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <thread>

#include "lockstep/base/detail/text.h"
#include "lockstep/net/socket.h"
#include "lockstep/store/tcp_store.h"
#include "lockstep/store/tcp_store_testing.h"

namespace lockstep {
namespace {

using namespace tcp_testing;

// ---- writes that have no reply ----

TEST(TcpStore, ManyWritesInARowAreReadBackInTheirOrder) {
  const auto secret = JobSecret::mint();
  for (const bool local : {true, false}) {
    const auto server = TcpStore::open(kHost, master({.secret = secret}));
    const auto client =
        TcpStore::open(kHost, {.port = server->port(), .secret = secret, .local_socket = local});
    std::string expected;
    for (int i = 0; i < 5'000; ++i) {
      client->set("last", base::cat(i));
      if (i % 100 == 0) client->append("all", to_bytes(base::cat(i, ' ')));
      if (i % 100 == 0) expected += base::cat(i, ' ');
      if (i % 1'000 == 999) {
        ASSERT_EQ(to_text(client->get("last")), base::cat(i)) << "what I wrote I read";
      }
    }
    EXPECT_EQ(to_text(client->get("all")), expected);
  }
}

TEST(TcpStore, AWriteReachesOthersThoughItsHandleIsNotUsedAgain) {
  const auto server = TcpStore::open(kHost, master());
  const auto client = TcpStore::open(kHost, {.port = server->port()});
  for (int i = 0; i < 1'000; ++i) client->set(base::cat("key", i), "here");
  EXPECT_EQ(to_text(server->get("key999")), "here");
  EXPECT_EQ(server->num_keys(), 1'000);
}

TEST(TcpStore, AWriteThatFailsLaterIsRaisedByALaterCall) {
  auto server = TcpStore::open(kHost, master({.limits = {.total_bytes = 1 << 20}}));
  const auto client = TcpStore::open(kHost, {.port = server->port()});
  const Failure failure = failure_of<DistNetworkError>([&] {
    for (int i = 0; i < 100'000; ++i)
      client->set(base::cat("key", i), Bytes(1'000));  // the store is full long before
  });
  EXPECT_EQ(failure_of<DistNetworkError>([&] { client->num_keys(); }).message, failure.message);
}

TEST(TcpStore, AServerThatReadsNothingEndsAWriteAtItsTimeoutAndTakesNoMoreMemory) {
  auto mute = net::Listener::listen(*net::Address::parse(kHost, 0), 4);
  auto server = std::async(std::launch::async, [&] {
    net::Socket socket = mute.accept(Deadline::after(kPatience));
    Bytes first(10);  // validation and ping; torch's server echoes it
    socket.read_exact(first, Deadline::after(kPatience));
    socket.write_all(std::span(first).last(4), Deadline::after(kPatience));
    return socket;
  });
  const auto client = TcpStore::open(kHost, {.port = mute.local().port(), .timeout = kPatience});
  const net::Socket keep = server.get();
  client->set_timeout(kShort);
  const Failure failure = failure_of<DistNetworkError>([&] {
    for (int i = 0; i < 1'000'000; ++i) client->set("key", Bytes(1'000));
  });
  EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
}

TEST(TcpStore, AForkedChildMayNotUseItsParentsConnection) {
  const auto server = TcpStore::open(kHost, master({.secret = JobSecret::mint()}));
  for (int i = 0; i < 100; ++i) server->set("key", "value");
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      server->set("key", "other");
    } catch (const DistStoreError& error) {
      ::_exit(error.kind() == ErrorKind::kUsage ? 0 : 1);
    }
    ::_exit(2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(to_text(server->get("key")), "value");
}

// The copy has no thread behind it that could be stopped, or leave what it waits for.
TEST(TcpStore, AForkedChildMayDestroyItsCopyOfAHandle) {
  const auto server = TcpStore::open(kHost, master({.secret = JobSecret::mint()}));
  auto client = server->clone();
  for (int i = 0; i < 100; ++i) client->set("key", "value");
  client->num_keys();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);  // ends one that hangs
    client.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(to_text(client->get("key")), "value");
}

// ---- connections that end ----

TEST(TcpStore, WhenTheServerGoesEveryCallRaisesTheSameNetworkError) {
  auto server = TcpStore::open(kHost, master());
  const auto client = TcpStore::open(kHost, {.port = server->port()});
  auto waiting = std::async(std::launch::async, [&] { client->get("never"); });
  std::this_thread::sleep_for(Milliseconds(15));
  server.reset();
  const Failure first = failure_of<DistNetworkError>([&] { waiting.get(); });
  EXPECT_EQ(first.kind, ErrorKind::kPeerLost);
  EXPECT_EQ(failure_of<DistNetworkError>([&] { client->set("a", "b"); }).message, first.message);
  EXPECT_EQ(failure_of<DistNetworkError>([&] { client->num_keys(); }).message, first.message);
}

TEST(TcpStore, ALateAnswerAndItsCancellationLeaveTheConnectionInStep) {
  const auto server = TcpStore::open(kHost, master());
  auto client = TcpStore::open(kHost, {.port = server->port()});
  for (int round = 0; round < 100; ++round) {
    // The write comes about when the wait ends: sometimes the answer crosses the cancellation.
    const std::string key = base::cat("key", round);
    auto writer = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(std::chrono::microseconds(1500 + 20 * round));
      server->set(key, key);
    });
    try {
      const StoreTimeoutGuard short_wait(*client, Milliseconds(2));
      EXPECT_EQ(to_text(client->get(key)), key);
    } catch (const DistStoreError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    }
    writer.get();
    ASSERT_EQ(client->add("rounds", 1), round + 1);
  }
}

TEST(TcpStore, ValuesAndKeysBeyondTheLimitsAreUsageErrorsAndTheHandleSurvives) {
  const TcpStoreLimits limits{.key_bytes = 10, .value_bytes = 100, .keys_per_request = 4};
  const auto server = TcpStore::open(kHost, master({.limits = limits}));
  const std::vector<std::function<void()>> calls = {
      [&] { server->set("12345678901", "x"); },
      [&] { server->set("key", Bytes(101)); },
      [&] { server->check(std::vector<std::string>(5)); },
      [&] { server->queue_push("q", Bytes(101)); },
  };
  for (const auto& call : calls) EXPECT_EQ(failure_of<DistStoreError>(call).kind, ErrorKind::kUsage);
  server->set("123456789", Bytes(100));
  EXPECT_EQ(server->get("123456789").size(), 100u);
}

}  // namespace
}  // namespace lockstep
