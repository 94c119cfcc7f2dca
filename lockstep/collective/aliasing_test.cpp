// Tensors of one call that share memory, and calls that only one rank refuses.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <vector>

#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;
using Tensors = std::vector<at::Tensor>;

// Small enough to travel with the call, and large enough to be copied from its own memory.
constexpr std::int64_t kNumels[] = {3, 100'000};

at::Tensor filled(std::int64_t numel, int value) {
  return at::full({numel}, static_cast<float>(value));
}

// One tensor per rank: rows of one piece of memory, or each by itself.
Tensors list_of(int n, std::int64_t numel, bool one_piece) {
  if (one_piece) return at::zeros({n, numel}).unbind(0);
  Tensors list;
  for (int r = 0; r < n; ++r) list.push_back(at::zeros({numel}));
  return list;
}

template <class Check>
void for_every_list(int n, const Check& check) {
  for (const auto numel : kNumels)
    for (const bool one_piece : {true, false})
      for (const bool async : {true, false}) check(list_of(n, numel, one_piece), numel, async);
}

TEST(Aliasing, TheInputOfAnAllGatherMayBeOneOfItsOutputs) {
  world(3, [](int rank) {
    for_every_list(3, [&](const Tensors& outs, std::int64_t numel, bool async) {
      const auto own = static_cast<std::size_t>(rank);
      outs[own].fill_(rank + 1);
      all_gather(outs, outs[own], {.async_op = async}).wait();
      for (int r = 0; r < 3; ++r) expect_equal(outs[static_cast<std::size_t>(r)], filled(numel, r + 1));
      // Another rank's place: what was there is what is sent.
      const auto next = outs[(own + 1) % 3];
      all_gather(outs, next, {.async_op = async}).wait();
      for (int r = 0; r < 3; ++r)
        expect_equal(outs[static_cast<std::size_t>(r)], filled(numel, (r + 1) % 3 + 1));
    });
    const auto whole = at::arange(12).add(100 * rank);
    const auto sent = whole.narrow(0, 2, 4).clone();
    all_gather_into_tensor(whole, whole.narrow(0, 2, 4));
    expect_equal(whole, at::cat({sent - 100 * rank, sent - 100 * (rank - 1), sent - 100 * (rank - 2)}));
  });
}

TEST(Aliasing, TheTensorOfTheRootMayBeItsOwnListEntry) {
  world(3, [](int rank) {
    for_every_list(3, [&](const Tensors& list, std::int64_t numel, bool async) {
      const auto none = Tensors{};
      for (int root = 0; root < 3; ++root) {
        const bool is_root = rank == root;
        const auto mine = list[static_cast<std::size_t>(rank)];
        mine.fill_(rank + 5);
        gather(mine, is_root ? list : none, {.dst = root, .async_op = async}).wait();
        for (int r = 0; is_root && r < 3; ++r)
          expect_equal(list[static_cast<std::size_t>(r)], filled(numel, r + 5), "gather");
        for (int r = 0; r < 3; ++r) list[static_cast<std::size_t>(r)].fill_(10 * r + root);
        scatter(mine, is_root ? list : none, {.src = root, .async_op = async}).wait();
        expect_equal(mine, filled(numel, 10 * rank + root), "scatter");
      }
    });
  });
}

TEST(Aliasing, ExchangesAndReductionsMayWriteOverTheirInputs) {
  world(3, [](int rank) {
    for_every_list(3, [&](const Tensors& list, std::int64_t numel, bool async) {
      const auto fill = [&] {
        for (int r = 0; r < 3; ++r) list[static_cast<std::size_t>(r)].fill_(10 * rank + r);
      };
      fill();
      all_to_all(list, list, {.async_op = async}).wait();
      for (int r = 0; r < 3; ++r)
        expect_equal(list[static_cast<std::size_t>(r)], filled(numel, 10 * r + rank));
      fill();
      const auto mine = list[static_cast<std::size_t>(rank)];
      reduce_scatter(mine, list, {.async_op = async}).wait();
      expect_equal(mine, filled(numel, 30 + 3 * rank));
      fill();
      auto rows = at::stack(list);
      all_to_all_single(rows, rows, {.async_op = async}).wait();
      for (int r = 0; r < 3; ++r) expect_equal(rows[r], filled(numel, 10 * r + rank));
      auto splits = at::stack(list);
      all_to_all_single(splits, splits,
                        {.output_split_sizes = {1, 1, 1}, .input_split_sizes = {1, 1, 1}, .async_op = async})
          .wait();
      expect_equal(splits, rows);
      auto part = at::stack(list);
      reduce_scatter_tensor(part[0], part, {.async_op = async}).wait();
      expect_equal(part[0], filled(numel, 30 + 3 * rank));
    });
  });
}

TEST(Aliasing, ABroadcastFillsAnExpandedTensorWithWhatItCanHold) {
  world(2, [](int rank) {
    for (const bool async : {true, false}) {
      auto column = at::full({2, 1}, static_cast<float>(rank));
      broadcast(column.expand({2, 4}), {.src = 1, .async_op = async}).wait();
      expect_equal(column, at::ones({2, 1}));
      // Four different numbers do not fit into one element: the rank that asked for it gets an error, after
      // the others were served.
      const auto four = rank == 0 ? at::arange(4) : at::zeros({1}, at::kLong).expand({4});
      const auto run = [&] { broadcast(four, {.src = 0, .async_op = async}).wait(); };
      if (rank == 0) {
        run();
      } else {
        refused(run, "share memory");
      }
      EXPECT_EQ(sum_over({}), 3.0f) << "the group goes on";
    }
  });
}

TEST(Aliasing, ACoalescedCallTakesOneTensorTwice) {
  world(2, [](int rank) {
    const auto tensor = filled(5, rank + 1), other = filled(3, rank);
    all_reduce_coalesced({tensor, other, tensor});
    expect_equal(tensor, filled(5, 3));
    expect_equal(other, filled(3, 1));
    // Which of two different results stays would be chance.
    const Tensors pair = rank == 0 ? Tensors{tensor, tensor} : Tensors{filled(5, 1), filled(5, 2)};
    const auto run = [&] { all_reduce_coalesced(pair); };
    if (rank == 0) {
      refused(run, "share memory");
    } else {
      run();
    }
    EXPECT_EQ(sum_over({}), 3.0f) << "the group goes on";
  });
}

TEST(Aliasing, TwoOutputsThatShareMemoryAreRefusedOnEveryRank) {
  world(2, [](int) {
    const auto one = at::empty({4});
    refused([&] { all_gather({one, one}, at::ones({4})); }, "share memory");
    refused([&] { all_to_all({one, one}, {at::ones({4}), at::ones({4})}); }, "share memory");
    EXPECT_EQ(sum_over({}), 3.0f) << "the group goes on";
  });
}

// Without the number that both compare, rank 0's second call would be taken for the first of the others.
TEST(Refusal, OfOneRankAloneIsReportedToAllByItsNextCall) {
  world(3, [](int rank) {
    if (rank == 0) refused([] { all_reduce(at::Tensor()); }, "undefined");
    const auto failure = caught([] { all_reduce(at::ones({4})); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage) << failure.message;
    EXPECT_TRUE(says(failure, "rank 0") && says(failure, "refused all_reduce at aliasing_test.cpp:"))
        << failure.message;
  });
  world(2, [](int rank) {
    const auto list = rank == 0 ? Tensors{at::empty({2}), at::empty({3})} : Tensors{};
    if (rank == 0) refused([&] { gather(at::ones({2}), list, {.dst = 0}); }, "gather_list[1]");
    const auto failure = caught([&] {
      if (rank == 1) gather(at::ones({2}), {}, {.dst = 0});
      barrier();
    });
    EXPECT_TRUE(says(failure, "refused gather at aliasing_test.cpp:")) << failure.message;
  });
}

TEST(Refusal, OnEveryRankLeavesThemInStep) {
  world(3, [](int) {
    for (int i = 0; i < 20; ++i) refused([] { broadcast(at::ones({2})); }, "neither");
    EXPECT_EQ(sum_over({}), 6.0f);
  });
}

}  // namespace
}  // namespace lockstep
