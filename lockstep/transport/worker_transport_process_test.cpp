// Transports in real processes: what survivors see when one is killed, many at once, memory that outlives its
// sender. Workers are forked from a single-threaded test and report by exit code.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <functional>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/fork_testing.h"
#include "lockstep/base/long_testing.h"
#include "lockstep/net/unix_socket.h"
#include "lockstep/transport/internal/greeting.h"
#include "lockstep/transport/transport_contract.h"
#include "lockstep/transport/worker_transport.h"
#include "lockstep/transport/worker_transport_testing.h"

namespace lockstep::transport {
namespace {

using fork_testing::Children;
using fork_testing::eventually;
using fork_testing::Shared;
using worker_testing::send;

constexpr int kMaxWorkers = long_testing::kUnderTsan ? 16 : 64;

// What the workers and the test share: addresses, and words to steer by.
struct Board {
  struct Place {
    std::atomic<std::uint32_t> n_bytes;
    std::uint8_t address[1024];
  };
  Place places[kMaxWorkers];
  std::atomic<std::uint64_t> words[8];
};

using Body = std::function<void(Transport&, int me)>;

class Workers {
 public:
  explicit Workers(int n, Route route = Route::kAuto) : n_(n), route_(route) {}
  Board& board() { return *board_; }

  void start(const Body& body) {
    for (int i = 0; i < n_; ++i) children_.start([&] { work(i, body); });
  }
  void kill(int i) { children_.kill(i); }
  int status(int i) { return children_.status(i); }

 private:
  void work(int me, const Body& body) {
    auto transport = open_worker_transport(
        {.id = static_cast<WorkerId>(me), .name = base::cat("worker", me), .route = route_});
    const Bytes address = transport->address();
    std::copy(address.begin(), address.end(), board_->places[me].address);
    board_->places[me].n_bytes = static_cast<std::uint32_t>(address.size());
    for (int i = 0; i < n_; ++i) {
      auto& place = board_->places[i];
      CHILD_EXPECT(eventually([&] { return place.n_bytes != 0; }), base::cat("worker ", i, " never came"));
      if (i != me)
        transport->add_peer(static_cast<WorkerId>(i), base::cat("worker", i),
                            Bytes(place.address, place.address + place.n_bytes));
    }
    body(*transport, me);
  }

  const int n_;
  const Route route_;
  const Shared<Board> board_;
  Children children_;
};

Event expect_event(Transport& transport) {
  auto event = next_event(transport);
  CHILD_EXPECT(event, "nothing came");
  return std::move(*event);
}

bool tells_kill(const std::string& cause) {
  // Kernels before 6.15 do not say how a process ended.
  return cause == "killed by SIGKILL (9)" || cause == "its process ended";
}

class Processes : public testing::TestWithParam<Route> {
 protected:
  bool shared_memory() const { return GetParam() == Route::kAuto; }
};
INSTANTIATE_TEST_SUITE_P(WorkerTransport, Processes, testing::Values(Route::kAuto, Route::kTcp),
                         [](const auto& test) {
                           return test.param == Route::kAuto ? "SharedMemory" : "Tcp";
                         });

TEST_P(Processes, AnswerEachOtherInMessagesOfEverySize) {
  Workers workers(2, GetParam());
  workers.start([](Transport& transport, int me) {
    std::uint64_t id = 0;
    for (const std::size_t size : {0u, 4u, 2048u, 2049u, 70'000u, 1u << 20, 16u << 20, 100u << 20, 4u}) {
      if (long_testing::kUnderTsan && size > (1u << 20)) continue;
      ++id;
      if (me == 0) send(transport, 1, message_of(id, 10, {size}));
      const Event event = expect_event(transport);
      CHILD_EXPECT(is_message(event.message, id, 10, {size}), base::cat(size, " bytes came wrong"));
      CHILD_EXPECT(reinterpret_cast<std::uintptr_t>(event.message.blobs[0].bytes.data()) % 64 == 0,
                   "not aligned");
      if (me == 1) send(transport, 0, event.message);
    }
    transport.close(patience());
  });
  for (const int i : {0, 1}) EXPECT_EQ(workers.status(i), 0);
}

// Of another user, which are refused at once, and of this one, which leave before they said anything.
TEST(FloodedProcesses, StillGetTheirMessages) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root to become another user";
  Workers workers(2);
  auto& n_calls = workers.board().words[0];
  auto& done = workers.board().words[1];
  auto& connected = workers.board().words[2];
  Children flooders;
  for (const uid_t user : {65534, 65534, 0}) {
    flooders.start([&, user] {
      auto& place = workers.board().places[1];
      CHILD_EXPECT(eventually([&] { return place.n_bytes != 0; }), "worker 1 never came");
      const auto where = internal::decode_endpoint(Bytes(place.address, place.address + place.n_bytes));
      // Once the workers are connected: a flood may fill the kernel's queue of callers.
      CHILD_EXPECT(eventually([&] { return connected != 0; }), "the workers did not connect");
      CHILD_EXPECT(where && ::setresuid(user, user, user) == 0, errno);
      const Deadline end = Deadline::after(Milliseconds(50'000));
      for (int code = 0; done == 0 && !end.expired(); ++n_calls)
        net::UnixSocket::try_connect(where->token, code);
      CHILD_EXPECT(done != 0, "no messages while strangers call");
    });
  }
  workers.start([&](Transport& transport, int me) {
    for (std::uint64_t id = 0; id < 200; ++id) {
      if (id == 1 && me == 0) {
        connected = 1;
        CHILD_EXPECT(eventually([&] { return n_calls > 1000; }), "nobody calls");
      }
      if (me == 0) send(transport, 1, message_of(id, 10));
      CHILD_EXPECT(is_message(expect_event(transport).message, id, 10), "came wrong");
      if (me == 1) send(transport, 0, message_of(id, 10));
    }
    done = 1;
    transport.close(patience());
  });
  for (const int i : {0, 1}) EXPECT_EQ(workers.status(i), 0);
  for (const int i : {0, 1, 2}) EXPECT_EQ(flooders.status(i), 0);
}

TEST_P(Processes, WhatASenderSentBeforeItWasKilledArrivesWholeAndThenItIsLost) {
  Workers workers(3, GetParam());
  auto& got = workers.board().words[0];
  const bool local = shared_memory();
  workers.start([&](Transport& transport, int me) {
    if (me == 1) {
      for (std::uint64_t id = 0;; ++id) {
        send(transport, 0, message_of(id, id % 300, {id % 10 == 0 ? std::size_t{50'000} : id % 50}));
        transport.poll();
        while (id > got + 2000) transport.poll();
      }
    }
    if (me == 2) {
      while (got < 1'000'000) ::poll(nullptr, 0, 1);
      send(transport, 0, message_of(1, 1));
      return transport.close(patience());
    }
    for (std::uint64_t id = 0;; ++id) {
      const Event event = expect_event(transport);
      if (event.what == Event::What::kLost) {
        CHILD_EXPECT(event.from == 1 && id > 1000, base::cat(event.from, " lost after ", id));
        CHILD_EXPECT(!local || tells_kill(event.cause), event.cause);
        break;
      }
      CHILD_EXPECT(is_message(event.message, id, id % 300, {id % 10 == 0 ? std::size_t{50'000} : id % 50}),
                   base::cat("message ", id));
      got = id;
    }
    const auto failure = transport.send(1, message_of(1, 1), patience());
    CHILD_EXPECT(
        failure && failure->kind == ErrorKind::kPeerLost && failure->peer && failure->peer->rank == 1,
        "sent to the dead");
    CHILD_EXPECT(failure->message.find("worker1") != std::string::npos, failure->message);
    got = 1'000'000;
    CHILD_EXPECT(expect_event(transport).from == 2, "the living go on");
  });
  ASSERT_TRUE(eventually([&] { return got > 3000; }));
  workers.kill(1);
  EXPECT_EQ(workers.status(0), 0);
  EXPECT_EQ(workers.status(2), 0);
}

TEST_P(Processes, AReceiverKilledWithItsRingFullIsLostAndTheSenderGoesOn) {
  Workers workers(3, GetParam());
  auto& filled = workers.board().words[0];
  const bool local = shared_memory();
  workers.start([&](Transport& transport, int me) {
    if (me == 1) {
      // One message, so that the connection is there, and no more.
      expect_event(transport);
      for (;;) ::pause();
    }
    if (me == 2) {
      expect_event(transport);
      return;
    }
    for (std::uint64_t id = 0; id < 3'000; ++id) {
      send(transport, 1, message_of(id, 200, {id % 100 == 0 ? std::size_t{100'000} : std::size_t{100}}));
      transport.poll();
    }
    filled = 1;
    const Event event = expect_event(transport);
    CHILD_EXPECT(event.what == Event::What::kLost && event.from == 1, "lost");
    CHILD_EXPECT(!local || tells_kill(event.cause), event.cause);
    CHILD_EXPECT(transport.send(1, message_of(1, 1), patience()), "sent to the dead");
    send(transport, 2, message_of(1, 1, {1 << 20}));
    transport.close(patience());
  });
  ASSERT_TRUE(eventually([&] { return filled == 1; }));
  workers.kill(1);
  EXPECT_EQ(workers.status(0), 0);
  EXPECT_EQ(workers.status(2), 0);
}

// Also in a job with a secret: what another user passes along with his first words is never taken.
TEST(WorkerTransportProcesses, AnotherUsersProcessIsRefusedOnALocalSocketBeforeItSaysAnything) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root to become another user";
  const auto transport = open_worker_transport({.id = 0, .name = "worker0", .secret = JobSecret::mint()});
  const std::string token = internal::decode_endpoint(transport->address())->token;
  Shared<std::atomic<bool>> over;
  Children children;
  children.start([&] {
    CHILD_EXPECT(::setresuid(65534, 65534, 65534) == 0, errno);
    auto socket = net::UnixSocket::connect(token, Deadline::after(fork_testing::kPatience));
    Bytes answer(1024);
    answer.resize(socket.receive(answer, Deadline::after(fork_testing::kPatience)));
    CHILD_EXPECT(to_text(answer).find("another user") != std::string::npos, to_text(answer));
    *over = true;
  });
  EXPECT_TRUE(eventually([&] { return transport->poll().has_value() || *over; }));
  EXPECT_EQ(children.status(0), 0);
}

// How a process ended is not known when its sockets have: it may take a while, or for ever, as for one that
// has executed another program. poll() looks at the sockets in every 64th call. One that waited for the end of
// the process returned the loss itself; now only a later look can, and whatever else arrives comes first.
TEST(WorkerTransportProcesses, NoPollWaitsForTheEndOfAProcessWhoseSocketHasEnded) {
  constexpr int kPollsPerLook = 64;
  for (const bool sends : {true, false}) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const base::Fd reads(ends[0]), writes(ends[1]);
    Workers workers(2);
    auto& met = workers.board().words[0];
    workers.start([&](Transport& transport, int me) {
      if (me == 1) {
        if (sends) send(transport, 0, message_of(1, 1));
        CHILD_EXPECT(eventually([&] {
                       if (transport.poll()) met = 1;
                       return met == 1;
                     }),
                     "they did not meet");
        // Closes its sockets, says so, and goes on as the same process.
        const std::string script = base::cat("echo >&", writes.get(), "; exec sleep 600");
        ::execl("/bin/sh", "sh", "-c", script.c_str(), nullptr);
        CHILD_EXPECT(false, errno);
      }
      if (!sends) send(transport, 1, message_of(1, 1));
      CHILD_EXPECT(eventually([&] {
                     if (transport.poll()) met = 1;
                     return met == 1;
                   }),
                   "they did not meet");
      char said = 0;
      CHILD_EXPECT(::read(reads.get(), &said, 1) == 1, errno);
      int n_polls = 0;
      std::optional<Event> event;
      CHILD_EXPECT(eventually([&] {
                     for (int i = 0; i < 1000 && !event; ++i, ++n_polls) event = transport.poll();
                     return event.has_value();
                   }),
                   "it was not lost");
      CHILD_EXPECT(event->what == Event::What::kLost && event->cause == "its connection ended", event->cause);
      CHILD_EXPECT(n_polls > kPollsPerLook, n_polls);
    });
    EXPECT_EQ(workers.status(0), 0) << sends;
  }
}

TEST(WorkerTransportProcesses, AMessageStaysReadableWhenItsSenderIsDeadAndTheTransportClosed) {
  Workers workers(2);
  auto& came = workers.board().words[0];
  workers.start([&](Transport& transport, int me) {
    if (me == 1) {
      send(transport, 0, message_of(3, 10, {1 << 20, 100}));
      for (;;) transport.wait(patience());
    }
    const Event event = expect_event(transport);
    came = 1;
    while (expect_event(transport).what != Event::What::kLost) continue;
    transport.close(patience());
    CHILD_EXPECT(is_message(event.message, 3, 10, {1 << 20, 100}), "changed");
    std::memset(const_cast<std::uint8_t*>(event.message.blobs[0].bytes.data()), 1, 1 << 20);
  });
  ASSERT_TRUE(eventually([&] { return came == 1; }));
  workers.kill(1);
  EXPECT_EQ(workers.status(0), 0);
}

TEST_P(Processes, ManyOfThemAllSendToAll) {
  Workers workers(kMaxWorkers, GetParam());
  workers.start([](Transport& transport, int me) {
    for (int i = 0; i < kMaxWorkers; ++i)
      send(transport, i, message_of(static_cast<std::uint64_t>(me), 50, {static_cast<std::size_t>(i) * 100}));
    std::uint64_t heard = 0;
    while (heard != ~std::uint64_t{0} >> (64 - kMaxWorkers)) {
      const Event event = expect_event(transport);
      const std::uint64_t bit = std::uint64_t{1} << event.from;
      if (event.what == Event::What::kLost) {
        // It has heard everybody and left; what it sent came first.
        CHILD_EXPECT((heard & bit) != 0, base::cat("worker ", event.from, " lost: ", event.cause));
        continue;
      }
      CHILD_EXPECT(is_message(event.message, event.from, 50, {static_cast<std::size_t>(me) * 100}),
                   base::cat("from ", event.from));
      heard |= bit;
    }
    transport.close(patience());
  });
  for (int i = 0; i < kMaxWorkers; ++i) EXPECT_EQ(workers.status(i), 0) << i;
}

TEST_P(Processes, AnEndOfOneIsSeenByAnIdleOther) {
  Workers workers(2, GetParam());
  auto& met = workers.board().words[0];
  workers.start([&](Transport& transport, int me) {
    if (me == 1) {
      expect_event(transport);
      met = 1;
      for (;;) ::pause();
    }
    send(transport, 1, message_of(1, 1));
    const Event event = expect_event(transport);
    CHILD_EXPECT(event.what == Event::What::kLost && event.from == 1, "lost");
  });
  ASSERT_TRUE(eventually([&] { return met == 1; }));
  workers.kill(1);
  EXPECT_EQ(workers.status(0), 0);
}

}  // namespace
}  // namespace lockstep::transport
