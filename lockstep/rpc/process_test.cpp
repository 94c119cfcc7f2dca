// Workers that are real processes: calls through shared memory and TCP, many of them, and what survivors
// learn when one is killed.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <random>
#include <thread>

#include "lockstep/base/long_testing.h"
#include "lockstep/rpc/process_testing.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using namespace testing;

std::vector<double> scaled(std::vector<double> values, double factor) {
  for (auto& value : values) value *= factor;
  return values;
}
LOCKSTEP_RPC_FUNCTION(scaled, "process_test.scaled");

int self_id() {
  return current_agent("test")->self().id;
}
LOCKSTEP_RPC_FUNCTION(self_id, "process_test.self_id");

// From worker to worker, `n` times.
int bounce(int n, int world, unsigned seed) {
  if (n == 0) return 0;
  std::mt19937 random(seed);
  const int next = static_cast<int>(random() % static_cast<unsigned>(world));
  return 1 + rpc_sync(next, bounce, {n - 1, world, static_cast<unsigned>(random())});
}
LOCKSTEP_RPC_FUNCTION(bounce, "process_test.bounce");

void hold(int ms) {
  std::this_thread::sleep_for(Milliseconds(ms));
}
LOCKSTEP_RPC_FUNCTION(hold, "process_test.hold");

// Lives where it was made; others keep references to it.
class Counter {
 public:
  explicit Counter(int start) : value_(start) {}
  int add(int n) {
    const std::lock_guard lock(mutex_);
    return value_ += n;
  }

 private:
  std::mutex mutex_;
  int value_;
};
LOCKSTEP_RPC_CLASS(Counter, int);
LOCKSTEP_RPC_METHOD(&Counter::add, "process_test.Counter.add");

// References that this process holds, and lets go of at random.
struct Shelf {
  std::mutex mutex;
  std::vector<RRef<Counter>> counters;
};
Shelf& shelf() {
  static Shelf here;
  return here;
}

void keep(const RRef<Counter>& counter) {
  RRef<Counter> old;
  const std::lock_guard lock(shelf().mutex);
  if (shelf().counters.size() < 8) {
    shelf().counters.push_back(counter);
  } else {
    old = std::exchange(shelf().counters[counter.id() % 8], counter);
  }
}
LOCKSTEP_RPC_FUNCTION(keep, "process_test.keep");

RRef<Counter> take_one() {
  const std::lock_guard lock(shelf().mutex);
  return shelf().counters.empty() ? RRef<Counter>() : shelf().counters.back();
}
LOCKSTEP_RPC_FUNCTION(take_one, "process_test.take_one");

// Makes, passes on, uses and drops references, to and from anyone.
void juggle(std::mt19937& random, int world) {
  const auto someone = [&] { return static_cast<int>(random() % static_cast<unsigned>(world)); };
  switch (random() % 4) {
    case 0:
      keep(remote<Counter>(someone(), Args{static_cast<int>(random() % 100)}));
      break;
    case 1: {
      auto counter = remote<Counter>(someone(), Args{1});
      rpc_sync(someone(), keep, {counter});
      require(counter.rpc_sync(&Counter::add, {2}) >= 3, "a counter that only grows");
      break;
    }
    case 2:
      if (const auto counter = rpc_sync(someone(), take_one); counter.valid()) {
        rpc_sync(someone(), keep, {counter});
        counter.rpc_sync(&Counter::add, {1});
      }
      break;
    default: {
      std::vector<RRef<Counter>> old;
      const std::lock_guard lock(shelf().mutex);
      old.swap(shelf().counters);
    }
  }
}

void call_everyone(int world) {
  for (int to = 0; to < world; ++to) {
    require(rpc_sync(to, self_id) == to, "it is who was called");
    for (const std::size_t n : {1u, 1000u, 200'000u, 2'000'000u}) {
      if (long_testing::kUnderTsan && n > 200'000) continue;
      const auto back = rpc_sync(to, scaled, {std::vector<double>(n, 1.5), 2.0});
      require(back.size() == n && back.front() == 3.0 && back.back() == 3.0, "the values");
    }
  }
}

TEST(Processes, CallEachOtherThroughSharedMemory) {
  Children workers(3, [](int, Board&) {
    call_everyone(3);
    shutdown();
  });
  workers.expect_end();
}

TEST(Processes, CallEachOtherOverTcp) {
  Children workers(3,
                   [](int, Board&) {
                     call_everyone(3);
                     shutdown();
                   },
                   {.tcp_only = true});
  workers.expect_end();
}

TEST(Processes, ShareReferencesAndLeakNone) {
  Children workers(4, [](int rank, Board&) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int i = 0; i < 300; ++i) juggle(random, 4);
    shutdown();
  });
  workers.expect_end();
}

TEST(Processes, CanBeMany) {
  constexpr int kMany = long_testing::kUnderTsan ? 16 : 64;
  Children workers(kMany, [](int rank, Board&) {
    std::vector<Future<int>> calls;
    for (int to = 0; to < kMany; ++to) calls.push_back(rpc_async(to, self_id));
    for (int to = 0; to < kMany; ++to)
      require(calls[static_cast<std::size_t>(to)].wait() == to, "it is who was called");
    require(rpc_sync((rank + 1) % kMany, bounce, {20, kMany, static_cast<unsigned>(rank)}) == 20, "bounced");
    shutdown();
  });
  workers.expect_end();
}

// Calls others at random until the victim's death shows, then a little longer.
void call_until_loss(int rank, int world, int victim, unsigned seed, Board& board) {
  std::mt19937 random(seed + static_cast<unsigned>(rank));
  const std::string name = "worker" + std::to_string(victim);
  int n_after = 0;
  bool noticed = false;
  while (n_after < 50) {
    const int to = static_cast<int>(random() % static_cast<unsigned>(world));
    try {
      switch (random() % 6) {
        case 4:
        case 5:
          juggle(random, world);
          break;
        case 0:
          rpc_sync(to, bounce, {static_cast<int>(random() % 6), world, static_cast<unsigned>(random())});
          break;
        case 1:
          rpc_sync(to, scaled, {std::vector<double>(random() % 100'000, 1.0), 2.0});
          break;
        case 2: {
          std::vector<Future<void>> calls;
          for (int i = 0; i < 10; ++i)
            calls.push_back(rpc_async(victim, hold, {static_cast<int>(random() % 3)}));
          wait_all(calls);
          break;
        }
        default:
          require(rpc_sync(to, self_id) == to, "it is who was called");
      }
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::kPeerLost, std::string("lost, not ") + error.what());
      const std::string text = error.what();
      require(text.find(name) != std::string::npos, "it is named: " + text);
      if (!noticed) board.noticed_at_ns[rank] = now_ns();
      noticed = true;
    }
    if (noticed) ++n_after;
  }
}

// Nothing of a dead worker is kept for it.
void check_released() {
  const Deadline deadline = Deadline::after(Milliseconds(60'000));
  {
    std::vector<RRef<Counter>> old;
    const std::lock_guard lock(shelf().mutex);
    old.swap(shelf().counters);
  }
  while (!deadline.expired()) {
    const auto info = get_debug_info();
    if (info.at("num_pending_users") == "0" && info.at("num_pending_futures") == "0") return;
    std::this_thread::sleep_for(1ms);
  }
  require(false, "pending RRefs end");
}

void kill_rounds(bool tcp_only) {
  constexpr int kWorld = 4;
  std::mt19937 random(7);
  std::int64_t slowest = 0;
  for (int round = 0; round < (long_testing::kUnderTsan ? 3 : 8); ++round) {
    const int victim = static_cast<int>(random() % kWorld);
    const auto seed = static_cast<unsigned>(random());
    const auto pause = 1000 + random() % 60'000;
    Children workers(kWorld,
                     [&](int rank, Board& board) {
                       call_until_loss(rank, kWorld, victim, seed, board);
                       check_released();
                       shutdown();
                     },
                     {.tcp_only = tcp_only});
    workers.await_ready();
    ::usleep(static_cast<useconds_t>(pause));
    workers.kill(victim);
    workers.expect_end({victim});
    for (int rank = 0; rank < kWorld; ++rank) {
      if (rank == victim) continue;
      ASSERT_NE(workers.board().noticed_at_ns[rank], 0) << "worker " << rank << " never noticed";
      slowest = std::max(slowest, workers.board().noticed_at_ns[rank] - workers.board().killed_at_ns);
    }
  }
  std::printf("the slowest survivor knew after %.1f ms\n", static_cast<double>(slowest) * 1e-6);
}

TEST(Processes, SurviveTheDeathOfOneAndNameIt) {
  kill_rounds(false);
}
TEST(Processes, SurviveTheDeathOfOneOverTcpAndNameIt) {
  kill_rounds(true);
}

TEST(Processes, LeaveWhenTheirLeaderIsKilledWhileTheyWaitForIt) {
  Children workers(4, [](int rank, Board& board) {
    if (rank == 0) {  // the smallest name
      await([] { return get_debug_info().at("agent.num_leaving") == "3"; });
      board.counters[0] = 1;
      wait_for_death();
    }
    shutdown();
  });
  workers.await(workers.board().counters[0], 1);
  workers.kill(0);
  workers.expect_end({0});
}

// Outlives the agent when the program ends.
RRef<Counter>* const kept_to_the_end = new RRef<Counter>;

void exit_without_shutdown(const ChildrenOptions& options) {
  Children workers(
      3,
      [](int rank, Board& board) {
        await([&] { return board.n_ready == 3; });
        if (rank == 2) {
          *kept_to_the_end = remote<Counter>("worker0", Args{1});
          keep(remote<Counter>("worker1", Args{1}));
          keep(RRef<Counter>::of(1));
          rpc_sync("worker0", keep, {take_one()});
          const auto pending = rpc_async("worker1", hold, {300});
          std::exit(0);  // with everything that the program's end does
        }
        for (bool gone = false; !gone;) {
          try {
            rpc_sync("worker2", hold, {1});
          } catch (const Error& error) {
            gone = error.kind() == ErrorKind::kPeerLost;
            // What it had not begun to run it hands back.
            require(gone || error.kind() == ErrorKind::kAborted, error.what());
          }
        }
        check_released();
        shutdown();
      },
      options);
  workers.expect_end();
}

TEST(Processes, MayExitWithoutShutdown) {
  exit_without_shutdown({});
}
TEST(Processes, OfADynamicGroupMayExitWithoutShutdown) {
  exit_without_shutdown({.change = [](RpcOptions& options) {
    options.membership = Membership::kDynamic, options.world_size.reset();
  }});
}

// Everyone knows the same three, and they answer.
void check_view() {
  std::vector<std::string> names;
  for (const auto& worker : get_worker_infos()) {
    names.push_back(worker.name);
    require(rpc_sync(worker.name, self_id) == worker.id, "it is who was called");
  }
  std::ranges::sort(names);
  require(names == std::vector<std::string>{"worker0", "worker1", "worker2"}, "the three of them");
}

// Worker 2 is killed and comes back.
void come_back(bool same_number) {
  enum : std::size_t { kKnown, kBack, kChecked };
  const auto newcomer = [=](int, Board& board) {
    require((get_worker_info().id == 2) == same_number, "its number");
    board.counters[kBack] = get_worker_info().id;
    check_view();
    ++board.counters[kChecked];
    await([&] { return board.counters[kChecked] == 3; });
    shutdown();
  };
  Children workers(3,
                   [](int rank, Board& board) {
                     await([&] { return board.n_ready == 3; });
                     if (rank == 2) wait_for_death();
                     RRef<Counter> lost;
                     if (rank == 0) {  // worker 1 never talks to it
                       lost = remote<Counter>("worker2", Args{5});
                       require(lost.rpc_sync(&Counter::add, {1}) == 6, "it lives there");
                     }
                     ++board.counters[kKnown];
                     await([&] { return board.counters[kBack] != 0; });
                     require(get_worker_info("worker2").id == board.counters[kBack], "the new one");
                     check_view();
                     if (rank == 0) expect_gone([&] { lost.rpc_sync(&Counter::add, {1}); });
                     auto other = remote<Counter>("worker2", Args{7});
                     require(other.rpc_sync(&Counter::add, {1}) == 8, "a new one there");
                     other = {};
                     ++board.counters[kChecked];
                     await([&] { return board.counters[kChecked] == 3; });
                     shutdown();
                   },
                   {.change = [=](RpcOptions& options) {
                     options.membership = Membership::kDynamic, options.world_size.reset();
                     if (!same_number) options.rank.reset();
                   }});
  workers.await(workers.board().counters[kKnown], 2);
  workers.kill(2);
  workers.start_again(2, newcomer);
  workers.expect_end();
}

TEST(Processes, OfADynamicGroupMayComeBackUnderTheirNameAfterTheyWereKilled) {
  come_back(false);
}
TEST(Processes, OfADynamicGroupMayComeBackUnderTheirNumberAfterTheyWereKilled) {
  come_back(true);
}

TEST(Processes, AStoppedWorkerIsATimeoutAndNotADeath) {
  Children workers(2, [](int rank, Board& board) {
    if (rank == 0) {
      while (board.counters[0] == 0) std::this_thread::sleep_for(1ms);
      try {
        rpc_sync(1, self_id, {}, {.timeout = 200ms});
        require(false, "it is stopped");
      } catch (const Error& error) {
        require(error.kind() == ErrorKind::kTimeout, error.what());
      }
      board.counters[1] = 1;
    }
    shutdown();
  });
  workers.await_ready();
  workers.stop(1);
  workers.board().counters[0] = 1;
  while (workers.board().counters[1] == 0) ::usleep(500);
  workers.go_on(1);
  workers.expect_end();
}

}  // namespace
}  // namespace lockstep::rpc
