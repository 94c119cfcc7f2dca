// Groups whose ranks are real processes, started by spawn: the same API as with threads, and what survivors
// learn when one of them dies.
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collective.h"
#include "lockstep/group/run_main.h"
#include "lockstep/process/spawn.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

// A failed check in a child must end it: GoogleTest's own would stay there unseen.
void require(bool condition, const std::string& what) {
  if (!condition) throw std::logic_error("not so: " + what);
}

at::Tensor value(float number, std::int64_t numel = 3) {
  return at::full({numel}, number);
}

void run_collectives(int rank, int size) {
  require(get_rank() == rank && get_world_size() == size, "rank and size");
  const float total = static_cast<float>(size * (size + 1) / 2);
  for (const std::int64_t numel : {1, 1000, 200'000}) {
    auto ordinary = value(static_cast<float>(rank + 1), numel);
    all_reduce(ordinary);
    require(at::equal(ordinary, value(total, numel)), base::cat("staged all_reduce of ", numel));
    auto shared = empty_shared({numel});
    shared.fill_(static_cast<float>(rank + 1));
    all_reduce(shared, {.async_op = true}).wait();
    require(at::equal(shared, value(total, numel)), base::cat("zero-copy all_reduce of ", numel));
    broadcast(ordinary.fill_(static_cast<float>(rank)), {.src = size - 1});
    require(at::equal(ordinary, value(static_cast<float>(size - 1), numel)), "broadcast");
  }
  auto all = at::full({size, 3}, -1.0f);
  all_gather_into_tensor(all, value(static_cast<float>(rank)));
  for (int r = 0; r < size; ++r) require(at::equal(all[r], value(static_cast<float>(r))), "all_gather");
  auto part = at::full({}, -1.0f);
  reduce_scatter_tensor(part, at::arange(size).to(at::kFloat));
  require(part.item<float>() == static_cast<float>(rank * size), "reduce_scatter");
  barrier();
}

TEST(Processes, RunEveryCollectiveAndEnterAgain) {
  for (const int size : {2, 3}) {
    spawn(size, [size](int rank) {
      at::set_num_threads(1);
      for (int round = 0; round < 2; ++round) {
        init_process_group();
        run_collectives(rank, size);
        destroy_process_group();
      }
    });
  }
}

// Three processes; the last two are also a world of two, over a store that the second one holds.
TEST(Processes, AreInTwoIndependentWorldsAtOnce) {
  spawn(3, [](int rank) {
    at::set_num_threads(1);
    init_process_group();
    const auto jobs = default_group()->store();
    const auto all = create_group({.store = jobs, .rank = 2 - rank, .size = 3, .name = "all"});
    require(get_rank(all) == 2 - rank, "rank in the group");
    if (rank > 0) {
      std::shared_ptr<Store> store;
      if (rank == 1) {
        auto master = TcpStore::open("127.0.0.1", {.port = 0, .is_master = true, .wait_for_workers = false});
        jobs->set("port", std::to_string(master->port()));
        store = std::move(master);
      } else {
        const auto port = static_cast<std::uint16_t>(std::stoi(to_text(jobs->get("port"))));
        store = TcpStore::open("127.0.0.1", {.port = port});
      }
      const auto pair =
          create_group({.store = std::move(store), .rank = rank - 1, .size = 2, .name = "pair"});
      auto sum = value(static_cast<float>(rank), 200'000);
      all_reduce(sum, {.group = pair});
      require(at::equal(sum, value(3, 200'000)), "all_reduce of the pair");
      const auto one = new_group({1}, {.parent = pair});
      require(is_group_member(one) == (rank == 2), "sub-group of the pair");
      destroy_process_group(pair);
    }
    destroy_process_group();  // the default world; the other one stays
    auto sum = value(1);
    all_reduce(sum, {.group = all});
    require(at::equal(sum, value(3)), "all_reduce after the default world was left");
    destroy_process_group(all);
  });
}

TEST(Processes, WhatARankThrowsReachesTheCallerOfSpawn) {
  try {
    spawn(2, [](int rank) {
      init_process_group();
      if (rank == 1) throw std::runtime_error("no more data");
      barrier();
    });
    FAIL();
  } catch (const SpawnError& error) {
    EXPECT_EQ(error.index(), 1);
    EXPECT_NE(std::string(error.what()).find("no more data"), std::string::npos) << error.what();
  }
}

// What the processes write to stderr during `run`.
std::string stderr_of(const std::function<void()>& run) {
  int ends[2];
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  base::Fd reader(ends[0]), writer(ends[1]);
  const base::Fd before(::fcntl(2, F_DUPFD_CLOEXEC, 3));
  ::dup2(writer.get(), 2);
  writer.reset();
  run();
  ::dup2(before.get(), 2);
  std::string text;
  char part[4096];
  for (ssize_t n = 0; (n = ::read(reader.get(), part, sizeof part)) > 0;)
    text.append(part, static_cast<std::size_t>(n));
  return text;
}

TEST(RunMain, AnUncaughtExceptionIsALineWithTheRankAndTheOthersReceiveIt) {
  const auto said = stderr_of([] {
    try {
      spawn(2, [](int rank) {
        ::signal(SIGTERM, SIG_IGN);
        const int code = run_main(
            [](int me) {
              init_process_group();
              if (me == 1) throw std::runtime_error("no more data\nin shard 7");
              barrier();
            },
            rank);
        ::_exit(code + 10 * rank);
      });
      ADD_FAILURE() << "nothing failed";
    } catch (const SpawnError& error) {
      EXPECT_EQ(error.index(), 1);
      EXPECT_EQ(error.exit_code(), 11);
    }
  });
  EXPECT_NE(said.find("[rank1]: std::runtime_error: no more data\n[rank1]: in shard 7\n"), std::string::npos)
      << said;
  EXPECT_NE(said.find("[rank0]: lockstep::DistBackendError: barrier "), std::string::npos) << said;
  EXPECT_NE(said.find("is gone: threw: no more data\n[rank0]: in shard 7"), std::string::npos) << said;
}

TEST(RunMain, GivesWhatTheFunctionReturns) {
  EXPECT_EQ(run_main([](int code, const std::string&) { return code; }, 3, "text"), 3);
  EXPECT_EQ(run_main([] {}), 0);
}

// What spawned processes have to say to this one.
class Words {
 public:
  Words() {
    int ends[2];
    require(::pipe2(ends, O_CLOEXEC) == 0, "pipe");
    reader_ = base::Fd(ends[0]);
    writer_ = base::Fd(ends[1]);
  }
  // A line, in one piece.
  void say(const std::string& line) const {
    require(::write(writer_.get(), line.data(), line.size()) > 0, "write");
  }
  // Once, after the processes have ended.
  std::string heard() {
    writer_.reset();
    std::string text(4096, '\0');
    const auto n = ::read(reader_.get(), text.data(), text.size());
    text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return text;
  }

 private:
  base::Fd reader_, writer_;
};

// The errors of the survivors of rank 1's death, a line each.
std::string last_words(int size, const std::function<void()>& die) {
  Words words;
  EXPECT_THROW(spawn(size,
                     [&](int rank) {
                       ::signal(SIGTERM,
                                SIG_IGN);  // spawn stops survivors; these have something to say first
                       init_process_group();
                       auto tensor = at::ones({1000});
                       for (int step = 0;; ++step) {
                         if (rank == 1 && step == 20) die();
                         try {
                           all_reduce(tensor, {.async_op = rank == 2});
                           barrier();
                         } catch (const Error& error) {
                           const auto lost = error.peer().value_or(LostPeer{});
                           return words.say(base::cat(to_string(error.kind()), " rank ",
                                                      lost.rank.value_or(-1), ": ", lost.cause, "\n"));
                         }
                       }
                     }),
               SpawnError);
  return words.heard();
}

TEST(Processes, SurvivorsLearnWhoDiedAndHow) {
  const auto killed = last_words(3, [] { ::raise(SIGKILL); });
  EXPECT_EQ(killed, "peer_lost rank 1: killed by SIGKILL (9)\npeer_lost rank 1: killed by SIGKILL (9)\n");
  const auto exited = last_words(2, [] { ::_exit(7); });
  EXPECT_EQ(exited, "peer_lost rank 1: exited with code 7\n");
}

// Rank 0 dies. Rank 1 learns so in the world and ends in some way; rank 2, in a group with rank 1 only, waits
// for that one. The error of rank 2.
std::string words_behind(const std::function<void()>& end) {
  Words words;
  EXPECT_THROW(spawn(3,
                     [&](int rank) {
                       ::signal(SIGTERM, SIG_IGN);
                       init_process_group();
                       const auto pair = new_group({1, 2});
                       if (rank == 0) ::raise(SIGKILL);
                       try {
                         barrier({.group = rank == 1 ? Group{} : pair});
                       } catch (const Error& error) {
                         if (rank == 1) return end();
                         words.say(base::cat(error.peer().value_or(LostPeer{}).cause, "\n"));
                       }
                     }),
               SpawnError);
  return words.heard();
}

TEST(Processes, ASurvivorThatLeavesPassesTheFirstCauseOn) {
  const auto told = words_behind([] { destroy_process_group(); });
  EXPECT_EQ(told.rfind("it lost rank 0 of the world (pid ", 0), 0u) << told;
  EXPECT_NE(told.find("): killed by SIGKILL (9)"), std::string::npos) << told;
}

TEST(Processes, ASurvivorThatDiesOfALossLeavesItsErrorBehind) {
  const auto told = words_behind([] { ::_exit(5); });
  EXPECT_EQ(told.rfind("exited with code 5; its last error: barrier ", 0), 0u) << told;
  EXPECT_NE(told.find("killed by SIGKILL (9)"), std::string::npos) << told;
}

TEST(Processes, MakeSubGroupsThatDoNotWaitForEachOther) {
  spawn(3, [](int rank) {
    at::set_num_threads(1);
    init_process_group();
    const auto low = new_group({0, 1}), high = new_group({1, 2});
    const auto local = new_group({rank});
    for (int round = 0; round < 20; ++round) {
      auto a = value(1), b = value(2), c = value(3);
      std::vector<Work> works;
      if (rank < 2) works.push_back(all_reduce(a, {.group = low, .async_op = true}));
      if (rank > 0) works.push_back(all_reduce(b, {.group = high, .async_op = true}));
      all_reduce(c);
      for (const auto& work : works) work.wait();
      require(at::equal(c, value(9)), "the world's sum");
      require(rank == 2 || at::equal(a, value(2)), "the low sum");
      require(rank == 0 || at::equal(b, value(4)), "the high sum");
    }
    require(local->size() == 1 && local->ranks().front() == rank, "a group of one");
    monitored_barrier();
    destroy_process_group();
  });
}

TEST(Processes, GoOnWithoutARankThatWasKilled) {
  Words words;
  const auto body = [&](int rank) {
    ::signal(SIGTERM, SIG_IGN);
    init_process_group();
    const auto group = new_group();
    try {
      for (int step = 0;; ++step) {
        if (rank == 1 && step == 20) ::raise(SIGKILL);
        all_reduce(value(1), {.group = group});
      }
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::kPeerLost, error.what());
      require(error.peer() && error.peer()->rank == 1, error.what());
    }
    shrink_group({1}, {.abort = true});
    require(get_world_size() == 2 && get_rank() == rank / 2, "renumbered");
    auto sum = value(static_cast<float>(rank));
    all_reduce(sum);
    require(at::equal(sum, value(2)), "the survivors' sum");
    require(new_group({1, 0})->size() == 2, "a group of survivors");
    words.say("+");
  };
  EXPECT_THROW(spawn(3, body), SpawnError);
  EXPECT_EQ(words.heard(), "++");
}

}  // namespace
}  // namespace lockstep
