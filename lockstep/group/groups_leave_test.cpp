// How sub-groups and the world end: destroyed, aborted, or shrunk to go on.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <latch>
#include <map>
#include <memory>
#include <thread>

#include "lockstep/engine/fake_engine.h"
#include "lockstep/group/backends.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/group/groups.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

using namespace testing;

TEST(Destroy, OfOneGroupLeavesTheOthers) {
  run_threads(2, [](int) {
    const auto one = new_group(), two = new_group();
    destroy_process_group(one);
    refused([&] { all_reduce(at::ones({1}), {.group = one}); }, "was destroyed");
    refused([&] { destroy_process_group(one); }, "was destroyed");
    refused([&] { split_group(one, {{0}}); }, "was destroyed");
    destroy_process_group(non_member_group());
    abort_process_group(non_member_group());
    EXPECT_EQ(sum_over(two), 3);
    EXPECT_EQ(sum_over({}), 3);
    EXPECT_EQ(new_group()->name(), "3");  // numbers are not used again
  });
}

// Every question about the group is refused.
void expect_gone(const Group& group) {
  refused([&] { get_rank(group); }, "get_rank: group");
  refused([&] { get_world_size(group); }, "was destroyed");
  refused([&] { get_backend(group); }, "was destroyed");
  refused([&] { get_backend_config(group); }, "was destroyed");
  refused([&] { get_process_group_ranks(group); }, "was destroyed");
  refused([&] { get_group_rank(group, 0); }, "was destroyed");
  refused([&] { get_global_rank(group, 0); }, "was destroyed");
}

TEST(Destroy, EndsEveryQuestionAboutTheGroup) {
  for (const int n : {1, 2}) {
    run_threads(n, [](int) {
      const auto world = default_group(), destroyed = new_group(), aborted = new_group();
      destroy_process_group(destroyed);
      abort_process_group(aborted);
      expect_gone(destroyed);
      expect_gone(aborted);
      EXPECT_EQ(get_backend_config().substr(0, 4), "cpu:");
      destroy_process_group();
      expect_gone(world);
    });
  }
}

// An engine that notes which groups are left, in order.
std::map<lockstep_comm*, std::string> names_of;
std::vector<std::string> left_in_order;

lockstep_status create_named(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                             std::size_t capacity) {
  const auto status = comm::fake_engine()->comm_create(config, out, error, capacity);
  names_of[*out] = config->name;
  return status;
}

void leave_noting(lockstep_comm* comm, const char* cause) {
  left_in_order.push_back(names_of[comm]);
  comm::fake_engine()->comm_leave(comm, cause);
}

TEST(Destroy, OfTheWorldLeavesItsGroupsInDescendingOrderOfTheirNames) {
  static lockstep_engine table = *comm::fake_engine();
  table.name = "leaving";
  table.comm_create = create_named;
  table.comm_leave = leave_noting;
  register_backend(&table);
  for (int round = 0; round < 2; ++round) {
    left_in_order.clear();
    init_process_group(
        {.backend = "leaving", .world_size = 1, .rank = 0, .store = std::make_shared<HashStore>()});
    EXPECT_EQ(get_pg_count(), 1);
    for (int i = 1; i <= 10; ++i) new_group({0});
    new_group({0}, {.name = "alpha"});
    const auto beta = new_group({0}, {.name = "beta"});
    EXPECT_EQ(get_pg_count(), 13);
    // A group of another world.
    Group elsewhere;
    run_threads(1, [&](int) {
      elsewhere = new_group();
      std::thread([&] {  // no rank thread: the process's worlds
        refused([&] { destroy_process_group(elsewhere); }, "in none of the worlds of this process");
      })
          .join();
    });
    refused([&] { destroy_process_group(elsewhere); }, "was destroyed");
    destroy_process_group(non_member_group());
    EXPECT_TRUE(left_in_order.empty());
    destroy_process_group(get_group_by_name("4"));
    EXPECT_EQ(left_in_order, (std::vector<std::string>{"4"}));
    destroy_process_group();
    EXPECT_EQ(left_in_order, (std::vector<std::string>{"4", "beta", "alpha", "10", "9", "8", "7", "6", "5",
                                                       "3", "2", "1", "0"}));
    EXPECT_EQ(get_pg_count(), 0);
    EXPECT_FALSE(is_initialized());
  }
}

TEST(Destroy, OfTheWorldTakesEveryGroupAndNumbersAfresh) {
  const auto store = std::make_shared<HashStore>();
  run_threads(2, [&](int rank) {
    for (int round = 0; round < 3; ++round) {
      const auto group = new_group();
      const auto local = new_group({0, 1}, {.use_local_synchronization = true});
      EXPECT_EQ(group->name(), "1");
      EXPECT_EQ(sum_over(group), 3);
      EXPECT_EQ(sum_over(local), 3);
      destroy_process_group();
      EXPECT_EQ(get_pg_count(), 0);
      for (const auto& gone : {group, local})
        refused([&] { all_reduce(at::ones({1}), {.group = gone}); }, "was destroyed");
      init_process_group({.timeout = kPatience, .world_size = 2, .rank = rank, .store = store});
      refused([&] { destroy_process_group(group); }, "was destroyed");
    }
  });
}

TEST(Abort, OfOneGroupEndsItEverywhereAndLeavesTheOthers) {
  run_threads(3, [](int rank) {
    const auto group = new_group(), other = new_group();
    if (rank == 0) {
      abort_process_group(group, "had enough");
      refused([&] { abort_process_group(group); }, "was destroyed");
    } else {
      const auto failure = caught([&] { sum_over(group); });
      EXPECT_TRUE(failure.kind == ErrorKind::kAborted || failure.kind == ErrorKind::kPeerLost)
          << failure.message;
    }
    EXPECT_EQ(sum_over(other), 6);
  });
}

TEST(Abort, OfTheWorldNeedsNoOtherRankAndTheWorldCanBeJoinedAgain) {
  const auto store = std::make_shared<HashStore>();
  run_threads(2, [&](int rank) {
    const auto group = new_group();
    const auto stuck = rank == 0 ? all_reduce(at::ones({1}), {.group = group, .async_op = true}) : Work();
    abort_process_group({}, "start over");
    EXPECT_FALSE(is_initialized());
    if (rank == 0) {
      EXPECT_TRUE(stuck.done());
    }
    init_process_group({.timeout = kPatience, .world_size = 2, .rank = rank, .store = store});
    EXPECT_EQ(sum_over({}), 3);
  });
}

TEST(Shrink, OfTheWorldRenumbersTheSurvivorsAndEndsOtherGroups) {
  for (const bool abort : {false, true}) {
    std::latch shrunk(3);
    run_threads(4, [&](int rank) {
      const auto before = new_group();
      if (rank == 1) return shrunk.wait();  // alive, but not asked
      const auto old = default_group();
      const auto group = shrink_group({1}, {.abort = abort});
      shrunk.count_down();
      EXPECT_EQ(group, default_group());
      EXPECT_EQ(get_rank(), rank == 0 ? 0 : rank - 1);
      EXPECT_EQ(get_world_size(), 3);
      EXPECT_EQ(group->name(), "0");
      EXPECT_EQ(group->ranks(), range(0, 3));
      EXPECT_EQ(sum_over(group), 6);
      for (const auto& gone : {before, old})
        refused([&] { all_reduce(at::ones({1}), {.group = gone}); }, "was destroyed");
      EXPECT_EQ(new_group({0, 2})->name() == "1", get_rank() != 1);
    });
  }
}

TEST(Shrink, GoesOnAfterARankIsLost) {
  run_threads(3, [](int rank) {
    if (rank == 2) return;
    EXPECT_EQ(caught([] { barrier(); }).kind, ErrorKind::kPeerLost);
    shrink_group({2}, {.abort = true});
    EXPECT_EQ(get_rank(), rank);
    EXPECT_EQ(sum_over({}), 3);
    EXPECT_EQ(default_group()->timeout(), kDefaultGroupTimeout);
    shrink_group({1 - rank}, {.timeout = Milliseconds(54'321)});  // each on its own
    EXPECT_EQ(default_group()->timeout(), Milliseconds(54'321));
    EXPECT_EQ(get_world_size(), 1);
    EXPECT_EQ(sum_over({}), 1);
  });
}

TEST(Shrink, MayChangeTheTimeoutOfASubGroup) {
  run_threads(3, [](int rank) {
    const auto group = new_group();
    if (rank == 1) return;
    const auto smaller = shrink_group({1}, {.group = group, .timeout = Milliseconds(12'345)});
    EXPECT_EQ(smaller->timeout(), Milliseconds(12'345));
    EXPECT_EQ(sum_over(smaller), 4);
  });
}

TEST(Shrink, OfASubGroupReplacesOnlyThat) {
  run_threads(4, [](int rank) {
    const auto group = new_group({0, 2, 3}, {.timeout = Milliseconds(54'321), .desc = "three"});
    if (rank == 3 || rank == 1) return;
    refused([&] { shrink_group({}, {.group = group}); }, "empty");
    refused([&] { shrink_group({3}, {.group = group}); }, "0 to 2");
    refused([&] { shrink_group({2, 2}, {.group = group}); }, "twice");
    refused([&] { shrink_group({0, 1, 2}, {.group = group}); }, "every rank");
    refused([&] { shrink_group({group->rank()}, {.group = group}); }, "only those that stay");
    const auto smaller = shrink_group({2}, {.group = group});
    EXPECT_EQ(smaller->ranks(), (std::vector<int>{0, 2}));
    EXPECT_EQ(smaller->desc(), "three");
    EXPECT_EQ(smaller->timeout(), Milliseconds(54'321));
    EXPECT_EQ(sum_over(smaller), 4);
    refused([&] { shrink_group({1 - smaller->rank()}, {.group = smaller, .timeout = Milliseconds(0)}); },
            "must be positive");
    refused([&] { all_reduce(at::ones({1}), {.group = group}); }, "was destroyed");
  });
}

}  // namespace
}  // namespace lockstep
