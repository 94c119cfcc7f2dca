// WorkerTransport beyond the contract: who is let in, memory and limits.
#include "lockstep/transport/worker_transport.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <future>

#include "lockstep/base/detail/text.h"
#include "lockstep/net/socket.h"
#include "lockstep/net/unix_socket.h"
#include "lockstep/transport/internal/greeting.h"
#include "lockstep/transport/transport_contract.h"
#include "lockstep/transport/worker_transport_testing.h"

namespace lockstep::transport {
namespace {

using namespace internal;
using namespace worker_testing;

INSTANTIATE_TEST_SUITE_P(WorkerTransport, Host, testing::Values(Route::kAuto, Route::kTcp),
                         [](const auto& test) {
                           return test.param == Route::kAuto ? "SharedMemory" : "Tcp";
                         });

TEST_P(Host, AnotherSecretOrNoneIsRejectedWithAReason) {
  const auto secret = JobSecret::mint();
  struct Case {
    std::optional<JobSecret> caller;
    std::string cause;
  };
  for (const Case& one :
       {Case{JobSecret::mint(), "it has another job secret"}, Case{std::nullopt, "this job has a secret"}}) {
    const auto a = open(0, {.secret = one.caller, .route = GetParam()});
    const auto b = open(1, {.secret = secret, .route = GetParam()});
    introduce(*a, 0, *b, 1);
    EXPECT_FALSE(a->send(1, message_of(1, 1), patience()));
    const auto event = next({a.get(), b.get()});
    ASSERT_TRUE(event);
    EXPECT_EQ(event->what, Event::What::kLost);
    EXPECT_NE(event->cause.find(one.cause), std::string::npos) << event->cause;
    const auto failure = a->send(1, message_of(1, 1), patience());
    ASSERT_TRUE(failure);
    EXPECT_NE(failure->message.find("worker1 (1) is gone"), std::string::npos) << failure->message;
    EXPECT_FALSE(b->poll());
  }
}

TEST_P(Host, AWorkerThatConnectsBeforeItIsKnownIsAcceptedOnceItIs) {
  const auto a = open(0, {.route = GetParam()}), b = open(1, {.route = GetParam()});
  a->add_peer(1, "worker1", b->address());
  EXPECT_FALSE(a->send(1, message_of(9, 100), patience()));
  for (int i = 0; i < 2000; ++i) {
    EXPECT_FALSE(a->poll());
    EXPECT_FALSE(b->poll());
  }
  b->add_peer(0, "worker0", a->address());
  const auto event = next({b.get(), a.get()});
  ASSERT_TRUE(event);
  EXPECT_TRUE(is_message(event->message, 9, 100));
}

TEST_P(Host, SendingToTheUnknownOrTooMuchIsAUsageErrorAndHarmsNothing) {
  const auto a = open(0, {.route = GetParam(), .max_message_bytes = 1000}),
             b = open(1, {.route = GetParam()});
  introduce(*a, 0, *b, 1);
  for (const auto& failure :
       {a->send(7, message_of(1, 1), patience()), a->send(1, message_of(1, 500, {501}), patience())}) {
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->kind, ErrorKind::kUsage) << failure->message;
  }
  EXPECT_FALSE(a->send(1, message_of(1, 500, {500}), patience()));
  EXPECT_TRUE(next({b.get(), a.get()}));
}

TEST_P(Host, AMessageBeyondTheReceiversLimitEndsThatConnectionOnly) {
  const auto a = open(0, {.route = GetParam()}),
             b = open(1, {.route = GetParam(), .max_message_bytes = 10'000});
  const auto c = open(2, {.route = GetParam()});
  introduce(*a, 0, *b, 1);
  introduce(*c, 2, *b, 1);
  EXPECT_FALSE(a->send(1, message_of(1, 10, {20'000}), patience()));
  std::optional<Event> lost;
  const Deadline deadline = patience();
  while (!lost && !deadline.expired()) {
    lost = b->poll();
    a->poll();
  }
  ASSERT_TRUE(lost);
  EXPECT_EQ(lost->what, Event::What::kLost);
  EXPECT_NE(lost->cause.find("beyond the limit of 10000"), std::string::npos) << lost->cause;
  EXPECT_FALSE(c->send(1, message_of(2, 10), patience()));
  const auto event = next({b.get(), c.get()});
  ASSERT_TRUE(event);
  EXPECT_EQ(event->from, 2);
}

TEST_P(Host, AnIdIsThereOnceUntilItIsRemoved) {
  const auto a = open(0, {.route = GetParam()});
  auto b = open(1, {.route = GetParam()});
  a->add_peer(1, "worker1", b->address());
  EXPECT_THROW(a->add_peer(1, "again", b->address()), Error);
  a->remove_peer(1);
  b = open(1, {.route = GetParam()});
  introduce(*a, 0, *b, 1);
  EXPECT_FALSE(a->send(1, message_of(4, 4), patience()));
  EXPECT_TRUE(next({b.get(), a.get()}));
}

TEST_P(Host, WhatWasQueuedBeforeAPeerWasRemovedStillReachesIt) {
  const auto a = open(0, {.route = GetParam()}), b = open(1, {.route = GetParam()});
  introduce(*a, 0, *b, 1);
  constexpr std::uint64_t kCount = 2'000;
  for (std::uint64_t id = 0; id < kCount; ++id) ASSERT_FALSE(a->send(1, message_of(id, 100), patience()));
  a->remove_peer(1);
  for (std::uint64_t id = 0; id < kCount; ++id) {
    const auto event = next({b.get(), a.get()});
    ASSERT_TRUE(event);
    ASSERT_EQ(event->what, Event::What::kMessage) << event->cause;
    ASSERT_EQ(event->message.id, id);
  }
}

TEST_P(Host, AHundredThousandMessagesWaitForAReceiverThatDoesNotPoll) {
  const auto a = open(0, {.route = GetParam()}), b = open(1, {.route = GetParam()});
  introduce(*a, 0, *b, 1);
  constexpr std::uint64_t kCount = 100'000;
  for (std::uint64_t id = 0; id < kCount; ++id) ASSERT_FALSE(a->send(1, message_of(id, 16), patience()));
  for (std::uint64_t id = 0; id < kCount; ++id) {
    const auto event = next({b.get(), a.get()});
    ASSERT_TRUE(event);
    ASSERT_EQ(event->message.id, id);
  }
}

TEST_P(Host, ASilentConnectionDelaysNoWorker) {
  const auto a = open(0, {.route = GetParam()}), b = open(1, {.route = GetParam()});
  const auto where = *decode_endpoint(b->address());
  std::vector<base::Fd> idle;
  const auto local = net::Address::local_name(where.token);
  for (int i = 0; i < 20; ++i) {
    const auto address =
        GetParam() == Route::kTcp ? *net::Address::parse(where.tcp_host, where.tcp_port) : local;
    base::Fd fd(::socket(address.family(),
                         (GetParam() == Route::kTcp ? SOCK_STREAM : SOCK_SEQPACKET) | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(fd.get(), address.get(), address.length()), 0);
    if (i % 2 == 0) {
      ASSERT_EQ(::send(fd.get(), "garbage", 7, MSG_NOSIGNAL), 7);
    }
    idle.push_back(std::move(fd));
  }
  introduce(*a, 0, *b, 1);
  EXPECT_FALSE(a->send(1, message_of(4, 4), patience()));
  EXPECT_TRUE(next({b.get(), a.get()}));
}

TEST(WorkerTransport, BeyondLoopbackWithoutASecretIsRefusedUnlessSaidAloud) {
  WorkerTransportOptions options{.bind_host = "192.0.2.1"};
  try {
    open_worker_transport(options);
    ADD_FAILURE() << "opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(error.what()).find("LOCKSTEP_INSECURE=1"), std::string::npos) << error.what();
  }
  const auto a = open(0, {.route = Route::kTcp});
  a->add_peer(1, "worker1",
              encode_endpoint({.host = "elsewhere", .token = "t", .tcp_host = "192.0.2.1", .tcp_port = 9}));
  const auto failure = a->send(1, message_of(1, 1), patience());
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, ErrorKind::kUsage);
  EXPECT_NE(failure->message.find("LOCKSTEP_SECRET_FILE"), std::string::npos) << failure->message;
}

TEST(WorkerTransport, AWorkerOfAnotherHostWithoutATcpAddressIsAUsageError) {
  const auto a = open(0);
  a->add_peer(1, "worker1", encode_endpoint({.host = "elsewhere", .token = "t"}));
  const auto failure = a->send(1, message_of(1, 1), patience());
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, ErrorKind::kUsage);
  EXPECT_NE(failure->message.find("bind_host"), std::string::npos) << failure->message;
}

TEST_P(Host, AnAddressWithoutAListenerIsALostPeer) {
  const auto a = open(0, {.route = GetParam()});
  auto b = open(1, {.route = GetParam()});
  a->add_peer(1, "worker1", b->address());
  b.reset();
  auto failure = a->send(1, message_of(1, 1), patience());
  if (!failure) {
    const auto event = next({a.get()});
    ASSERT_TRUE(event);
    EXPECT_EQ(event->cause, "nobody listens at its address");
    failure = a->send(1, message_of(1, 1), patience());
  }
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, ErrorKind::kPeerLost);
}

}  // namespace
}  // namespace lockstep::transport
