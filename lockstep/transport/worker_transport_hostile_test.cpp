// What strangers and faulty workers can do to a WorkerTransport: end their own connection.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <filesystem>
#include <future>
#include <iterator>

#include "lockstep/base/detail/text.h"
#include "lockstep/net/sealed.h"
#include "lockstep/net/socket.h"
#include "lockstep/net/unix_socket.h"
#include "lockstep/transport/internal/frame.h"
#include "lockstep/transport/internal/greeting.h"
#include "lockstep/transport/internal/inbox.h"
#include "lockstep/transport/internal/message_heap.h"
#include "lockstep/transport/internal/record.h"
#include "lockstep/transport/internal/tcp_link.h"
#include "lockstep/transport/worker_transport_testing.h"

namespace lockstep::transport {
namespace {

using namespace internal;
using namespace worker_testing;

// A peer that is let in and then breaks the rules.
TEST(WorkerTransport, ABrokenFrameEndsItsConnectionAndIsReportedAsALoss) {
  const auto b = open(1, {.route = Route::kTcp}), c = open(2, {.route = Route::kTcp});
  introduce(*c, 2, *b, 1);
  const auto where = *decode_endpoint(b->address());
  b->add_peer(5, "worker5",
              encode_endpoint({.host = "h", .token = "evil", .tcp_host = "127.0.0.1", .tcp_port = 1}));
  auto talk = std::async(std::launch::async, [&] {
    net::Socket socket = net::Socket::connect(where.tcp_host, where.tcp_port, patience());
    GreetingClient greeting(std::nullopt, {.id = 5, .token = "evil", .to = where.token}, {});
    GreetingReader reader;
    socket.write_all(with_length(greeting.first()), patience());
    for (;;) {
      Bytes buffer(reader.wanted());
      socket.read_exact(buffer, patience());
      const auto message = reader.feed(buffer);
      if (!message) continue;
      auto step = greeting.next(*message);
      if (!step.refusal.empty()) throw std::runtime_error(step.refusal);
      if (step.welcome) break;
      socket.write_all(with_length(step.send), patience());
    }
    socket.write_all(Bytes(100, 0x55), patience());
    std::uint8_t byte = 0;
    EXPECT_THROW(socket.read_exact({&byte, 1}, patience()), Error) << "it must be closed";
  });
  const auto event = next({b.get(), c.get()});
  ASSERT_TRUE(event);
  EXPECT_EQ(event->what, Event::What::kLost);
  EXPECT_EQ(event->from, 5);
  EXPECT_EQ(event->cause, "it sent bytes that are not a lockstep message");
  talk.get();
  EXPECT_FALSE(c->send(1, message_of(2, 10), patience()));
  EXPECT_TRUE(next({b.get(), c.get()}));
}

// A worker with the job's secret that was let in over TCP, and the network behind it.
class SealedCaller {
 public:
  SealedCaller(const Endpoint& where, const JobSecret& secret) {
    socket_.emplace(net::Socket::connect(where.tcp_host, where.tcp_port, patience()));
    GreetingClient greeting(secret, {.id = 5, .token = "five", .to = where.token},
                            {.purpose = net::Purpose::kTransportTcp,
                             .server = where.token,
                             .address = socket_->peer().canonical()});
    socket_->write_all(with_length(greeting.first()), patience());
    GreetingReader reader;
    std::optional<Bytes> challenge;
    while (!challenge) {
      Bytes buffer(reader.wanted());
      socket_->read_exact(buffer, patience());
      challenge = reader.feed(buffer);
    }
    socket_->write_all(with_length(greeting.next(*challenge).send), patience());
    sealer_.emplace(greeting.keys()->client);
  }
  Bytes seal(const Message& message) {
    Bytes frame = encode_frame_head(message);
    frame.insert(frame.end(), message.body.bytes.begin(), message.body.bytes.end());
    Bytes record;
    sealer_->seal(frame, record);
    return record;
  }
  void send(const Bytes& bytes) { socket_->write_all(bytes, patience()); }

 private:
  std::optional<net::Socket> socket_;
  std::optional<net::Sealer> sealer_;
};

TEST(WorkerTransport, WhatIsChangedRepeatedOrAddedOnTheWayEndsTheConnectionAndIsNotDelivered) {
  const JobSecret secret = JobSecret::mint();
  for (const std::string crime : {"changed", "repeated", "left out", "in the clear"}) {
    const auto b = open(1, {.secret = secret, .route = Route::kTcp});
    b->add_peer(5, "worker5",
                encode_endpoint({.host = "h", .token = "five", .tcp_host = "127.0.0.1", .tcp_port = 1}));
    auto calling =
        std::async(std::launch::async, [&] { return SealedCaller(*decode_endpoint(b->address()), secret); });
    while (calling.wait_for(Milliseconds(0)) != std::future_status::ready) b->poll();
    SealedCaller caller = calling.get();
    const Message message = message_of(7, 10);
    caller.send(caller.seal(message));
    const auto first = next({b.get()});
    ASSERT_TRUE(first && first->what == Event::What::kMessage) << crime;
    Bytes second = caller.seal(message);
    if (crime == "changed") second[second.size() - 20] ^= 1;
    if (crime == "repeated") {
      caller.send(second);
      EXPECT_TRUE(next({b.get()}));
    }
    if (crime == "left out") second = caller.seal(message);
    if (crime == "in the clear") second = encode_frame_head(message_of(7, 0));
    caller.send(second);
    const auto event = next({b.get()});
    ASSERT_TRUE(event) << crime;
    EXPECT_EQ(event->what, Event::What::kLost) << crime;
    EXPECT_NE(event->cause.find("did not send"), std::string::npos) << crime << ": " << event->cause;
  }
}

TEST_P(Host, StrangersWhoSayNothingAreFewAndTheOldestMakeWay) {
  const auto a = open(0, {.route = GetParam()}), b = open(1, {.route = GetParam()});
  const auto where = *decode_endpoint(b->address());
  const bool tcp = GetParam() == Route::kTcp;
  const auto address =
      tcp ? *net::Address::parse(where.tcp_host, where.tcp_port) : net::Address::local_name(where.token);
  std::vector<base::Fd> silent;
  for (int i = 0; i < 300; ++i) {
    base::Fd fd(::socket(address.family(), (tcp ? SOCK_STREAM : SOCK_SEQPACKET) | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(fd.get(), address.get(), address.length()), 0);
    silent.push_back(std::move(fd));
  }
  const auto n_descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = n_descriptors();
  for (int i = 0; i < 1000; ++i) b->poll();
  EXPECT_LE(n_descriptors(), before + 70) << "of 300";
  introduce(*a, 0, *b, 1);
  EXPECT_FALSE(a->send(1, message_of(4, 4), patience()));
  EXPECT_TRUE(next({b.get(), a.get()}));
}

// It was stopped, or is far away.
TEST_P(Host, AWorkerThatMadeWayForStrangersCallsAgain) {
  const auto secret = JobSecret::mint();
  const auto a = open(0, {.secret = secret, .route = GetParam()});
  const auto b = open(1, {.secret = secret, .route = GetParam()});
  introduce(*a, 0, *b, 1);
  EXPECT_FALSE(a->send(1, message_of(4, 4), patience()));
  a->poll();
  b->poll();  // its call is the first that came
  const auto where = *decode_endpoint(b->address());
  const bool tcp = GetParam() == Route::kTcp;
  const auto address =
      tcp ? *net::Address::parse(where.tcp_host, where.tcp_port) : net::Address::local_name(where.token);
  std::vector<base::Fd> silent;
  for (int i = 0; i < 80; ++i) {
    base::Fd fd(::socket(address.family(), (tcp ? SOCK_STREAM : SOCK_SEQPACKET) | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(fd.get(), address.get(), address.length()), 0);
    silent.push_back(std::move(fd));
  }
  // The first stranger goes after the worker.
  pollfd first{.fd = silent[0].get(), .events = POLLIN, .revents = 0};
  const Deadline deadline = patience();
  while (::poll(&first, 1, 0) == 0 && !deadline.expired()) EXPECT_FALSE(b->poll());
  const auto event = next({b.get(), a.get()});
  ASSERT_TRUE(event);
  EXPECT_EQ(event->what, Event::What::kMessage) << event->cause;
}

// One that is let in to shared memory and writes nonsense there.
class EvilWriter {
 public:
  EvilWriter(const Endpoint& where, const MessageHeap& heap) {
    auto socket = net::UnixSocket::connect(where.token, patience());
    socket.trust_own_user();
    GreetingClient greeting(
        std::nullopt, {.id = 5, .token = "evil", .to = where.token, .heap_bytes = heap.mapping()->size()},
        {});
    socket.send(greeting.first(), patience());
    for (;;) {
      Bytes buffer(net::kMaxPeerMessage);
      std::vector<base::Fd> fds;
      buffer.resize(socket.receive(buffer, patience(), &fds));
      auto step = greeting.next(buffer);
      if (!step.refusal.empty()) throw std::runtime_error(step.refusal);
      if (!step.send.empty()) socket.send(step.send, patience(), std::array{heap.mapping()->fd()});
      if (!step.welcome) continue;
      inbox_ = Inbox(local::SegmentTable::of_process().map(std::move(fds[0]), kInboxBytes));
      bell_ = std::move(fds[1]);
      slot_ = step.welcome->slot;
      break;
    }
    socket_ = std::move(socket);
  }
  Ring ring() const { return inbox_.ring(slot_); }
  void announce() const { inbox_.announce(slot_, bell_.get()); }

 private:
  net::UnixSocket socket_;
  Inbox inbox_;
  base::Fd bell_;
  std::uint32_t slot_ = 0;
};

TEST(WorkerTransport, ARingOfNonsenseEndsItsSenderOnly) {
  const std::vector<std::function<void(const Ring&)>> crimes = {
      [](const Ring& ring) { ring.control->tail = ~std::uint64_t{0}; },
      [](const Ring& ring) { ring.control->tail = 64; },
      [](const Ring& ring) { RingWriter(ring).write(Bytes(100, 0xff)); },
      [](const Ring& ring) {
        Bytes record(kMinRecord);
        const RecordHead head{.n_bytes = kMinRecord, .n_parts = 1};
        const RecordPart part{.offset = kInHeap | (std::uint64_t{1} << 50), .n_bytes = 5000};
        std::memcpy(record.data(), &head, sizeof head);
        std::memcpy(record.data() + sizeof head, &part, sizeof part);
        RingWriter(ring).write(record);
      }};
  for (const auto& crime : crimes) {
    const auto b = open(1), c = open(2);
    introduce(*c, 2, *b, 1);
    b->add_peer(5, "worker5", encode_endpoint({.host = "h", .token = "evil"}));
    MessageHeap heap(1 << 20);
    auto accept =
        std::async(std::launch::async, [&] { return EvilWriter(*decode_endpoint(b->address()), heap); });
    while (accept.wait_for(Milliseconds(0)) != std::future_status::ready) b->poll();
    const EvilWriter evil = accept.get();
    crime(evil.ring());
    evil.announce();
    const auto event = next({b.get(), c.get()});
    ASSERT_TRUE(event);
    EXPECT_EQ(event->what, Event::What::kLost);
    EXPECT_EQ(event->from, 5);
    EXPECT_NE(event->cause.find("it sent "), std::string::npos) << event->cause;
    EXPECT_FALSE(c->send(1, message_of(2, 10), patience()));
    const auto after = next({b.get(), c.get()});
    ASSERT_TRUE(after);
    EXPECT_EQ(after->from, 2);
  }
}

}  // namespace
}  // namespace lockstep::transport
