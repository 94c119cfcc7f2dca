// Entering and leaving the world, by options, environment and engine.
#include "lockstep/group/world.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <latch>
#include <string>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/base/error.h"
#include "lockstep/base/path_testing.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/internal/worlds.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

using namespace testing;

// Sets a variable for a scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

TEST(World, EveryUseBeforeInitRaisesThatItIsMissing) {
  EXPECT_TRUE(is_available());
  EXPECT_FALSE(is_initialized());
  EXPECT_EQ(get_pg_count(), 0);
  const std::function<void()> uses[] = {
      [] { get_rank(); },
      [] { get_world_size(); },
      [] { get_backend(); },
      [] { default_group(); },
      [] { barrier(); },
      [] { all_reduce(at::ones({1})); },
      [] { empty_shared({1}); },
      [] { destroy_process_group(); },
      [] { get_process_group_ranks(); },
  };
  for (const auto& use : uses) {
    const auto failure = caught(use);
    EXPECT_EQ(failure.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(failure, "not initialised")) << failure.message;
  }
}

TEST(World, WithNothingSetIsAWorldOfOneThatNeedsNoStore) {
  init_process_group();
  EXPECT_TRUE(is_initialized());
  EXPECT_EQ(get_rank(), 0);
  EXPECT_EQ(get_world_size(), 1);
  EXPECT_EQ(get_backend(), "none");
  EXPECT_EQ(get_pg_count(), 1);
  EXPECT_EQ(get_process_group_ranks(), std::vector<int>{0});
  EXPECT_EQ(default_group()->store(), nullptr);
  auto tensor = at::arange(6, at::kFloat).reshape({2, 3}).t();
  const auto before = tensor.clone();
  all_reduce(tensor, {.op = ReduceOp::kAvg, .async_op = true}).wait();
  broadcast(tensor, {.src = 0});
  barrier();
  EXPECT_TRUE(at::equal(tensor, before));
  auto output = at::empty({3, 2});
  all_gather({output}, tensor, {.async_op = true});
  EXPECT_TRUE(at::equal(output, before));
  reduce_scatter_tensor(output.zero_(), tensor);
  EXPECT_TRUE(at::equal(output, before));
  EXPECT_EQ(caught([] { broadcast(at::ones({1}), {.src = 1}); }).kind, ErrorKind::kUsage);
  EXPECT_EQ(caught([] { all_reduce(at::ones({1}, at::kInt), {.op = ReduceOp::kAvg}); }).kind,
            ErrorKind::kUsage);
  default_group()->abort("enough");
  EXPECT_EQ(caught([] { barrier(); }).kind, ErrorKind::kAborted);
  destroy_process_group();
  EXPECT_FALSE(is_initialized());
}

TEST(World, CannotBeEnteredTwiceButAgainAfterLeaving) {
  for (int round = 0; round < 3; ++round) {
    init_process_group();
    const auto failure = caught([] { init_process_group(); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(failure, "exists already") && says(failure, "world_test.cpp:")) << failure.message;
    destroy_process_group(default_group());
  }
}

TEST(World, RefusesOptionsThatContradictEachOther) {
  const auto store = std::make_shared<HashStore>();
  const auto refused = [](const InitOptions& options, const std::string& part) {
    const auto failure = caught([&] { init_process_group(options); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(failure, part)) << failure.message;
    EXPECT_FALSE(is_initialized());
  };
  refused({.init_method = "env://", .world_size = 1, .rank = 0, .store = store}, "not both");
  refused({.rank = 0, .store = store}, "world_size");
  refused({.world_size = 2, .store = store}, "rank");
  refused({.world_size = 2, .rank = 2, .store = store}, "rank is 2");
  refused({.timeout = Milliseconds(0)}, "timeout");
  refused({.backend = "cpu:host,cpu:fake"}, "repeats");
  refused({.backend = ":host"}, "one pair");
  refused({.backend = "cpu:"}, "one pair");
  refused({.backend = "cpu:host,"}, "comma");
  refused({.backend = "toaster:host"}, "not a device type");
}

TEST(World, KnowsItsEngines) {
  for (const std::string name : {"host", "HOST", "cpu:host", "CPU:Host"}) {
    EXPECT_TRUE(is_backend_available(name)) << name;
    init_process_group({.backend = name});
    destroy_process_group();
  }
  EXPECT_FALSE(is_backend_available(""));
  for (const auto name : {"ucc", "mpi", "cuda:host", "cpu:host,cuda:host"}) {
    EXPECT_FALSE(is_backend_available(name));
    const auto failure = caught([&] { init_process_group({.backend = name}); });
    EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
    EXPECT_TRUE(says(failure, name)) << failure.message;
  }
  // What could be named is listed, also what would be loaded when it is asked for.
  const auto folder = std::filesystem::temp_directory_path() / base::cat("lockstep-engines-", ::getpid());
  std::filesystem::create_directory(folder);
  std::ofstream(folder / "lockstep_imaginary.so") << "no engine";
  ::setenv("LOCKSTEP_ENGINE_PATH", folder.c_str(), 1);
  const auto unknown = caught([] { init_process_group({.backend = "ucc"}); });
  ::unsetenv("LOCKSTEP_ENGINE_PATH");
  std::filesystem::remove_all(folder);
  for (const char* name : {"\"ucc\"", "fake", "host", "imaginary"})
    EXPECT_TRUE(says(unknown, name)) << unknown.message;
  EXPECT_FALSE(is_nccl_available() && !std::filesystem::exists("/dev/nvidiactl")) << "without a GPU";
  EXPECT_FALSE(is_mpi_available() || is_ucc_available() || is_xccl_available());
}

TEST(World, ReportsTheLaunchersEnvironment) {
  EXPECT_FALSE(is_torchelastic_launched());
  EXPECT_EQ(get_node_local_rank(5), 5);
  EXPECT_TRUE(says(caught([] { get_node_local_rank(); }), "LOCAL_RANK"));
  const Variable run("TORCHELASTIC_RUN_ID", "job"), local("LOCAL_RANK", "3");
  EXPECT_TRUE(is_torchelastic_launched());
  EXPECT_EQ(get_node_local_rank(5), 3);
}

TEST(World, CanBeEnteredAgainOverTheSameStore) {
  const auto store = std::make_shared<HashStore>();
  run_threads(3, [&](int rank) {
    for (int round = 0; round < 4; ++round) {
      destroy_process_group();
      init_process_group({.timeout = kPatience, .world_size = 3, .rank = rank, .store = store});
      auto tensor = at::full({1}, static_cast<float>(rank + round));
      all_reduce(tensor);
      EXPECT_EQ(tensor.item<float>(), static_cast<float>(3 + 3 * round));
    }
    EXPECT_EQ(default_group()->name(), "0");
    EXPECT_EQ(default_group()->desc(), "default_pg");
  });
  bool prefixed = false;
  for (const auto& key : store->list_keys()) prefixed = prefixed || key.starts_with("default_pg/");
  EXPECT_TRUE(prefixed);
}

// A rank that leaves in order, and one whose process is new: it knows nothing of the worlds before.
TEST(World, ASurvivorMeetsAFreshProcessOverANewStoreAndOverTheOldOne) {
  const auto old_store = std::make_shared<HashStore>(), new_store = std::make_shared<HashStore>();
  run_threads(2, [&](int rank) {
    const auto enter = [&](const auto& world, const std::shared_ptr<Store>& store) {
      world({.timeout = Milliseconds(5'000), .world_size = 2, .rank = rank, .store = store});
    };
    destroy_process_group();
    enter(init_process_group, old_store);
    for (const auto& store : {new_store, old_store}) {
      destroy_process_group();
      if (rank == 0) {
        enter(init_process_group, store);
        continue;
      }
      internal::Worlds fresh;
      enter([&](const InitOptions& options) { fresh.enter(options); }, store);
      fresh.leave(nullptr, "");
      init_process_group({.world_size = 1, .rank = 0, .store = std::make_shared<HashStore>()});
    }
  });
}

TEST(World, RanksWithDifferentWorldSizesReportBoth) {
  const auto store = std::make_shared<HashStore>();
  run_threads(2, [&](int rank) {
    destroy_process_group();
    const auto failure = caught([&] {
      init_process_group({.timeout = kPatience, .world_size = 2 + rank, .rank = rank, .store = store});
    });
    EXPECT_TRUE(says(failure, "world of 2")) << failure.message;
    EXPECT_TRUE(says(failure, "world of 3")) << failure.message;
    init_process_group({.world_size = 1, .rank = 0, .store = std::make_shared<HashStore>()});
  });
}

TEST(World, OfTwoProcessesWithOneRankTheSecondReportsIt) {
  const auto store = std::make_shared<HashStore>();
  std::atomic<int> told{0};
  run_threads(2, [&](int) {
    destroy_process_group();
    const auto failure = caught([&] {
      init_process_group({.timeout = Milliseconds(200), .world_size = 2, .rank = 0, .store = store});
    });
    EXPECT_TRUE(says(failure, "rank 1 did not arrive")) << failure.message;
    told += says(failure, "two processes have rank 0") ? 1 : 0;
    init_process_group({.world_size = 1, .rank = 0, .store = std::make_shared<HashStore>()});
  });
  EXPECT_EQ(told.load(), 1);
}

TEST(World, KeysOfTheGroupLieInItsOwnPartOfTheStore) {
  run_threads(2, [](int rank) {
    const auto group = default_group();
    if (rank == 0) group->store()->set("mine", "yes");
    EXPECT_EQ(to_text(group->store()->get("mine")), "yes");
  });
}

// Nobody is through before all are there, in new_group too, and only when asked for.
TEST(World, TheInitBarrierHoldsForEveryGroupAndOnlyWhenAskedFor) {
  const auto n_come = [](const Group& group) -> std::string {
    const std::string key = "init_barrier/count";
    return group->store()->check({&key, 1}) ? to_text(group->store()->get(key)) : "no barrier";
  };
  run_threads(3, [&](int) {
    EXPECT_EQ(n_come(default_group()), "no barrier");
    EXPECT_EQ(n_come(new_group()), "no barrier");
  });
  const Variable barrier_on("TORCH_DIST_INIT_BARRIER", "1");
  run_threads(3, [&](int rank) {
    EXPECT_EQ(n_come(default_group()), "3") << "when it returns, all have come";
    EXPECT_EQ(n_come(new_group()), "3");
    const auto pair = new_group({0, 2});
    if (rank != 1) {
      EXPECT_EQ(n_come(pair), "2");
    }
  });
}

TEST(World, AGroupThatWasDestroyedRefusesToWork) {
  run_threads(2, [](int) {
    const auto kept = default_group();
    auto tensor = at::ones({4});
    const auto work = all_reduce(tensor, {.async_op = true});
    destroy_process_group();
    work.wait();  // operations in flight end before the group is left
    EXPECT_EQ(tensor[0].item<float>(), 2);
    const auto failure = caught([&] { all_reduce(tensor, {.group = kept}); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(failure, "was destroyed")) << failure.message;
    EXPECT_EQ(caught([&] { destroy_process_group(kept); }).kind, ErrorKind::kUsage);
    kept->abort("nothing to abort");
    EXPECT_FALSE(is_initialized());
  });
}

TEST(World, LeavingEndsAnUnmatchedOperationAsAborted) {
  std::latch left(1);
  run_threads(2, [&](int rank) {
    if (rank == 1) return left.wait();
    const auto work = broadcast(at::ones({1}), {.src = 0, .async_op = true});
    default_group()->abort("rank 0 has had enough");
    destroy_process_group();
    EXPECT_TRUE(work.done());
    EXPECT_EQ(caught([&] { work.wait(); }).kind, ErrorKind::kAborted);
    left.count_down();
  });
}

TEST(World, LeavingAbortsOperationsThatNoOtherRankJoined) {
  std::latch left(1);
  run_threads(2, [&](int rank) {
    if (rank == 1) {
      left.wait();
      EXPECT_EQ(caught([] { broadcast(at::ones({1}), {.src = 0}); }).kind, ErrorKind::kAborted);
      return;
    }
    broadcast(at::ones({1}), {.src = 0, .async_op = true});  // dropped: only the group holds it
    destroy_process_group();
    left.count_down();
  });
}

TEST(Plugins, CompiledAsCRunGroups) {
  const auto name = load_engine(path_testing::from_program(PLUGIN_DIR) + "/kv_engine.so");
  EXPECT_EQ(name, "kv");
  EXPECT_TRUE(is_backend_available("KV"));
  run_threads(3,
              [](int rank) {
                EXPECT_EQ(get_backend(), "kv");
                auto tensor = at::full({2, 2}, static_cast<float>(rank)).t();
                all_reduce(tensor, {.op = ReduceOp::kAvg, .async_op = true}).wait();
                EXPECT_TRUE(at::equal(tensor, at::ones({2, 2})));
                // Memory of its own it has none; an ordinary tensor does.
                auto plain = empty_shared({3});
                broadcast(plain.fill_(rank), {.src = 2});
                EXPECT_EQ(plain[0].item<float>(), 2);
                const auto failure = caught([] { all_reduce(at::ones({1}, at::kDouble)); });
                EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
                EXPECT_TRUE(says(failure, "kv") && says(failure, "Double")) << failure.message;
              },
              {.timeout = kPatience, .backend = "kv"});
  EXPECT_EQ(caught([] { load_engine(path_testing::from_program(PLUGIN_DIR) + "/kv_engine.so"); }).kind,
            ErrorKind::kUsage);
}

// The C engine, but rank 1 cannot join.
lockstep_status create_unless_rank_1(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                                     size_t capacity) {
  if (config->rank != 1)
    return internal::engines().find("kv")->table().comm_create(config, out, error, capacity);
  std::snprintf(error, capacity, "no memory for rank 1");
  return LOCKSTEP_RESOURCE;
}

TEST(Plugins, TheOthersAreNotifiedOfARankThatCannotJoin) {
  auto table = internal::engines().find("kv")->table();
  table.name = "stubborn";
  table.comm_create = create_unless_rank_1;
  internal::engines().add(comm::Engine(&table, "test"));
  const auto store = std::make_shared<HashStore>();
  const auto enter = [&](int rank) {
    internal::Worlds world;
    return caught([&] {
      world.enter(
          {.backend = "stubborn", .timeout = kPatience, .world_size = 2, .rank = rank, .store = store});
    });
  };
  base::Thread other("rank 1", [&] { EXPECT_EQ(enter(1).kind, ErrorKind::kResource); });
  const auto failure = enter(0);
  EXPECT_EQ(failure.kind, ErrorKind::kPeerLost);
  EXPECT_TRUE(says(failure, "no memory for rank 1")) << failure.message;
  ASSERT_TRUE(failure.peer);
  EXPECT_EQ(failure.peer->rank, 1);
}

}  // namespace
}  // namespace lockstep
