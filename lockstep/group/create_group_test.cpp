// create_group: groups without the default world, several in one process, with ranks as threads. Ranks that
// are processes: processes_test.cpp.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/store/prefix_store.h"

namespace lockstep {
namespace {

using namespace testing;

// Each member adds its rank in the group, plus one.
float sum_of_ranks(const Group& group) {
  auto tensor = at::full({3}, static_cast<float>(group->rank() + 1));
  all_reduce(tensor, {.group = group});
  return tensor[1].item<float>();
}

float up_to(int n) {
  return static_cast<float>(n * (n + 1) / 2);
}

CreateGroupOptions member(const std::shared_ptr<Store>& store, int rank, int size, const std::string& name) {
  return {.store = store, .rank = rank, .size = size, .name = name, .timeout = kPatience};
}

// Rank threads that left their default world: what is made here stands alone.
void without_world(int n, const std::function<void(int)>& fn) {
  world(n, [&](int rank) {
    destroy_process_group();
    fn(rank);
  });
}

TEST(CreateGroup, WorksWithoutTheDefaultWorld) {
  for (const int n : {1, 2, 4}) {
    const auto store = std::make_shared<HashStore>();
    without_world(n, [&](int rank) {
      const auto group = create_group(member(store, rank, n, "alone"));
      EXPECT_FALSE(is_initialized());
      EXPECT_EQ(get_rank(group), rank);
      EXPECT_EQ(get_world_size(group), n);
      EXPECT_EQ(group->name(), "alone");
      EXPECT_EQ(group->ranks(), range(0, n));
      EXPECT_EQ(get_group_by_name("alone"), group);
      EXPECT_EQ(sum_of_ranks(group), up_to(n));
      auto tensor = at::full({2}, static_cast<float>(rank));
      broadcast(tensor, {.src = n - 1, .group = group});
      EXPECT_EQ(tensor[0].item<float>(), static_cast<float>(n - 1));
      destroy_process_group(group);
      refused([&] { get_rank(group); }, "destroyed");
    });
  }
}

TEST(CreateGroup, TwoWorldsOfDifferentSizesStandBesideTheDefaultOne) {
  const auto one = std::make_shared<HashStore>(), other = std::make_shared<HashStore>();
  world(3, [&](int rank) {
    // All three ranks, counted backwards; and the last two, over another store.
    const auto backwards = create_group(member(one, 2 - rank, 3, "backwards"));
    const auto pair = rank == 0 ? non_member_group() : create_group(member(other, rank - 1, 2, "pair"));
    EXPECT_EQ(get_rank(backwards), 2 - rank);
    EXPECT_EQ(sum_of_ranks(backwards), up_to(3));
    if (rank > 0) {
      EXPECT_EQ(get_rank(pair), rank - 1);
      EXPECT_EQ(sum_of_ranks(pair), up_to(2));
    }
    EXPECT_EQ(sum_over({}), up_to(3));
    EXPECT_EQ(get_pg_count(), 1);  // of the default world
    auto tensor = at::full({1}, static_cast<float>(rank));
    broadcast(tensor, {.src = 0, .group = backwards});
    EXPECT_EQ(tensor.item<float>(), 2);
  });
}

TEST(CreateGroup, DestroyingOneLeavesTheOthers) {
  const auto store = std::make_shared<HashStore>();
  world(2, [&](int rank) {
    const auto left = create_group(member(store, rank, 2, "left"));
    const auto right = create_group(member(store, rank, 2, "right"));
    const auto part = new_group({1}, {.parent = left});
    destroy_process_group(left);
    refused([&] { sum_of_ranks(left); }, "destroyed");
    if (rank == 1) refused([&] { sum_of_ranks(part); }, "destroyed");
    EXPECT_EQ(sum_of_ranks(right), 3);
    destroy_process_group();
    EXPECT_FALSE(is_initialized());
    EXPECT_EQ(sum_of_ranks(right), 3);
    refused([&] { destroy_process_group(left); }, "\"left\" was destroyed");
    // The name is free again.
    EXPECT_EQ(sum_of_ranks(create_group(member(store, rank, 2, "left"))), 3);
  });
}

TEST(CreateGroup, SaysThatItsWorldIsGoneAlsoWhenNoneIsLeft) {
  const auto store = std::make_shared<HashStore>();
  without_world(2, [&](int rank) {
    const auto group = create_group(member(store, rank, 2, "gone"));
    const auto part = new_group({.parent = group});
    destroy_process_group(group);
    for (const auto& each : {group, part}) {
      const auto text = "group \"" + each->name() + "\" was destroyed, alone or with its world";
      refused([&] { new_group({0}, {.parent = each}); }, text);
      refused([&] { split_group(each, {{0}}); }, text);
      refused([&] { abort_process_group(each); }, text);
      refused([&] { destroy_process_group(each); }, text);
    }
    refused([&] { destroy_process_group(); }, "not initialised");
  });
}

TEST(CreateGroup, MayHaveTheNameOfAGroupOfTheDefaultWorldButIsThenNotFoundByIt) {
  const auto store = std::make_shared<HashStore>();
  world(2, [&](int rank) {
    const auto named = new_group({.name = "twice"});
    const auto created = create_group(member(store, rank, 2, "twice"));
    EXPECT_EQ(sum_of_ranks(named), 3);
    EXPECT_EQ(sum_of_ranks(created), 3);
    refused([] { get_group_by_name("twice"); }, "two groups are named \"twice\"");
    destroy_process_group(named);
    EXPECT_EQ(get_group_by_name("twice"), created);
  });
}

TEST(CreateGroup, HasSubGroupsOfItsOwn) {
  const auto store = std::make_shared<HashStore>();
  world(4, [&](int rank) {
    const auto whole = create_group(member(store, 3 - rank, 4, "whole"));
    const int here = whole->rank();
    const auto low = new_group({0, 1, 2}, {.parent = whole});
    const auto high = new_group({2, 3}, {.parent = whole, .name = "high"});
    EXPECT_EQ(is_group_member(low), here < 3);
    if (here < 3) {
      EXPECT_EQ(low->name(), "whole/1");
      EXPECT_EQ(sum_of_ranks(low), up_to(3));
      // Of a sub-group: ranks are the parent's, and only its members call.
      const auto pair = new_group({1, 2}, {.parent = low});
      EXPECT_EQ(is_group_member(pair), here != 0);
      if (here != 0) {
        EXPECT_EQ(pair->ranks(), (std::vector<int>{1, 2}));
        EXPECT_EQ(sum_of_ranks(pair), up_to(2));
      }
    }
    if (here >= 2) {
      EXPECT_EQ(high->name(), "whole/high");
      EXPECT_EQ(get_group_by_name("whole/high"), high);
      EXPECT_EQ(get_group_rank(high, 3), 1);
    }
    if (here < 3) {
      // A name that comes again means the same group for ranks that were in the first and for those that were
      // not.
      const auto first = new_group({0, 1}, {.parent = low, .name = "again"});
      if (here < 2) destroy_process_group(first);
      EXPECT_EQ(sum_of_ranks(new_group({0, 1, 2}, {.parent = low, .name = "again"})), up_to(3));
    }
    const auto halves = new_subgroups(2, {.group = whole});
    EXPECT_EQ(halves.mine->ranks(), here < 2 ? range(0, 2) : range(2, 4));
    EXPECT_EQ(sum_of_ranks(halves.mine), up_to(2));
    const auto even = split_group(whole, {{0, 2}, {1, 3}});
    EXPECT_EQ(even->ranks(), range(here % 2, 4, 2));
    refused([&] { new_group({4}, {.parent = whole}); }, "0 to 3");
    // The default world's own groups are numbered as if there were no others.
    const auto all = new_group();
    EXPECT_EQ(all->name(), "1");
    EXPECT_EQ(sum_over(all), up_to(4));
  });
}

TEST(CreateGroup, GoesOnWithoutExcludedRanks) {
  const auto store = std::make_shared<HashStore>();
  without_world(3, [&](int rank) {
    const auto group = create_group(member(store, rank, 3, "shrinking"));
    if (rank == 1) return destroy_process_group(group);
    const auto rest = shrink_group({1}, {.group = group});
    EXPECT_EQ(rest->name(), "shrinking");
    EXPECT_EQ(get_rank(rest), rank / 2);
    EXPECT_EQ(sum_of_ranks(rest), up_to(2));
    refused([&] { get_rank(group); }, "destroyed");
  });
}

TEST(CreateGroup, AnAbortEndsItsWorldOnly) {
  const auto store = std::make_shared<HashStore>();
  std::latch aborted(2);
  world(2, [&](int rank) {
    const auto group = create_group(member(store, rank, 2, "broken"));
    abort_process_group(group, "enough");
    aborted.arrive_and_wait();
    refused([&] { sum_of_ranks(group); }, "destroyed");
    EXPECT_EQ(sum_over({}), 3);
  });
}

TEST(CreateGroup, RefusesWrongOptionsWithTheLineOfTheCall) {
  const auto store = std::make_shared<HashStore>();
  refused([] { create_group({.rank = 0, .size = 1, .name = "a"}); }, "a store is needed");
  refused([] { create_group({.rank = 0, .size = 1, .name = "a"}); }, "create_group_test.cpp");
  refused([&] { create_group({.store = store, .size = 1, .name = "a"}); }, "rank must be given");
  refused([&] { create_group({.store = store, .rank = 0, .name = "a"}); }, "size must be given");
  refused([&] { create_group(member(store, 0, 0, "a")); }, "size must be given and positive");
  refused([&] { create_group(member(store, -1, 2, "a")); }, "rank must be given and not negative");
  refused([&] { create_group(member(store, 2, 2, "a")); }, "rank is 2, ranks of a group of 2 are 0 to 1");
  refused([&] { create_group(member(store, 0, 1, "")); }, "a name is needed");
  refused([&] { create_group(member(store, 0, 1, "a/b")); }, "use letters");
  refused([&] { create_group(member(store, 0, 1, "7")); }, "not digits alone");
  refused([&] { create_group(member(store, 0, 1, "default_pg")); }, "default world's name");
  refused(
      [&] { create_group({.store = store, .rank = 0, .size = 1, .name = "a", .timeout = Milliseconds(0)}); },
      "must be positive");
  EXPECT_EQ(store->num_keys(), 0);
  const auto group = create_group(member(store, 0, 1, "a"));
  refused([&] { create_group(member(std::make_shared<HashStore>(), 0, 1, "a")); }, "named \"a\" already");
  destroy_process_group(group);
}

TEST(CreateGroup, NamesTheRanksThatDidNotCome) {
  const auto store = std::make_shared<HashStore>();
  for (const char* backend : {"", "host"}) {
    const auto failure = caught([&] {
      create_group({.store = store,
                    .rank = 0,
                    .size = 3,
                    .name = std::string("lonely") + backend,
                    .backend = backend,
                    .timeout = Milliseconds(50)});
    });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
    EXPECT_TRUE(says(failure, "create_group")) << failure.message;
    EXPECT_TRUE(says(failure, "ranks 1")) << failure.message;
  }
}

TEST(CreateGroup, NotifiesTheOthersThatASizeDiffers) {
  const auto store = std::make_shared<HashStore>();
  without_world(2, [&](int rank) {
    const auto failure = caught([&] { create_group(member(store, rank, 2 + rank, "torn")); });
    EXPECT_TRUE(says(failure, "the same on all ranks")) << failure.message;
    EXPECT_TRUE(says(failure, "create_group")) << failure.message;
  });
}

TEST(CreateGroup, KeepsItsKeysUnderItsName) {
  const auto store = std::make_shared<HashStore>();
  const auto part = std::make_shared<PrefixStore>("job", store);
  without_world(2, [&](int rank) {
    const auto group = create_group(member(part, rank, 2, "kept"));
    group->store()->set("mine/" + std::to_string(rank), "x");
    barrier({.group = group});
    EXPECT_TRUE(store->check(std::vector<std::string>{"job/kept/mine/0", "job/kept/mine/1"}));
  });
  for (const auto& key : store->list_keys()) EXPECT_TRUE(key.starts_with("job/kept/")) << key;
}

TEST(CreateGroup, ARankThatThrowsIsNamedToTheOthersOfTheGroup) {
  const auto store = std::make_shared<HashStore>();
  Failure seen;
  EXPECT_THROW(without_world(2,
                             [&](int rank) {
                               const auto group = create_group(member(store, rank, 2, "told"));
                               if (rank == 1) throw std::runtime_error("no more data");
                               seen = caught([&] { barrier({.group = group}); });
                             }),
               std::runtime_error);
  EXPECT_EQ(seen.kind, ErrorKind::kPeerLost) << seen.message;
  EXPECT_TRUE(says(seen, "no more data")) << seen.message;
}

}  // namespace
}  // namespace lockstep
