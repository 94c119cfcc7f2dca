// Entering and leaving RPC groups, workers as threads over a store.
#include "lockstep/rpc/rpc.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/rpc/rpc_ranks_testing.h"
#include "lockstep/rpc/rpc_testing.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/store/store_collectives.h"
#include "lockstep/store/tcp_store.h"
#include "lockstep/transport/in_process_transport.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using testing::as_ranks;
using testing::caught;
using testing::name_of;
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

// On the device of worker 0 that its map for worker 1 names as the place of cuda:`index` of worker 1.
int back_to_first(int index) {
  return current_agent("test")->device_target(0, Leg::kAnswer, index);
}
LOCKSTEP_RPC_FUNCTION(back_to_first);

TEST(Rpc, WorkersKnowEachOthersDeviceMaps) {
  for (const bool dynamic : {false, true}) {
    as_ranks(2, [&](int rank, const auto& store) {
      auto options = at(rank, 2, store);
      if (dynamic) {
        options.membership = Membership::kDynamic;
        options.world_size.reset();
      }
      if (rank == 0) options.device_maps["worker1"] = {{2, 5}};
      start(name_of(rank), options);
      if (rank == 0) {
        until([] { return get_worker_infos().size() == 2; }, "worker1 did not come");
        EXPECT_EQ(rpc_sync("worker1", back_to_first, {5}), 2);
        EXPECT_EQ(current_agent("test")->device_target(1, Leg::kRequest, 2), 5);
        EXPECT_TRUE(says(caught([] { rpc_sync("worker1", back_to_first, {2}); }),
                         "device_maps of worker0 for worker1"));
      } else {
        until([] { return get_worker_infos().size() == 2; }, "worker0 did not come");
      }
      store_barrier(*store, rank, 2, "asked", 60s);
      shutdown();
    });
  }
}

TEST(Rpc, DeviceMapsThatFitNoWorkerAreRefusedByAll) {
  as_ranks(2, [](int rank, const auto& store) {
    auto options = at(rank, 2, store);
    if (rank == 0) options.device_maps["nobody"] = {{0, 0}};
    const auto failure = caught([&] { start(name_of(rank), options); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(failure, "device_maps of worker worker0 has a map for nobody")) << failure.message;
    EXPECT_FALSE(is_initialized());
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

TEST(Debug, InfoCountsCallsAndThreads) {
  as_ranks(2, [](int rank, const auto& store) {
    start(name_of(rank), at(rank, 2, store));
    if (rank == 0) {
      // A call is over a moment after its answer, those of start() too.
      const auto n_calls = [] { return get_debug_info().at("agent.client_active_calls"); };
      until([] { return rpc_sync(1, n_active_here) == "1"; });
      until([&] { return n_calls() == "0"; });
      const auto call = rpc_async(1, nap, {1000});
      EXPECT_EQ(n_calls(), "1");
      EXPECT_EQ(get_debug_info().at("agent.num_workers"), "2");
      EXPECT_EQ(rpc_sync(1, n_active_here), "2") << "the nap, and this question";
      call.wait();
      until([] { return rpc_sync(1, n_active_here) == "1"; });
      until([] { return std::stoi(get_debug_info().at("agent.num_idle_threads")) >= 1; });
      until([&] { return n_calls() == "0"; });
      EXPECT_GE(std::stoi(get_debug_info().at("agent.thread_pool_size")), 1);
    }
    shutdown();
  });
}

}  // namespace
}  // namespace lockstep::rpc
