// Entering and leaving RPC groups, workers as threads over a store.
#include "lockstep/rpc/rpc.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/rpc/rpc_testing.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/store/tcp_store.h"
#include "lockstep/transport/in_process_transport.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using testing::caught;
using testing::says;
using testing::until;

int twice(int a) {
  return 2 * a;
}
LOCKSTEP_RPC_FUNCTION(twice);

void nap(int ms) {
  std::this_thread::sleep_for(Milliseconds(ms));
}
LOCKSTEP_RPC_FUNCTION(nap);

std::string n_active_here() {
  return get_debug_info().at("agent.server_active_calls");
}
LOCKSTEP_RPC_FUNCTION(n_active_here);

std::string stop_here() {
  try {
    shutdown();
    return "no error";
  } catch (const Error& error) {
    return error.what();
  }
}
LOCKSTEP_RPC_FUNCTION(stop_here);

// Each thread is a rank; throws again what the first one threw.
void as_ranks(int n, const std::function<void(int, std::shared_ptr<Store>)>& fn) {
  const auto store = std::make_shared<HashStore>();
  std::mutex mutex;
  std::exception_ptr first;
  {
    std::vector<base::Thread> threads;
    for (int rank = 0; rank < n; ++rank) {
      threads.emplace_back("rank " + std::to_string(rank), [&, rank] {
        base::RankThread self;
        const base::RankThreadScope scope(&self);
        try {
          fn(rank, store->clone());
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
      });
    }
  }
  if (first) std::rethrow_exception(first);
}

std::string name_of(int rank) {
  return "worker" + std::to_string(rank);
}
RpcOptions at(int rank, int n, std::shared_ptr<Store> store) {
  return {.rank = rank, .world_size = n, .store = std::move(store), .init_timeout = 60s};
}

TEST(Rpc, MeetsUnderAPrefixOfItsOwnEachTime) {
  as_ranks(2, [](int rank, const auto& store) {
    for (int round = 0; round < 2; ++round) {
      start(name_of(rank), at(rank, 2, store));
      const auto keys = store->list_keys();
      const std::string prefix = "rpc_prefix_" + std::to_string(round) + "/";
      const bool found =
          std::any_of(keys.begin(), keys.end(), [&](const auto& key) { return key.starts_with(prefix); });
      EXPECT_TRUE(found) << prefix;
      shutdown();
    }
  });
}

TEST(Rpc, WorkersMeetCallAndLeaveSeveralTimes) {
  as_ranks(4, [](int rank, const auto& store) {
    for (int round = 0; round < 3; ++round) {
      start(name_of(rank), at(rank, 4, store));
      EXPECT_EQ(get_worker_info(), (WorkerInfo{.id = static_cast<WorkerId>(rank), .name = name_of(rank)}));
      EXPECT_EQ(get_worker_info("worker2").id, 2);
      EXPECT_EQ(get_worker_infos().size(), 4u);
      for (int to = 0; to < 4; ++to) EXPECT_EQ(rpc_sync(name_of(to), twice, {to + round}), 2 * (to + round));
      shutdown();
      EXPECT_FALSE(is_initialized());
      EXPECT_TRUE(says(caught([] { rpc_sync(0, twice, {1}); }), "not initialised"));
    }
  });
}

TEST(Rpc, ASecondInitIsRefused) {
  as_ranks(1, [](int rank, const auto& store) {
    start("alone", at(rank, 1, store));
    EXPECT_TRUE(says(caught([&] { start("again", at(rank, 1, store)); }), "called before"));
    EXPECT_EQ(rpc_sync("alone", twice, {4}), 8);
    shutdown();
  });
}

TEST(Rpc, WithoutANameAWorkerIsNamedByItsRank) {
  as_ranks(2, [](int rank, const auto& store) {
    start(at(rank, 2, store));
    EXPECT_EQ(get_worker_info().name, "worker" + std::to_string(rank));
    EXPECT_EQ(rpc_sync("worker" + std::to_string(1 - rank), twice, {4}), 8);
    shutdown();
  });
}

TEST(Rpc, NeedsNothingButTheLaunchersEnvironment) {
  const std::map<const char*, const char*> launcher{
      {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "0"}};
  for (const auto& [name, value] : launcher) ::setenv(name, value, 1);
  start();
  for (const auto& [name, value] : launcher) ::unsetenv(name);
  EXPECT_EQ(get_worker_info().name, "worker0");
  EXPECT_EQ(rpc_sync("worker0", twice, {4}), 8);
  shutdown();
}

TEST(Rpc, BadNamesAndOptionsAreRefused) {
  as_ranks(1, [](int, const auto& store) {
    for (const auto& name : {std::string(""), std::string("a b"), std::string("ä"), std::string(128, 'x')}) {
      EXPECT_TRUE(says(caught([&] { start(name, at(0, 1, store)); }), "not a valid worker name")) << name;
    }
    const auto refused = [&](const auto& change, const std::string& part) {
      auto options = at(0, 1, store);
      change(options);
      const auto failure = caught([&] { start("w", options); });
      EXPECT_TRUE(says(failure, part)) << failure.message;
    };
    refused([](auto& o) { o.num_worker_threads = 0; }, "num_worker_threads");
    refused([](auto& o) { o.rpc_timeout = Milliseconds(-1); }, "rpc_timeout");
    refused([](auto& o) { o.init_method = "env://"; }, "not both");
    refused([](auto& o) { o.rank.reset(); }, "rank and world_size");
    refused([](auto& o) { o.world_size.reset(); }, "rank and world_size");
    refused([](auto& o) { o.rank = -1; }, "rank -1 is not in 0 to 65535");
    refused([](auto& o) { o.membership = Membership::kDynamic; }, "has no world_size");
    refused([](auto& o) { o.init_timeout = Milliseconds(0); }, "init_timeout");
    refused([](auto& o) { o.rank = 5; }, "rank 5 in a world of 1");
    refused([](auto& o) { o.rank = 65'536, o.world_size = 70'000; }, "rank 65536 is not in 0 to 65535");
    refused([](auto& o) { o.backend = "pigeon"; }, "pigeon");
    refused([](auto& o) { o.device_maps["w"] = {{0, 1}, {1, 1}}; }, "two devices");
    EXPECT_FALSE(is_initialized());
    RpcOptions options;
    options.set_device_map("w", {{0, 1}});
    options.set_device_map("w", {{1, 0}});
    EXPECT_EQ(options.device_maps["w"], (DeviceMap{{0, 1}, {1, 0}}));
    EXPECT_TRUE(says(caught([&] { options.set_device_map("w", {{2, 0}}); }), "two devices"));
    options.rank = 0, options.world_size = 1, options.store = store;
    start("w", options);
    EXPECT_EQ(get_device_maps().at("w"), (DeviceMap{{0, 1}, {1, 0}}));
    shutdown();
  });
}

TEST(Rpc, AWorkerThatWasRefusedMeetsTheOthersAllTheSame) {
  as_ranks(2, [](int rank, const auto& store) {
    auto options = at(rank, 2, store);
    if (rank == 1) {
      options.backend = "pigeon";
      const auto failure = caught([&] { start(name_of(rank), options); });
      EXPECT_EQ(failure.kind, ErrorKind::kUsage);
      EXPECT_TRUE(says(failure, "there are host"));
      options.backend = "host";
    }
    start(name_of(rank), options);
    EXPECT_EQ(rpc_sync(name_of(1 - rank), twice, {4}), 8);
    shutdown();
  });
}

TEST(Rpc, OneNameForTwoIsRefusedByAll) {
  std::atomic<int> n_refused{0};
  as_ranks(2, [&](int rank, const auto& store) {
    n_refused += says(caught([&] { start("same", at(rank, 2, store)); }), "both named same") ? 1 : 0;
  });
  EXPECT_EQ(n_refused, 2);
}

TEST(Rpc, InitNamesThoseThatDoNotCome) {
  as_ranks(1, [](int rank, const auto& store) {
    auto options = at(rank, 3, store);
    options.init_timeout = 200ms;
    const auto failure = caught([&] { start("worker0", options); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
    EXPECT_TRUE(says(failure, "1, 2")) << failure.message;
  });
}

TEST(Rpc, ShutdownWaitsForCallsInFlight) {
  std::atomic<int> n_done{0};
  as_ranks(3, [&](int rank, const auto& store) {
    start(name_of(rank), at(rank, 3, store));
    if (rank == 0)
      rpc_async(1, nap, {300}).on_done([&](const auto& call) { n_done += call.error() ? 0 : 1; });
    shutdown();
    EXPECT_EQ(n_done, 1) << "rank " << rank << " left before";
  });
}

TEST(Rpc, ShutdownInAFunctionIsRefused) {
  as_ranks(2, [](int rank, const auto& store) {
    start(name_of(rank), at(rank, 2, store));
    if (rank == 0) {
      EXPECT_NE(rpc_sync(1, stop_here).find("own threads"), std::string::npos);
    }
    shutdown();
  });
}

TEST(Rpc, LocalShutdownDoesNotWait) {
  as_ranks(2, [](int rank, const auto& store) {
    start(name_of(rank), at(rank, 2, store));
    shutdown({.graceful = false});
    EXPECT_FALSE(is_initialized());
  });
}

TEST(Rpc, ShutdownEndsAtItsTimeout) {
  as_ranks(2, [](int rank, const auto& store) {
    start(name_of(rank), at(rank, 2, store));
    if (rank == 0) {
      const auto failure = caught([] { shutdown({.timeout = 100ms}); });
      EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
      EXPECT_TRUE(says(failure, "these have not arrived: worker1"));
    }
    if (rank == 1) {
      while (true) {  // until rank 0 has gone
        try {
          rpc_sync(0, twice, {1}, {.timeout = 5s});
          std::this_thread::sleep_for(5ms);
        } catch (const Error&) {
          break;
        }
      }
      shutdown({.graceful = false});
    }
    EXPECT_FALSE(is_initialized()) << "left all the same";
  });
}

TEST(Rpc, TimeoutsCanBeChanged) {
  as_ranks(1, [](int rank, const auto& store) {
    start("w", at(rank, 1, store));
    EXPECT_EQ(get_rpc_timeout(), 60s);
    set_rpc_timeout(40ms);
    EXPECT_EQ(caught([] { rpc_sync("w", nap, {400}); }).kind, ErrorKind::kTimeout);
    EXPECT_NO_THROW(rpc_sync("w", nap, {100}, {.timeout = kNoTimeout})) << "none";
    set_rpc_timeout(kNoTimeout);
    EXPECT_NO_THROW(rpc_sync("w", nap, {100})) << "none";
    EXPECT_THROW(set_rpc_timeout(Milliseconds(-1)), Error);
    EXPECT_THROW(set_rpc_timeout(0ms), Error);
    shutdown();
  });
}

TEST(Rpc, DynamicGroupsGrowAndShrink) {
  std::atomic<int> stage{0};
  const auto reach = [&](int n) {
    ++stage;
    while (stage < n) std::this_thread::sleep_for(1ms);
  };
  as_ranks(3, [&](int rank, const auto& store) {
    const auto join = [&] {
      start(name_of(rank), {.membership = Membership::kDynamic, .store = store, .init_timeout = 60s});
    };
    if (rank != 2) join();
    reach(3);
    if (rank != 2) {
      EXPECT_EQ(get_worker_infos().size(), 2u);
    }
    reach(6);
    if (rank == 2) join();
    reach(9);
    EXPECT_EQ(get_worker_infos().size(), 3u);
    for (int to = 0; to < 3; ++to) EXPECT_EQ(rpc_sync(name_of(to), twice, {to}), 2 * to);
    reach(12);
    if (rank == 0) shutdown();
    reach(15);
    if (rank != 0) {
      EXPECT_EQ(get_worker_infos().size(), 2u);
      EXPECT_EQ(caught([] { rpc_sync("worker0", twice, {1}); }).kind, ErrorKind::kPeerLost);
    }
    reach(18);
    if (rank == 0) {
      join();
      EXPECT_EQ(rpc_sync("worker1", twice, {3}), 6) << "back under another number";
      EXPECT_GE(get_worker_info().id, 3);
    }
    reach(21);
    shutdown();
  });
}

// References that outlive what they refer to.
RRef<int>& kept() {
  static RRef<int> reference;
  return reference;
}
void keep(const RRef<int>& reference) {
  kept() = reference;
}
LOCKSTEP_RPC_FUNCTION(keep);

TEST(Rpc, AStrictWorkerDoesNotLeaveSilentlyWhatOthersReferTo) {
  for (const bool strict : {true, false}) {
    std::atomic<bool> there{false}, over{false};
    as_ranks(2, [&](int rank, const auto& store) {
      if (rank == 1) testing::until([&] { return there.load(); });
      start(name_of(rank), {.membership = Membership::kDynamic,
                            .store = store,
                            .init_timeout = 60s,
                            .strict_rref_check = strict});
      if (rank == 0) {
        there = true;
        testing::until([] { return get_worker_infos().size() == 2; });
        rpc_sync("worker1", keep, {RRef<int>(7)});
        if (strict) {
          EXPECT_TRUE(says(caught([] { shutdown(); }), "refer"));
        } else {
          EXPECT_NO_THROW(shutdown());
        }
        EXPECT_FALSE(is_initialized()) << "left all the same";
        over = true;
      } else {
        testing::until([&] { return over.load(); });
        kept() = {};
        shutdown();
      }
    });
  }
}

TEST(Rpc, DynamicGroupsMeetByUrl) {
  const auto file = std::filesystem::temp_directory_path() / ("lockstep-rpc-" + base::random_hex(8));
  const auto port = TcpStore::open("127.0.0.1", {.port = 0, .is_master = true})->port();
  for (const auto& url : {"file://" + file.string(), "tcp://127.0.0.1:" + std::to_string(port)}) {
    std::atomic<int> n_left{2};
    as_ranks(3, [&](int rank, const auto&) {
      RpcOptions options{.init_method = url, .membership = Membership::kDynamic, .init_timeout = 60s};
      if (rank == 0) options.rank = 0;
      start(name_of(rank), options);
      EXPECT_EQ(get_worker_info().id == 0, rank == 0);
      testing::until([] { return get_worker_infos().size() == 3; });
      for (int to = 0; to < 3; ++to) EXPECT_EQ(rpc_sync(name_of(to), twice, {to}), 2 * to);
      barrier({"worker0", "worker1", "worker2"});
      if (rank == 0) testing::until([&] { return n_left == 0; });
      shutdown();
      --n_left;
    });
  }
  std::filesystem::remove(file);
}

TEST(Rpc, ANameThatIsTakenInADynamicGroupIsRefused) {
  std::atomic<bool> there{false}, tried{false};
  as_ranks(2, [&](int rank, const auto& store) {
    const RpcOptions options{.membership = Membership::kDynamic, .store = store, .init_timeout = 60s};
    if (rank == 0) {
      start("same", options);
      there = true;
      while (!tried) std::this_thread::sleep_for(1ms);
      EXPECT_EQ(get_worker_infos().size(), 1u);
      shutdown();
    } else {
      while (!there) std::this_thread::sleep_for(1ms);
      EXPECT_TRUE(says(caught([&] { start("same", options); }), "is taken"));
      tried = true;
    }
  });
}

TEST(Rpc, AnotherBackendMayCarryTheMessages) {
  const auto exchange = transport::InProcessExchange::create();
  register_rpc_backend("exchange",
                       [&](const BackendRequest& request) { return exchange->join(request.self.id); });
  EXPECT_TRUE(is_rpc_backend_available("exchange"));
  EXPECT_FALSE(is_rpc_backend_available("pigeon"));
  EXPECT_THROW(register_rpc_backend("exchange", {}), Error);
  as_ranks(2, [](int rank, const auto& store) {
    auto options = at(rank, 2, store);
    options.backend = "exchange";
    start(name_of(rank), options);
    EXPECT_EQ(rpc_sync(1 - rank, twice, {rank}), 2 * rank);
    shutdown();
  });
}

// The worker with the smallest name leads; the others wait for it.
TEST(Rpc, TheOthersLeaveWhenTheirLeaderGoesWithoutWaiting) {
  as_ranks(3, [](int rank, const auto& store) {
    start(name_of(rank), at(rank, 3, store));
    if (rank == 0) {
      until([] { return get_debug_info().at("agent.num_leaving") == "2"; });
      shutdown({.graceful = false});
    } else {
      shutdown({.timeout = 60s});
    }
    EXPECT_FALSE(is_initialized());
  });
}

TEST(Rpc, NumbersInADynamicGroupAreAskedForOrGiven) {
  std::atomic<int> n_there{0}, n_called{0};
  as_ranks(3, [&](int rank, const auto& store) {
    until([&] { return n_there == rank; });
    start(name_of(rank), {.membership = Membership::kDynamic,
                          .rank = rank == 0 ? std::optional<int>(0) : std::nullopt,
                          .store = store,
                          .init_timeout = 60s});
    EXPECT_EQ(get_worker_info().id, rank) << "0 is asked for, the next ones are free";
    ++n_there;
    until([&] { return n_there == 3; });
    EXPECT_EQ(rpc_sync("worker0", twice, {rank}), 2 * rank);
    ++n_called;
    if (rank == 0) until([&] { return n_called == 3; });  // a member of a dynamic group may leave at any time
    shutdown();
  });
}

TEST(Debug, InfoCountsCallsAndThreads) {
  as_ranks(2, [](int rank, const auto& store) {
    start(name_of(rank), at(rank, 2, store));
    if (rank == 0) {
      const auto call = rpc_async(1, nap, {1000});
      EXPECT_EQ(get_debug_info().at("agent.client_active_calls"), "1");
      EXPECT_EQ(get_debug_info().at("agent.num_workers"), "2");
      EXPECT_EQ(rpc_sync(1, n_active_here), "2") << "the nap, and this question";
      call.wait();
      // A call is over a moment after its answer.
      until([] { return rpc_sync(1, n_active_here) == "1"; });
      until([] { return std::stoi(get_debug_info().at("agent.num_idle_threads")) >= 1; });
      EXPECT_EQ(get_debug_info().at("agent.client_active_calls"), "0");
      EXPECT_GE(std::stoi(get_debug_info().at("agent.thread_pool_size")), 1);
    }
    shutdown();
  });
}

}  // namespace
}  // namespace lockstep::rpc
