// Many collectives as one.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

// Tensors of two types, one not contiguous, one empty.
std::vector<at::Tensor> mixture(int rank) {
  return {sample(rank, {3}, at::kFloat), sample(rank, {2, 5}, at::kLong),
          sample(rank, {4, 2}, at::kFloat).t().contiguous().t(), at::empty({0}),
          sample(rank, {}, at::kFloat)};
}

void expect_sums(const std::vector<at::Tensor>& tensors, int n) {
  for (std::size_t i = 0; i < tensors.size(); ++i)
    expect_equal(tensors[i], reduced([&](int r) { return mixture(r)[i]; }, n, ReduceOp::kSum));
}

TEST(CoalescedCalls, ReduceAListInOneOperationPerType) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (const bool async : {false, true}) {
        const auto before = default_group()->sequence_number();
        auto tensors = mixture(rank);
        const auto work = all_reduce_coalesced(tensors, {.async_op = async});
        work.wait();
        expect_sums(tensors, n);
        EXPECT_EQ(default_group()->sequence_number(), before + 1);
        EXPECT_EQ(work.op_type(), OpType::kAllReduceCoalesced);
        EXPECT_EQ(work.result().size(), tensors.size());
        auto scaled = mixture(rank);
        all_reduce_coalesced(scaled, {.op = ReduceOp::premul_sum(2)});
        for (std::size_t i = 0; i < scaled.size(); ++i) expect_equal(scaled[i], tensors[i] * 2);
      }
    });
  }
}

TEST(CoalescedCalls, GatherAListOfLists) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (const bool async : {false, true}) {
        std::vector<std::vector<at::Tensor>> lists;
        for (int r = 0; r < n; ++r) {
          lists.emplace_back();
          for (const auto& tensor : mixture(r)) lists.back().push_back(at::empty_like(tensor));
        }
        all_gather_coalesced(lists, mixture(rank), {.async_op = async}).wait();
        for (int r = 0; r < n; ++r) {
          const auto sent = mixture(r);
          for (std::size_t i = 0; i < sent.size(); ++i)
            expect_equal(lists[static_cast<std::size_t>(r)][i], sent[i]);
        }
      }
    });
  }
}

TEST(CoalescingScope, MakesOneOperationOfManyAllReduces) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      const auto before = default_group()->sequence_number();
      auto tensors = mixture(rank);
      {
        CoalescingScope scope;
        for (const auto& tensor : tensors) all_reduce(tensor);
      }  // launched and over
      expect_sums(tensors, n);
      EXPECT_EQ(default_group()->sequence_number(), before + 1);
      auto others = mixture(rank);
      CoalescingScope scope({.async_op = true});
      for (const auto& tensor : others) all_reduce(tensor);
      const auto work = scope.launch();
      work.wait();
      expect_sums(others, n);
      EXPECT_EQ(work.op_type(), OpType::kCoalesced);
      EXPECT_EQ(work.result().size(), others.size());
      all_reduce(others[0]);  // outside again
    });
  }
}

TEST(CoalescingScope, MakesOneOperationOfManyGathersOrScatters) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      const auto a = [](int r) { return sample(r, {2, 3}, at::kFloat); };
      const auto b = [](int r) { return sample(r + 5, {4}, at::kFloat); };
      std::vector<at::Tensor> all_a, all_b;
      for (int r = 0; r < n; ++r) {
        all_a.push_back(a(r));
        all_b.push_back(b(r));
      }
      auto concatenated = at::empty({2 * n, 3}), strided = at::empty({3, 2 * n}).t(),
           stacked = at::empty({n, 4});
      {
        CoalescingScope scope;
        all_gather_into_tensor(concatenated, a(rank));
        all_gather_into_tensor(strided, a(rank));
        all_gather_into_tensor(stacked, b(rank));
      }
      expect_equal(concatenated, at::cat(all_a));
      expect_equal(strided, at::cat(all_a));
      expect_equal(stacked, at::stack(all_b));
      const auto wide = [&](int r) { return sample(r, {n, 3}, at::kFloat); };
      const auto tall = [&](int r) { return sample(r + 1, {2 * n}, at::kFloat); };
      auto row = at::empty({3}), pair = at::empty({2});
      {
        CoalescingScope scope({.async_op = true});
        reduce_scatter_tensor(row, wide(rank), {.op = ReduceOp::kMax});
        reduce_scatter_tensor(pair, tall(rank), {.op = ReduceOp::kMax});
        scope.launch().wait();
      }
      expect_equal(row, reduced(wide, n, ReduceOp::kMax)[rank]);
      expect_equal(pair, reduced(tall, n, ReduceOp::kMax).view({n, 2})[rank]);
    });
  }
}

TEST(CoalescingScope, RefusesWhatItCannotCollect) {
  world(2, [](int) {
    auto tensor = at::ones({2});
    {
      CoalescingScope scope;
      const auto usage = [](const auto& fn, const std::string& part) {
        const auto error = caught(fn);
        EXPECT_EQ(error.kind, ErrorKind::kUsage) << error.message;
        EXPECT_TRUE(says(error, part)) << error.message;
      };
      const auto collected = all_reduce(tensor);
      usage([&] { collected.wait(); }, "launch()");
      usage([&] { collected.done(); }, "launch()");
      usage([&] { collected.result(); }, "launch()");
      usage([&] { collected.get_future(); }, "launch()");
      usage([&] { CoalescingScope nested; }, "open on this thread already");
      usage([&] { barrier(); }, "only all_reduce");
      usage([&] { broadcast(tensor, {.src = 0}); }, "only all_reduce");
      usage([&] { isend(tensor, {.dst = 0}); }, "only all_reduce");
      usage([&] { all_reduce(tensor.to_sparse()); }, "only all_reduce");
      usage([&] { all_reduce(tensor, {.op = ReduceOp::kMax}); }, "one kind");
      usage([&] { all_gather_into_tensor(at::empty({4}), tensor); }, "one kind");
    }
    expect_equal(tensor, at::full({2}, 2.0f));
    CoalescingScope empty;
    EXPECT_TRUE(empty.launch().done());
    EXPECT_EQ(caught([&] { empty.launch(); }).kind, ErrorKind::kUsage);
    EXPECT_EQ(caught([] { all_reduce_coalesced({}); }).kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(caught([&] { all_gather_coalesced({{tensor}}, {tensor}); }), "1 lists"));
    EXPECT_TRUE(says(caught([&] { all_gather_coalesced({{tensor}, {}}, {tensor}); }), "0 tensors"));
  });
}

TEST(CoalescingScope, RefusesTensorsThatShareMemoryAndRunsTheOthers) {
  world(2, [](int rank) {
    auto whole = at::ones({4, 4}), apart = at::ones({2}), columns = at::ones({4, 4});
    {
      CoalescingScope scope;
      all_reduce(whole[0]);
      all_reduce(whole[2]);
      all_reduce(whole[1]);
      all_reduce(apart);
      const auto column = columns.narrow(1, 0, 1);
      all_reduce(column);
      all_reduce(columns.narrow(1, 1, 1));
      refused([&] { all_reduce(apart); }, "shares memory");
      refused([&] { all_reduce(whole[2]); }, "shares memory");
      refused([&] { all_reduce(whole.narrow(0, 2, 2)); }, "coalescing_test.cpp:");
      refused([&] { all_reduce(whole); }, "shares memory");
      refused([&] { all_reduce(column); }, "shares memory");
      all_reduce(whole[3]);
    }
    expect_equal(whole, at::full({4, 4}, 2.0f));
    expect_equal(apart, at::full({2}, 2.0f));
    auto gathered = at::empty({2, 3}), other = at::empty({2, 3}), mine = at::full({3}, rank + 1.0f);
    {
      CoalescingScope scope;
      all_gather_into_tensor(gathered, mine);
      all_gather_into_tensor(other, mine);  // read twice
      refused([&] { all_gather_into_tensor(at::empty({2, 3}), gathered[1]); }, "shares memory");
      refused([&] { all_gather_into_tensor(gathered, at::ones({3})); }, "shares memory");
    }
    expect_equal(other, gathered);
    EXPECT_EQ(gathered[1][2].item<float>(), 2);
    refused([&] { all_gather_coalesced({{mine}, {mine}}, {at::ones({3})}); }, "share memory");
  });
}

TEST(CoalescingScope, ScopesOfTwoGroupsMayEndInAnyOrder) {
  world(2, [](int) {
    const auto other = new_group({0, 1});
    auto a = at::ones({2}), b = at::ones({3}), c = at::ones({4});
    CoalescingScope first, second({.group = other});
    all_reduce(a);
    first.launch();
    EXPECT_EQ(a[0].item<float>(), 2);
    all_reduce(b, {.group = other});  // still collected
    EXPECT_EQ(b[0].item<float>(), 1);
    second.launch();
    EXPECT_EQ(b[0].item<float>(), 2);
    all_reduce(c);
    all_reduce(c, {.group = other});
    EXPECT_EQ(c[0].item<float>(), 4);
  });
}

TEST(CoalescingScope, LaunchesNothingWhileAnExceptionUnwinds) {
  world(2, [](int rank) {
    auto tensor = at::ones({2});
    const auto before = default_group()->sequence_number();
    try {
      CoalescingScope scope;
      all_reduce(tensor);
      throw std::runtime_error("on one rank only, say");
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(default_group()->sequence_number(), before);
    all_reduce(tensor.fill_(rank + 1));
    expect_equal(tensor, at::full({2}, 3.0f));
  });
}

}  // namespace
}  // namespace lockstep
