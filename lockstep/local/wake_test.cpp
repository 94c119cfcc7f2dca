// That a sleeper and a waker never miss each other, between threads and between processes: both sides of the
// race in many rounds, each round ended by the other's word alone.
#include "lockstep/local/wake.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <thread>
#include <vector>

#include "lockstep/base/fork_testing.h"

namespace lockstep::local {
namespace {

using fork_testing::Children;
using fork_testing::Shared;

Deadline patience() {
  return Deadline::after(fork_testing::kPatience);
}

constexpr std::uint32_t kRounds = 1000;

// Each side waits until the other has said a number, asleep as soon as it has not; a missed wake-up would
// last until the deadline.
struct Match {
  Doorbell doors[2];
  std::atomic<std::uint32_t> said[2];

  bool play(int me) {
    const int other = 1 - me;
    for (std::uint32_t round = 1; round <= kRounds; ++round) {
      said[me].store(round, std::memory_order_seq_cst);
      wake(doors[other]);
      while (said[other].load(std::memory_order_acquire) < round) {
        const std::uint32_t ticket = announce(doors[me]);
        const bool there = said[other].load(std::memory_order_seq_cst) >= round;
        const Deadline until = patience();
        if (!there) sleep(doors[me], ticket, until);
        retract(doors[me]);
        if (until.expired()) return false;
      }
    }
    return true;
  }
};

TEST(Doorbell, ThreadsThatWaitForEachOtherNeverMissAWakeUp) {
  Match match{};
  std::thread other([&] { EXPECT_TRUE(match.play(1)); });
  EXPECT_TRUE(match.play(0));
  other.join();
  EXPECT_EQ(match.doors[0].sleepers, 0u);
}

TEST(Doorbell, ProcessesThatWaitForEachOtherNeverMissAWakeUp) {
  const Shared<Match> match;
  Children children;
  children.start([&] { CHILD_EXPECT(match->play(1), "slept until the deadline"); });
  EXPECT_TRUE(match->play(0));
  EXPECT_EQ(children.status(0), 0);
}

TEST(Doorbell, WakingWithoutASleeperRingsNothing) {
  Doorbell door{};
  EXPECT_FALSE(wake(door));
  EXPECT_EQ(door.bell, 0u);
  const std::uint32_t ticket = announce(door);
  EXPECT_TRUE(wake(door));
  sleep(door, ticket, patience());  // returns at once: the bell rang after the ticket was drawn
  retract(door);
  EXPECT_FALSE(wake(door));
}

TEST(Doorbell, AllSleepersAreWokenByOneRing) {
  Doorbell door{};
  std::atomic<bool> go{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (!go.load(std::memory_order_acquire)) {
        const std::uint32_t ticket = announce(door);
        if (!go.load(std::memory_order_seq_cst)) sleep(door, ticket, patience());
        retract(door);
      }
    });
  }
  EXPECT_TRUE(fork_testing::eventually([&] { return door.sleepers == 4; }));
  go.store(true, std::memory_order_seq_cst);
  EXPECT_TRUE(wake(door));
  for (auto& thread : threads) thread.join();
}

TEST(Doorbell, ASleeperThatWasKilledCostsWakersNothingButTheRing) {
  const Shared<Doorbell> door;
  Children children;
  children.start([&] { sleep(*door, announce(*door), patience()); });
  EXPECT_TRUE(fork_testing::eventually([&] { return door->sleepers == 1; }));
  children.kill(0);
  children.status(0);
  EXPECT_TRUE(wake(*door)) << "nobody took its announcement back";
}

TEST(EventBell, OneOfManyWakersRings) {
  std::atomic<std::uint32_t> asleep{0};
  const base::Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const EventBell bell{.asleep = asleep, .eventfd = fd.get()};
  wake(bell);
  std::uint64_t rung = 0;
  EXPECT_LT(::read(fd.get(), &rung, sizeof rung), 0) << "nobody slept";
  announce(bell);
  std::vector<std::thread> wakers;
  for (int i = 0; i < 4; ++i) wakers.emplace_back([&] { wake(bell); });
  for (auto& waker : wakers) waker.join();
  EXPECT_EQ(::read(fd.get(), &rung, sizeof rung), static_cast<ssize_t>(sizeof rung));
  EXPECT_EQ(rung, 1u);
  announce(bell);
  retract(bell);
  wake(bell);
  EXPECT_LT(::read(fd.get(), &rung, sizeof rung), 0);
}

TEST(EventBell, ASleeperInPollNeverMissesAWakeUp) {
  std::atomic<std::uint32_t> asleep{0}, said{0}, heard{0};
  const base::Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const EventBell bell{.asleep = asleep, .eventfd = fd.get()};
  std::thread waker([&] {
    for (std::uint32_t round = 1; round <= kRounds; ++round) {
      said.store(round, std::memory_order_seq_cst);
      wake(bell);
      while (heard.load(std::memory_order_acquire) < round) std::this_thread::yield();
    }
  });
  for (std::uint32_t round = 1; round <= kRounds; ++round) {
    while (said.load(std::memory_order_acquire) < round) {
      announce(bell);
      pollfd ask{.fd = fd.get(), .events = POLLIN, .revents = 0};
      const bool there = said.load(std::memory_order_seq_cst) >= round;
      const int n = there ? 1 : ::poll(&ask, 1, static_cast<int>(fork_testing::kPatience.count()));
      retract(bell);
      ASSERT_NE(n, 0) << "slept until the deadline";
      std::uint64_t rung = 0;
      [[maybe_unused]] const auto got = ::read(fd.get(), &rung, sizeof rung);
    }
    heard.store(round, std::memory_order_release);
  }
  waker.join();
}

}  // namespace
}  // namespace lockstep::local
