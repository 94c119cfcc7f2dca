#include "lockstep/transport/transport_contract.h"

#include <atomic>
#include <future>
#include <set>

namespace lockstep::transport {
namespace {

const std::vector<std::vector<std::size_t>> kBlobLists = {{},
                                                          {0},
                                                          {4},
                                                          {1, 2, 3},
                                                          {2048},
                                                          {2049},
                                                          {100, 5000, 7},
                                                          {70'000},
                                                          {1 << 20, 0, 3, 1 << 20},
                                                          std::vector<std::size_t>(100, 200),
                                                          std::vector<std::size_t>(300, 2048)};

TEST_P(TransportContract, AMessageArrivesWithItsKindNumberBodyAndBlobs) {
  start(2);
  std::uint64_t id = 1;
  for (const std::size_t body : {0u, 1u, 63u, 64u, 2048u, 2049u, 8000u, 100'000u}) {
    for (const auto& blobs : kBlobLists) {
      expect_sent(0, 1, message_of(++id, body, blobs));
      const auto event = next(1);
      ASSERT_TRUE(event) << body;
      EXPECT_EQ(event->what, Event::What::kMessage);
      EXPECT_EQ(event->from, 0);
      EXPECT_TRUE(is_message(event->message, id, body, blobs)) << body << " and " << blobs.size() << " blobs";
    }
  }
}

TEST_P(TransportContract, WhatArrivesIsTheReceiversOwn) {
  start(2);
  Message message = message_of(1, 10, {10, 100'000});
  const auto body = message.body;
  const auto blobs = message.blobs;
  expect_sent(0, 1, std::move(message));
  auto event = next(1);
  ASSERT_TRUE(event);
  for (auto& blob : event->message.blobs) {
    EXPECT_TRUE(blob.yours);
    std::memset(const_cast<std::uint8_t*>(blob.bytes.data()), 0, blob.bytes.size());
  }
  EXPECT_TRUE(is_pattern(blobs[0].bytes, 10, 11));
  EXPECT_TRUE(is_pattern(blobs[1].bytes, 100'000, 100'001));
}

TEST_P(TransportContract, AKeptBlobStaysWhileManyMoreCome) {
  start(2);
  std::vector<object::Blob> kept;
  const std::size_t sizes[] = {50, 3000, 200'000};
  for (std::uint64_t id = 0; id < 60; ++id) {
    const std::size_t size = sizes[id % 3];
    expect_sent(0, 1, message_of(id, 8, {size, size}));
    auto event = next(1);
    ASSERT_TRUE(event);
    kept.push_back(event->message.blobs[0]);
  }
  for (std::uint64_t id = 0; id < 60; ++id) {
    EXPECT_TRUE(is_pattern(kept[id].bytes, sizes[id % 3], id + sizes[id % 3])) << id;
  }
}

TEST_P(TransportContract, MessagesOfOneWorkerArriveInOrder) {
  start(2);
  constexpr std::uint64_t kCount = 20'000;
  auto sender = std::async(std::launch::async, [&] {
    for (std::uint64_t id = 0; id < kCount; ++id) {
      expect_sent(
          0, 1,
          message_of(id, id % 97,
                     id % 500 == 0 ? std::vector<std::size_t>{30'000} : std::vector<std::size_t>{id % 11}));
      if (id % 64 == 0) at(0).poll();
    }
    at(0).close(patience());
  });
  for (std::uint64_t id = 0; id < kCount; ++id) {
    const auto event = next_event(at(1));
    ASSERT_TRUE(event);
    ASSERT_EQ(event->what, Event::What::kMessage) << event->cause;
    ASSERT_EQ(event->message.id, id);
  }
  sender.get();
}

TEST_P(TransportContract, AWorkerSendsToItself) {
  start(1);
  const Message message = message_of(5, 20, {3, 9000});
  expect_sent(0, 0, message);
  const auto event = next(0);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->from, 0);
  EXPECT_TRUE(is_message(event->message, 5, 20, {3, 9000}));
  EXPECT_NE(event->message.blobs[1].bytes.data(), message.blobs[1].bytes.data());
}

TEST_P(TransportContract, AnInvalidAddressIsRejected) {
  start(2);
  for (const Bytes& address : {Bytes{}, to_bytes("nonsense"), Bytes(5000, 'L')}) {
    try {
      at(0).add_peer(9, "nine", address);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string(error.what()).find("nine"), std::string::npos);
    }
  }
}

TEST_P(TransportContract, AWaitEndsWithAMessageWithWakeAndAtItsDeadline) {
  start(2);
  at(1).wait(Deadline::after(Milliseconds(5)));  // or this test would not end
  at(1).wake();
  at(1).wait(patience());
  auto waker = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(Milliseconds(10));
    at(1).wake();
  });
  at(1).wait(patience());
  waker.get();
  auto sender = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(Milliseconds(10));
    expect_sent(0, 1, message_of(1, 1));
    at(0).close(patience());
  });
  const auto event = next_event(at(1));
  ASSERT_TRUE(event);
  EXPECT_EQ(event->message.id, 1u);
  sender.get();
}

// Two who answer each other, one asleep all the time, the other polling: every message must wake the sleeper.
TEST_P(TransportContract, APollerAndASleeperAnswerEachOther) {
  start(2);
  constexpr std::uint64_t kRounds = 2'000;
  auto sleeper = std::async(std::launch::async, [&] {
    for (std::uint64_t id = 0; id < kRounds; ++id) {
      const auto event = next_event(at(1));
      ASSERT_TRUE(event);
      ASSERT_EQ(event->message.id, id);
      expect_sent(1, 0, message_of(id, 4));
    }
  });
  at(0).begin_polling();
  for (std::uint64_t id = 0; id < kRounds; ++id) {
    expect_sent(0, 1, message_of(id, 4));
    const Deadline deadline = patience();
    std::optional<Event> event;
    while (!(event = at(0).poll()) && !deadline.expired()) continue;
    ASSERT_TRUE(event);
    ASSERT_EQ(event->message.id, id);
  }
  at(0).end_polling();
  sleeper.get();
}

// A thread sleeps while another polls for a while and then leaves with messages still to come: the sleeper
// gets them.
TEST_P(TransportContract, WhatAPollerLeavesWakesTheSleeper) {
  start(2);
  constexpr std::uint64_t kCount = 3'000;
  std::atomic<std::uint64_t> got{0};
  std::atomic<bool> done{false};
  auto sleeper = std::async(std::launch::async, [&] {
    while (got < kCount) {
      if (const auto event = at(1).poll()) {
        if (event->what == Event::What::kMessage) ++got;
      } else {
        at(1).wait(patience());
      }
    }
    done = true;
  });
  auto poller = std::async(std::launch::async, [&] {
    while (!done) {
      at(1).begin_polling();
      for (int i = 0; i < 20; ++i) {
        const auto event = at(1).poll();
        if (event && event->what == Event::What::kMessage) ++got;
      }
      at(1).end_polling();
      if (got >= kCount) at(1).wake();
    }
  });
  for (std::uint64_t id = 0; id < kCount; ++id) {
    expect_sent(0, 1, message_of(id, 16));
    at(0).poll();
    if (id % 50 == 0) std::this_thread::sleep_for(Milliseconds(1));
  }
  at(0).close(patience());
  sleeper.get();
  poller.get();
  EXPECT_EQ(got, kCount);
}

TEST_P(TransportContract, AnEndIsReportedOnceAndNamesTheWorkerAfterwards) {
  start(3);
  for (const int to : {1, 2}) {
    expect_sent(0, to, message_of(1, 4));
    ASSERT_TRUE(next(to));
    expect_sent(to, 0, message_of(1, 4));
    ASSERT_TRUE(next(0));
  }
  workers_[1].reset();
  const auto event = next(0);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->what, Event::What::kLost);
  EXPECT_EQ(event->from, 1);
  EXPECT_EQ(event->cause, "its connection ended");
  const auto failure = at(0).send(1, message_of(2, 4), patience());
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, ErrorKind::kPeerLost);
  ASSERT_TRUE(failure->peer);
  EXPECT_EQ(failure->peer->rank, 1);
  // The others go on, and no second loss comes.
  expect_sent(2, 0, message_of(3, 4));
  const auto next_one = next(0);
  ASSERT_TRUE(next_one);
  EXPECT_EQ(next_one->message.id, 3u);
  EXPECT_FALSE(at(0).poll());
}

TEST_P(TransportContract, ARemovedPeersEndIsNotALossAndSendingToItFails) {
  start(3);
  expect_sent(1, 0, message_of(1, 4));
  ASSERT_TRUE(next(0));
  expect_sent(0, 1, message_of(1, 4));
  ASSERT_TRUE(next(1));
  at(0).remove_peer(1);
  const auto failure = at(0).send(1, message_of(2, 4), patience());
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, ErrorKind::kPeerLost);
  workers_[1].reset();
  expect_sent(2, 0, message_of(3, 4));
  const auto event = next(0);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->from, 2);
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(at(0).poll());
}

TEST_P(TransportContract, ClosingSendsWhatIsQueuedFirst) {
  start(2);
  constexpr std::uint64_t kCount = 3'000;
  for (std::uint64_t id = 0; id < kCount; ++id) expect_sent(0, 1, message_of(id, 300));
  auto closer = std::async(std::launch::async, [&] { at(0).close(patience()); });
  for (std::uint64_t id = 0; id < kCount; ++id) {
    const auto event = next_event(at(1));
    ASSERT_TRUE(event);
    ASSERT_EQ(event->what, Event::What::kMessage) << event->cause << " after " << id;
    ASSERT_TRUE(is_message(event->message, id, 300));
  }
  closer.get();
  EXPECT_TRUE(at(0).send(1, message_of(1, 1), patience()));
  EXPECT_FALSE(at(0).poll());
}

TEST_P(TransportContract, ManyThreadsSendAndPollAtOnceAndEveryMessageComesOnce) {
  constexpr int kSenders = 4, kPollers = 3;
  constexpr std::uint64_t kEach = 2'000;
  start(kSenders + 1);
  std::vector<std::future<void>> running;
  for (int i = 1; i <= kSenders; ++i) {
    for (const std::uint64_t half : {0, 1}) {
      running.push_back(std::async(std::launch::async, [this, i, half] {
        for (std::uint64_t n = half; n < kEach; n += 2) {
          expect_sent(i, 0,
                      message_of(static_cast<std::uint64_t>(i) << 32 | n, n % 300,
                                 n % 100 == 0 ? std::vector<std::size_t>{5000} : std::vector<std::size_t>{}));
          at(i).poll();
        }
      }));
    }
  }
  std::mutex mutex;
  std::set<std::uint64_t> came;
  std::atomic<bool> done{false};
  const Deadline deadline = patience();
  for (int i = 0; i < kPollers; ++i) {
    running.push_back(std::async(std::launch::async, [&] {
      while (!done && !deadline.expired()) {
        auto event = at(0).poll();
        for (int j = 1; j <= kSenders; ++j) at(j).poll();
        if (!event) continue;
        const std::uint64_t id = event->message.id, n = id & 0xffffffff;
        EXPECT_EQ(event->from, id >> 32);
        EXPECT_EQ(event->message.body.bytes.size(), n % 300);
        const std::lock_guard lock(mutex);
        EXPECT_TRUE(came.insert(id).second) << id;
        if (came.size() == kEach * kSenders) done = true;
      }
    }));
  }
  for (auto& one : running) one.get();
  EXPECT_EQ(came.size(), kEach * kSenders);
}

TEST_P(TransportContract, EveryoneTalksToEveryone) {
  constexpr int kWorkers = 8;
  start(kWorkers);
  std::vector<std::future<void>> running;
  for (int i = 0; i < kWorkers; ++i) {
    running.push_back(std::async(std::launch::async, [this, i] {
      for (int round = 0; round < 20; ++round) {
        for (int j = 0; j < kWorkers; ++j) {
          expect_sent(
              i, j,
              message_of(static_cast<std::uint64_t>(round), 10, {static_cast<std::size_t>(round) * 500}));
        }
        std::map<int, int> heard;
        for (int n = 0; n < kWorkers; ++n) {
          const auto event = next_event(at(i));
          ASSERT_TRUE(event);
          ASSERT_EQ(event->what, Event::What::kMessage) << event->cause;
          ++heard[event->from];
        }
      }
    }));
  }
  for (auto& one : running) one.get();
}

}  // namespace
}  // namespace lockstep::transport
