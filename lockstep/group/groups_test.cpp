// Sub-groups over ranks as threads: who is in them, what they are called, how they are divided.
#include "lockstep/group/groups.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <latch>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/slow_wait_testing.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

float expected_sum(const std::vector<int>& ranks) {
  return static_cast<float>(std::accumulate(ranks.begin(), ranks.end(), static_cast<int>(ranks.size())));
}

TEST(NewGroup, ReducesOverItsMembersOnly) {
  for (const int n : {2, 3, 4, 8}) {
    run_threads(n, [n](int rank) {
      const auto even = new_group(range(0, n, 2)), odd = new_group(range(1, n, 2)), all = new_group();
      const auto mine = rank % 2 == 0 ? even : odd, other = rank % 2 == 0 ? odd : even;
      EXPECT_EQ(mine->ranks(), range(rank % 2, n, 2));
      EXPECT_EQ(get_rank(mine), rank / 2);
      EXPECT_EQ(get_world_size(mine), static_cast<int>(mine->ranks().size()));
      EXPECT_EQ(sum_over(mine), expected_sum(mine->ranks()));
      EXPECT_EQ(sum_over(all), expected_sum(range(0, n)));
      EXPECT_EQ(get_rank(other), -1);
      EXPECT_EQ(get_world_size(other), -1);
      EXPECT_FALSE(is_group_member(other));
      EXPECT_EQ(other, non_member_group());
    });
  }
}

TEST(NewGroup, SortsTheRanksAndTranslatesThem) {
  run_threads(4, [](int rank) {
    const auto group = new_group({3, 0, 2});
    if (rank == 1) {
      refused([&] { get_group_rank(group, 0); }, "not a member");
      refused([&] { get_global_rank(group, 0); }, "not a member");
      refused([&] { get_process_group_ranks(group); }, "not a member");
      refused([&] { get_backend(group); }, "not a member");
      refused([&] { get_backend_config(group); }, "not a member");
      return;
    }
    EXPECT_EQ(get_process_group_ranks(group), (std::vector<int>{0, 2, 3}));
    for (const int in_group : {0, 1, 2}) {
      const int in_world = group->ranks()[static_cast<std::size_t>(in_group)];
      EXPECT_EQ(get_group_rank(group, in_world), in_group);
      EXPECT_EQ(get_global_rank(group, in_group), in_world);
    }
    EXPECT_EQ(get_group_rank({}, 3), 3);
    EXPECT_EQ(get_global_rank({}, 3), 3);
    refused([&] { get_group_rank(group, 1); }, "0 2 3");
    refused([&] { get_global_rank(group, 3); }, "0 to 2");
    refused([&] { get_global_rank(group, -1); }, "0 to 2");
    EXPECT_EQ(get_backend(group), "host");
    EXPECT_EQ(get_backend_config(group), "cpu:host");
  });
}

TEST(NewGroup, RejectsAnInvalidGroupAndUsesUpNoNumber) {
  run_threads(2, [](int) {
    refused([] { new_group(std::vector<int>{}); }, "empty");
    refused([] { new_group({0, 0}); }, "rank 0 is in the list twice");
    refused([] { new_group({0, 2}); }, "rank 2 is in the list; ranks of the world are 0 to 1");
    refused([] { new_group({-1, 0}); }, "rank -1");
    refused([] { new_group({0, 1}, {.timeout = Milliseconds(0)}); }, "timeout");
    refused([] { new_group({0, 1}, {.name = "a/b"}); }, "a/b");
    refused([] { new_group({0, 1}, {.name = "7"}); }, "digits alone");
    refused([] { new_group({0, 1}, {.backend = "cpu:"}); }, "one pair");
    refused([] { new_group({5}); }, "groups_test.cpp:");
    EXPECT_EQ(caught([] { new_group({0, 1}, {.backend = "mpi"}); }).kind, ErrorKind::kUnsupported);
    EXPECT_EQ(get_pg_count(), 1);
    EXPECT_EQ(new_group({0, 1})->name(), "1");
  });
  refused([] { new_group({0}); }, "not initialised");
  refused([] { abort_process_group(); }, "not initialised");
}

TEST(NewGroup, IsNumberedOnEveryRankIncludingNonMembers) {
  run_threads(3, [](int rank) {
    EXPECT_EQ(default_group()->name(), "0");
    const auto first = new_group({0, 1}), second = new_group({1, 2});
    EXPECT_EQ(get_pg_count(), 3);
    if (rank < 2) {
      EXPECT_EQ(first->name(), "1");
    }
    if (rank > 0) {
      EXPECT_EQ(second->name(), "2");
    }
    if (rank > 0) {
      EXPECT_EQ(get_group_by_name("2"), second);
    }
    if (rank == 0) refused([] { get_group_by_name("2"); }, "\"2\"");
    EXPECT_EQ(get_group_by_name("0"), default_group());
  });
}

TEST(NewGroup, MayBeNamedButNotTwice) {
  run_threads(2, [](int) {
    const auto named = new_group({0, 1}, {.desc = "the lot", .name = "data:parallel"});
    EXPECT_EQ(named->name(), "data:parallel");
    EXPECT_EQ(named->desc(), "the lot");
    refused([] { new_group({0, 1}, {.name = "data:parallel"}); }, "there is a group named \"data:parallel\"");
    EXPECT_EQ(sum_over(named), 3);
    destroy_process_group(named);
    EXPECT_EQ(sum_over(new_group({0, 1}, {.name = "data:parallel"})), 3);
    const auto plain = new_group();
    EXPECT_EQ(plain->desc(), "undefined");
    plain->set_desc("now it is");
    EXPECT_EQ(plain->desc(), "now it is");
  });
}

TEST(NewGroup, HasATimeoutASequenceAndAStoreOfItsOwn) {
  run_threads(2, [](int rank) {
    const auto group = new_group({0, 1}, {.timeout = Milliseconds(12'345)}), other = new_group();
    EXPECT_EQ(group->timeout(), Milliseconds(12'345));
    EXPECT_EQ(other->timeout(), default_group()->timeout());
    refused([&] { group->set_timeout(Milliseconds(-1)); }, "positive");
    sum_over(group);
    sum_over(group);
    EXPECT_EQ(group->sequence_number(), 2u);
    EXPECT_EQ(other->sequence_number(), 0u);
    if (rank == 0) group->store()->set("key", "mine");
    barrier();
    EXPECT_EQ(to_text(group->store()->get("key")), "mine");
    const std::string key[] = {"key"};
    EXPECT_FALSE(other->store()->check(key));
    EXPECT_FALSE(default_group()->store()->check(key));
    const std::string below[] = {base::cat(group->name(), "/key")};
    EXPECT_TRUE(default_group()->store()->check(below));
  });
}

TEST(NewGroup, OfOneRankNeedsNoOtherRank) {
  run_threads(2, [](int rank) {
    const auto zero = new_group({0}), one = new_group({1});
    const auto mine = rank == 0 ? zero : one;
    EXPECT_EQ(mine->size(), 1);
    EXPECT_EQ(mine->ranks(), std::vector<int>{rank});
    EXPECT_EQ(sum_over(mine), static_cast<float>(rank + 1));
  });
}

TEST(NewGroup, WithLocalSynchronizationIsCalledByItsMembersAlone) {
  run_threads(4, [](int rank) {
    if (rank == 3) {
      refused([] { new_group({0, 1}, {.use_local_synchronization = true}); }, "only members call");
      return;
    }
    std::set<std::string> names;
    for (int round = 0; round < 3; ++round) {
      // Rank 1 has made more groups than the others, which must not matter.
      if (rank < 2) {
        EXPECT_EQ(sum_over(new_group({0, 1}, {.use_local_synchronization = true})), 3);
      }
      if (rank > 0) {
        const auto group = new_group({1, 2}, {.use_local_synchronization = true});
        EXPECT_EQ(sum_over(group), 5);
        EXPECT_EQ(group->name().size(), 40u);  // SHA-1 in hexadecimal
        EXPECT_TRUE(names.insert(group->name()).second);
      }
    }
    EXPECT_EQ(get_pg_count(), 1);
  });
}

TEST(NewGroup, MadeInAnotherOrderIsAnErrorOnEveryRankNotAHang) {
  run_threads(3, [](int rank) {
    const auto failure = caught([&] {
      new_group(rank == 0 ? std::vector<int>{0, 1} : std::vector<int>{0, 1, 2});
    });
    EXPECT_TRUE(failure.kind == ErrorKind::kUsage || failure.kind == ErrorKind::kPeerLost) << failure.message;
    EXPECT_TRUE(says(failure, "same order")) << failure.message;
    EXPECT_EQ(sum_over({}), 6);  // the world goes on
  });
}

TEST(NewGroup, OperationsOfDifferentGroupsDoNotWaitForEachOther) {
  run_threads(2, [](int rank) {
    const auto a = new_group(), b = new_group();
    auto first = at::ones({4}), second = at::ones({4});
    // Opposite orders: would deadlock on one queue.
    const auto one = all_reduce(first, {.group = rank == 0 ? a : b, .async_op = true});
    const auto two = all_reduce(second, {.group = rank == 0 ? b : a, .async_op = true});
    two.wait();
    one.wait();
    EXPECT_EQ(first[0].item<float>(), 2);
    EXPECT_EQ(second[0].item<float>(), 2);
  });
}

int count_in(const char* folder) {
  int n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

TEST(NewGroup, AThousandOfThemNeedNoMoreThreadsAndDescriptorsThanOne) {
  std::latch started(2), counted(2);
  run_threads(2, [&](int rank) {
    // One operation in flight starts what an engine starts once.
    auto tensor = at::ones({8});
    all_reduce(tensor, {.group = new_group(), .async_op = true}).wait();
    started.arrive_and_wait();
    const int threads = count_in("/proc/self/task"), files = count_in("/proc/self/fd");
    counted.arrive_and_wait();
    std::vector<Group> groups;
    std::vector<Work> works;
    for (int i = 0; i < 1000; ++i) groups.push_back(new_group());
    for (const auto& group : groups)
      works.push_back(all_reduce(at::ones({8}), {.group = group, .async_op = true}));
    for (const auto& work : works) EXPECT_EQ(work.wait() ? work.result()[0][7].item<float>() : 0, 2);
    if (rank == 0) {
      EXPECT_LE(count_in("/proc/self/task"), threads + 4);
      EXPECT_LE(count_in("/proc/self/fd"), files + 8);
    }
    barrier();
  });
}

TEST(CompletionHook, IsCalledForEveryOperationOnceAndOnlyOneIsAccepted) {
  run_threads(2, [](int) {
    const auto group = new_group();
    std::atomic<int> n{0}, last{0};
    group->register_on_completion_hook([&](const WorkInfo& info) {
      EXPECT_STREQ(info.op, "all_reduce");
      EXPECT_EQ(info.failure, nullptr);
      EXPECT_LE(info.started, info.finished);
      last = std::max<int>(last, static_cast<int>(info.sequence_number));
      ++n;
      throw std::runtime_error("logged, not thrown");
    });
    refused([&] { group->register_on_completion_hook([](const WorkInfo&) {}); }, "has one already");
    refused([&] { group->register_on_completion_hook(nullptr); }, "no function");
    all_reduce(at::ones({1}), {.group = group});
    all_reduce(at::ones({1}), {.group = group, .async_op = true}).wait();
    all_reduce(at::ones({1}));  // another group's
    EXPECT_FALSE(group->collectives_timing());
    group->enable_collectives_timing();
    EXPECT_TRUE(group->collectives_timing());
    EXPECT_GE(all_reduce(at::ones({1}), {.group = group}).duration(), 0);
    destroy_process_group(group);
    EXPECT_EQ(n, 3);
    EXPECT_EQ(last, 3);
  });
}

std::mutex warned_mutex;
std::vector<std::string> warned;  // guarded by warned_mutex

// Every kind of operation: a warning with its name and line, an empty Work, and the tensors as they were.
TEST(NonMember, CollectivesOnItWarnAndDoNothing) {
  set_log_sink([](LogLevel level, std::string_view text) {
    const std::lock_guard lock(warned_mutex);
    if (level == LogLevel::kWarn) warned.emplace_back(text);
  });
  run_threads(2, [](int rank) {
    const auto group = new_group({1});
    if (rank == 1) return;
    EXPECT_EQ(get_rank(group), -1);
    EXPECT_EQ(get_world_size(group), -1);
    const auto tensor = at::ones({2}), other = at::ones({2});
    const std::vector<at::Tensor> list{other}, pair{other, other};
    const std::vector<std::pair<const char*, std::function<Work()>>> calls{
        {"all_reduce", [&] { return all_reduce(tensor, {.group = group}); }},
        {"broadcast", [&] { return broadcast(tensor, {.src = 1, .group = group, .async_op = true}); }},
        {"reduce", [&] { return reduce(tensor, {.dst = 1, .group = group}); }},
        {"all_gather", [&] { return all_gather(list, tensor, {.group = group}); }},
        {"all_gather_into_tensor", [&] { return all_gather_into_tensor(other, tensor, {.group = group}); }},
        {"gather", [&] { return gather(tensor, {}, {.dst = 1, .group = group}); }},
        {"scatter", [&] { return scatter(tensor, {}, {.src = 1, .group = group}); }},
        {"reduce_scatter", [&] { return reduce_scatter(tensor, list, {.group = group}); }},
        {"reduce_scatter_tensor", [&] { return reduce_scatter_tensor(tensor, other, {.group = group}); }},
        {"all_to_all", [&] { return all_to_all(list, {tensor}, {.group = group}); }},
        {"all_to_all_single", [&] { return all_to_all_single(tensor, other, {.group = group}); }},
        {"barrier", [&] { return barrier({.group = group}); }},
        {"all_reduce_coalesced", [&] { return all_reduce_coalesced(pair, {.group = group}); }},
        {"send", [&] { return isend(tensor, {.dst = 1, .group = group}); }},
        {"recv", [&] { return irecv(tensor, {.src = 1, .group = group}); }},
    };
    for (const auto& [name, call] : calls) {
      const auto work = call();
      EXPECT_TRUE(work.done() && work.result().empty()) << name;
      const std::lock_guard lock(warned_mutex);
      ASSERT_EQ(warned.size(), 1u) << name;
      EXPECT_TRUE(warned[0].starts_with(std::string(name) + " (called at ") &&
                  warned[0].find("groups_test.cpp:") != std::string::npos &&
                  warned[0].find("not a member") != std::string::npos)
          << warned[0];
      warned.clear();
    }
    expect_equal(tensor, at::ones({2}));
    expect_equal(other, at::ones({2}));
    EXPECT_EQ(group->sequence_number(), 0u);
  });
  set_log_sink(nullptr);
}

TEST(Subgroups, DivideTheWorldIntoConsecutiveRanks) {
  run_threads(4, [](int rank) {
    const auto halves = new_subgroups(2);
    ASSERT_EQ(halves.all.size(), 2u);
    EXPECT_EQ(halves.mine, halves.all[static_cast<std::size_t>(rank / 2)]);
    EXPECT_EQ(halves.all[static_cast<std::size_t>(1 - rank / 2)], non_member_group());
    EXPECT_EQ(halves.mine->ranks(), range(rank / 2 * 2, rank / 2 * 2 + 2));
    EXPECT_EQ(sum_over(halves.mine), rank < 2 ? 3 : 7);
    EXPECT_EQ(new_subgroups(4).mine->size(), 4);
    EXPECT_EQ(new_subgroups(1).mine->size(), 1);
    refused([] { new_subgroups(0); }, "positive");
    refused([] { new_subgroups(5); }, "only 4 ranks");
    refused([] { new_subgroups(3); }, "does not divide");
    refused([] { new_subgroups(); }, "LOCAL_WORLD_SIZE");
  });
  ::setenv("LOCAL_WORLD_SIZE", "2", 1);
  run_threads(4, [](int) { EXPECT_EQ(new_subgroups().mine->size(), 2); });
  ::unsetenv("LOCAL_WORLD_SIZE");
}

TEST(Subgroups, DivideAGroupAmongItsMembers) {
  run_threads(5, [](int rank) {
    const auto odd_one_out = new_group({0, 1, 3, 4});
    if (rank == 2) return refused([&] { new_subgroups(2, {.group = odd_one_out}); }, "not a member");
    const auto pairs = new_subgroups(2, {.group = odd_one_out});
    EXPECT_EQ(pairs.mine->ranks(), rank < 2 ? (std::vector<int>{0, 1}) : (std::vector<int>{3, 4}));
    EXPECT_EQ(sum_over(pairs.mine), rank < 2 ? 3 : 9);
  });
}

TEST(Subgroups, ByEnumerationMayLeaveRanksOut) {
  run_threads(4, [](int rank) {
    const auto made = new_subgroups_by_enumeration({{3, 1}, {0}}, {.desc = "listed"});
    ASSERT_EQ(made.all.size(), 2u);
    if (rank == 2) {
      EXPECT_EQ(made.mine, non_member_group());
    }
    if (rank != 2) {
      EXPECT_EQ(made.mine->desc(), "listed");
    }
    if (rank % 2 == 1) {
      EXPECT_EQ(sum_over(made.mine), 6);
    }
    refused([] { new_subgroups_by_enumeration({}); }, "no list");
    refused([] { new_subgroups_by_enumeration({{0}, {}}); }, "empty");
    refused([] { new_subgroups_by_enumeration({{0, 1}, {1, 2}}); }, "rank 1 is in two lists");
    refused([] { new_subgroups_by_enumeration({{0, 4}}); }, "rank 4");
    EXPECT_EQ(get_pg_count(), 3);
    const auto other = new_group();
    refused([&] { new_subgroups_by_enumeration({{0}}, {.group = other}); }, "leave out the group");
  });
}

TEST(SplitGroup, TakesRanksOfTheParent) {
  run_threads(6, [](int rank) {
    const auto parent = new_group({1, 2, 3, 5}, {.timeout = Milliseconds(54'321), .desc = "some"});
    if (rank == 0 || rank == 4) {
      return refused([&] { split_group(parent, {{0}}); }, "not a member");
    }
    const auto mine = split_group(parent, {{3, 0}, {1}});
    if (rank == 3) {  // parent's rank 2 is in no list
      EXPECT_EQ(mine, non_member_group());
    } else if (rank == 2) {
      EXPECT_EQ(mine->ranks(), std::vector<int>{2});
      EXPECT_EQ(mine->desc(), "some:split:1");
    } else {
      EXPECT_EQ(mine->ranks(), (std::vector<int>{1, 5}));
      EXPECT_EQ(mine->desc(), "some:split:0");
      EXPECT_EQ(mine->timeout(), Milliseconds(54'321));
      EXPECT_EQ(sum_over(mine), 8);
      EXPECT_NE(mine->name(), split_group(parent, {{0, 3}})->name());
    }
    refused([&] { split_group(parent, {}); }, "no list");
    refused([&] { split_group(parent, {{}}); }, "empty");
    refused([&] { split_group(parent, {{0, 0}}); }, "twice");
    refused([&] { split_group(parent, {{0, 1}, {1}}); }, "two lists");
    refused([&] { split_group(parent, {{4}}); }, "0 to 3");
  });
}

// One rank makes a group while the other is in a collective: each waits for the other.
TEST(NewGroup, ThatMeetsACollectiveSaysWhichOneAndWhere) {
  run_threads(2, [](int rank) {
    sum_over({});
    if (rank == 1) return void(caught([] { all_reduce(at::ones({4})); }));
    const auto failure = caught([] { new_group({.timeout = Milliseconds(200)}); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
    EXPECT_TRUE(
        failure.message.starts_with("new_group: ") && says(failure, "did not join group \"1\" in time") &&
        says(failure, "last entered all_reduce(sum, f32, 4 elements) #2 at ") &&
        says(failure, "groups_test.cpp:") && says(failure, "of group \"0\", which this rank has not entered"))
        << failure.message;
    EXPECT_FALSE(says(failure, "board")) << failure.message;
    default_group()->abort("the test is over");
  });
}

TEST(NewGroup, ThatLastsSaysOnceWhoHasNotComeAndWhatItDoesInstead) {
  const SlowLines lines(Milliseconds(100));
  const std::string line = "slow: rank 0 waits for rank 1 (pid ";
  run_threads(2, [&](int rank) {
    sum_over({});
    if (rank == 1) {
      const auto said = lines.await(line);
      EXPECT_NE(said.find(" to join group \"1\"; on the group it is built on it last entered all_reduce("),
                std::string::npos)
          << said;
    }
    new_group();
  });
  EXPECT_EQ(lines.with(line).size(), 1u);
}

// Two ranks may count different numbers of messages; what they call a collective is alike, and the engine's
// words have the same number.
TEST(Messages, CarryTheSameNumberPerOperationOnAllRanks) {
  run_threads(3, [](int rank) {
    auto data = at::ones({2});
    if (rank == 0) send(data, {.dst = 1});
    if (rank == 1) recv(data, {.src = 0});
    const auto group = new_group();
    sum_over({});
    const auto failure = caught([&] { all_reduce(at::ones({rank == 2 ? 5 : 4})); });
    EXPECT_TRUE(says(failure, "all_reduce #2 of group \"0\"")) << failure.message;
    std::size_t n_numbers = 0;
    for (std::size_t at = 0; (at = failure.message.find(" #", at)) != std::string::npos; ++at, ++n_numbers)
      EXPECT_EQ(failure.message.substr(at, 4), " #2 ") << failure.message;
    EXPECT_EQ(n_numbers, 3u) << failure.message;
  });
}

}  // namespace
}  // namespace lockstep
