// RRefs through real agents, with messages that overtake each other: whatever the order, nothing ends early,
// nothing leaks, nothing hangs. (rref_table_test.cpp does the same to the bookkeeping alone, with repeated
// messages.)
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "lockstep/base/long_testing.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using testing::run_workers;
using testing::Workers;
using testing::WorkersOptions;

// Under sanitizers each takes ten times as long.
const std::uint64_t kSchedules = long_testing::enabled() ? 1000 : 200;

std::atomic<int> n_alive{0};

struct Thing {
  explicit Thing(int number_) : number(number_) { ++n_alive; }
  ~Thing() {
    number = -1;
    --n_alive;
  }
  Thing(const Thing&) = delete;
  Thing& operator=(const Thing&) = delete;
  int look() const { return number; }
  std::atomic<int> number;
};
LOCKSTEP_RPC_CLASS(Thing, int);
LOCKSTEP_RPC_METHOD(&Thing::look);

// A reference, and what it must refer to.
struct Ticket {
  RRef<Thing> thing;
  int number = 0;
};
auto lockstep_fields(SelfOf<Ticket> auto& self) {
  return std::tie(self.thing, self.number);
}

constexpr int kWorkers = 4;
struct Shelf {
  std::mutex mutex;
  std::vector<Ticket> tickets;
};
Shelf shelves[kWorkers];
Shelf& my_shelf() {
  return shelves[current_agent("shelf")->self().id];
}

void put(const std::vector<Ticket>& tickets) {
  auto& shelf = my_shelf();
  const std::lock_guard lock(shelf.mutex);
  for (const auto& ticket : tickets) {
    if (shelf.tickets.size() < 16) shelf.tickets.push_back(ticket);
  }
}
LOCKSTEP_RPC_FUNCTION(put);
Ticket take_any(int which, bool leave) {
  auto& shelf = my_shelf();
  const std::lock_guard lock(shelf.mutex);
  if (shelf.tickets.empty()) return {};
  const auto at = static_cast<std::size_t>(which) % shelf.tickets.size();
  Ticket ticket = shelf.tickets[at];
  if (!leave) shelf.tickets.erase(shelf.tickets.begin() + static_cast<std::ptrdiff_t>(at));
  return ticket;
}
LOCKSTEP_RPC_FUNCTION(take_any);

// One worker's part: random steps, most of which do not wait.
void play(int rank, int n_workers, std::uint64_t seed, int n_steps) {
  std::mt19937_64 random(seed * 31 + static_cast<std::uint64_t>(rank));
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); };
  std::vector<Future<void>> puts;
  for (int step = 0; step < n_steps; ++step) {
    const int number = rank * 10'000 + step;
    const int other = draw(n_workers);
    switch (draw(6)) {
      case 0:
        put({{.thing = RRef<Thing>::of(number), .number = number}});
        break;
      case 1:
        put({{.thing = remote<Thing>(draw(n_workers), Args{number}), .number = number}});
        break;
      case 2:
        take_any(draw(100), false);
        break;
      case 3: {
        const auto ticket = take_any(draw(100), draw(2) == 0);
        puts.push_back(rpc_async(other, put, {{ticket, ticket}}));
        break;
      }
      case 4:
        put({rpc_sync(other, take_any, {draw(100), draw(2) == 0})});
        break;
      default: {
        const auto ticket = take_any(draw(100), true);
        if (ticket.thing.valid()) {
          EXPECT_EQ(ticket.thing.rpc_sync(&Thing::look), ticket.number);
        }
      }
    }
  }
  wait_all(puts);
}

void clear_shelves() {
  for (auto& shelf : shelves) {
    std::vector<Ticket> tickets;
    const std::lock_guard lock(shelf.mutex);
    tickets.swap(shelf.tickets);
  }
}

void expect_nothing_left(Workers& workers) {
  const auto deadline = Deadline::after(30s);
  const auto clean = [&] {
    clear_shelves();  // calls that nobody waited for may still put something there
    return n_alive == 0 && std::ranges::all_of(workers.agents, [](const auto& agent) {
             const auto info = agent->debug_info();
             return rref_manager(*agent).wait_idle(Deadline::now()) && info.at("num_owner_rrefs") == "0" &&
                    info.at("num_users") == "0";
           });
  };
  while (!clean()) {
    if (deadline.expired()) {
      for (const auto& agent : workers.agents) {
        for (const auto& [key, value] : agent->debug_info()) {
          if (key.starts_with("num_")) ADD_FAILURE() << agent->self().name << " " << key << " " << value;
        }
      }
      ADD_FAILURE() << n_alive << " things are left";
      return;
    }
    std::this_thread::sleep_for(200us);
  }
}

void run_schedule(std::uint64_t seed, const transport::InProcessOptions& exchange, int n_steps) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  const int n_workers = 2 + static_cast<int>(seed % 3);
  n_alive = 0;
  run_workers(
      n_workers, [&](int rank, Workers&) { play(rank, n_workers, seed, n_steps); }, {.exchange = exchange},
      expect_nothing_left);
}

TEST(RRefSchedules, LeaveNothingAndEndNothingEarly) {
  for (std::uint64_t seed = 1; seed <= kSchedules && !HasFailure(); ++seed) {
    run_schedule(seed, {.seed = seed, .hold_back = 300}, 20);
  }
}

TEST(RRefSchedules, WithControlMessagesThatAreLostEndAllTheSame) {
  std::atomic<std::uint64_t> n{0};
  const auto lose = [&](WorkerId, WorkerId, const transport::Message& message) {
    const auto kind = static_cast<MessageKind>(message.kind & ~kAnswer);
    const bool control =
        kind == MessageKind::kRRefDelete || kind == MessageKind::kRRefFork || kind == MessageKind::kRRefChild;
    return control && n.fetch_add(1) % 20 == 0;
  };
  for (std::uint64_t seed = 1; seed <= 2 && !HasFailure(); ++seed) {
    run_schedule(seed, {.seed = seed, .hold_back = 100, .lose = lose}, 40);
  }
}

TEST(RRefSchedules, InWhichAWorkerIsKilledReleaseWhatItHad) {
  for (std::uint64_t seed = 1; seed <= kSchedules / 5 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    n_alive = 0;
    run_workers(
        kWorkers,
        [&](int rank, Workers& workers) {
          try {
            play(rank, kWorkers, seed, 15);
            if (rank == 0) {
              workers.exchange->kill(3, "killed by SIGKILL (9)");
              workers.agents[3]->close();  // its threads are still there, and wait for answers
            }
            play(rank, kWorkers, seed + 1000, 15);
          } catch (const Error& error) {
            EXPECT_TRUE(error.kind() == ErrorKind::kPeerLost || rank == 3) << error.what();
          }
        },
        {.exchange = {.seed = seed, .hold_back = 200}},
        [](Workers& workers) {
          workers.agents[3]->close();  // if nobody came to kill it
          workers.agents.pop_back();
          expect_nothing_left(workers);
        });
  }
}

}  // namespace
}  // namespace lockstep::rpc
