// Communicators beside each other: of subsets of the ranks, with and without a parent, many of them.
#include <filesystem>

#include "lockstep/engine/engine_contract_case.h"

namespace lockstep::comm {
namespace {

std::vector<int> reversed_evens(int size) {
  std::vector<int> members;
  for (int r = (size - 1) / 2 * 2; r >= 0; r -= 2) members.push_back(r);
  return members;
}

TEST_P(EngineContract, SubsetsOfTheRanksInAnyOrderFormCommunicators) {
  for (const bool parent : {false, true}) {
    on_all_sizes([&](Rank& rank) {
      const auto members = reversed_evens(rank.size());
      if (rank.rank() % 2 == 0) {
        const auto sub = rank.sub("evens", members, parent);
        for (const std::uint64_t count : {3u, 500u, 60'000u}) {
          for (const auto kind :
               {LOCKSTEP_ALL_REDUCE, LOCKSTEP_ALL_GATHER, LOCKSTEP_BROADCAST, LOCKSTEP_ALL_TO_ALL}) {
            if (engine().offers(kind))
              check(sub->end, {.kind = kind, .count = count, .posted = count == 500});
            if (has_alloc() && engine().offers(kind))
              check(sub->end, {.kind = kind, .count = count, .shared = true});
          }
        }
      }
      check(rank, {.kind = LOCKSTEP_ALL_REDUCE, .count = 100});
    });
  }
}

TEST_P(EngineContract, AChildOutlivesItsParent) {
  on_ranks(3, [&](Rank& rank) {
    const auto sub = rank.sub("child", {2, 0, 1}, true);
    EXPECT_EQ(rank.barrier(), LOCKSTEP_OK);
    rank.destroy();
    check(sub->end, {.kind = LOCKSTEP_ALL_REDUCE, .count = 50'000, .posted = true});
    check(sub->end, {.kind = LOCKSTEP_ALL_REDUCE, .count = 5});
  });
}

TEST_P(EngineContract, AStuckCommunicatorDoesNotHoldUpAnother) {
  for (const bool parent : {false, true}) {
    on_ranks(2, [&](Rank& rank) {
      const auto other = rank.sub("other", {0, 1}, parent);
      PlainOp stuck(rank, LOCKSTEP_ALL_REDUCE, 40'000);
      lockstep_handle* pending = rank.rank() == 0 ? rank.post(stuck.op) : nullptr;
      for (int i = 0; i < 30; ++i)
        check(other->end,
              {.kind = LOCKSTEP_ALL_REDUCE, .count = i % 2 == 0 ? 7u : 30'000u, .posted = i % 3 != 0});
      if (rank.rank() == 0) {
        EXPECT_EQ(rank.table().test(pending), LOCKSTEP_PENDING);
      }
      rank.meet();
      if (rank.rank() == 1) pending = rank.post(stuck.op);
      EXPECT_EQ(rank.finish(pending), LOCKSTEP_OK) << rank.error();
    });
  }
}

TEST_P(EngineContract, ABrokenChildLeavesItsParentWell) {
  on_ranks(3, [&](Rank& rank) {
    const auto sub = rank.sub("child", {0, 1, 2}, true);
    if (rank.rank() == 1) rank.table().comm_abort(sub->end.comm(), "only the child");
    EXPECT_EQ(sub->end.barrier(), LOCKSTEP_ABORTED);
    EXPECT_EQ(rank.failure().status, LOCKSTEP_OK);
    check(rank, {.kind = LOCKSTEP_ALL_REDUCE, .count = 30'000});
  });
}

std::size_t n_threads() {
  std::size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) ++n;
  return n;
}

TEST_P(EngineContract, TwoHundredCommunicatorsNeedFewThreads) {
  if (GetParam().max_idle_threads == 0) GTEST_SKIP() << "not asked of this engine";
  on_ranks(2, [&](Rank& rank) {
    const std::size_t before = n_threads();
    std::vector<std::unique_ptr<Rank::Member>> subs;
    for (int i = 0; i < 200; ++i) {
      subs.push_back(rank.sub(base::cat("sub", i), {1, 0}, true));
      PlainOp plain(subs.back()->end, LOCKSTEP_ALL_REDUCE, 2000);
      ASSERT_EQ(subs.back()->end.post_and_wait(plain.op), LOCKSTEP_OK) << subs.back()->end.error();
    }
    rank.meet();
    EXPECT_LE(n_threads(), before + 2 * static_cast<std::size_t>(GetParam().max_idle_threads));
    rank.meet();
    for (const auto& sub : subs) check(sub->end, {.kind = LOCKSTEP_ALL_REDUCE, .count = 10});
  });
}

}  // namespace
}  // namespace lockstep::comm
