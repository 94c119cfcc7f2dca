// What callers may do wrong.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <string>
#include <vector>

#include "lockstep/base/detail/thread.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

// Argument errors are raised before anything is sent: the group goes on.
TEST(Arguments, AreCheckedOnEveryRankAndNameTheCaller) {
  world(2, [](int) {
    auto good = at::ones({4});
    const auto usage = [](const std::function<void()>& fn, const std::string& part) {
      const auto error = caught(fn);
      EXPECT_EQ(error.kind, ErrorKind::kUsage) << error.message;
      EXPECT_TRUE(says(error, part) && says(error, "arguments_test.cpp:") && says(error, "rank "))
          << error.message;
    };
    const auto unsupported = [](const std::function<void()>& fn, const std::string& part) {
      const auto error = caught(fn);
      EXPECT_EQ(error.kind, ErrorKind::kUnsupported) << error.message;
      EXPECT_TRUE(says(error, part)) << error.message;
    };
    usage([] { all_reduce(at::Tensor()); }, "undefined");
    unsupported([] { all_reduce(at::ones({2, 2}).to_sparse_csr()); }, "sparse");
    unsupported([] { all_reduce(at::empty({2}, at::kMeta)); }, "meta");
    unsupported([] { all_reduce(at::zeros({2}, at::kFloat8_e4m3fn)); }, "Float8_e4m3fn");
    usage([] { all_reduce(at::ones({2}, at::kInt), {.op = ReduceOp::kAvg}); }, "Int");
    usage([] { all_reduce(at::ones({2}), {.op = ReduceOp::kBor}); }, "BOR");
    usage([] { all_reduce(at::ones({2}), {.op = static_cast<ReduceOp::Kind>(12)}); }, "12");
    usage([] { all_reduce(at::ones({1}).expand({5})); }, "share memory");
    usage([&] { broadcast(good, {.src = 2}); }, "src is 2");
    usage([&] { broadcast(good, {.src = -1}); }, "src is -1");
    usage([&] { all_gather({at::empty({4})}, good); }, "1 tensors");
    usage([&] { all_gather({at::empty({5}), at::empty({5})}, good); }, "outputs[");
    usage([&] { all_gather({at::empty({4}), at::empty({4}, at::kInt)}, good); }, "Int");
    usage(
        [&] {
          const auto base = at::empty({6});
          all_gather({base.narrow(0, 0, 4), base.narrow(0, 2, 4)}, good);
        },
        "share memory");
    usage([&] { all_gather_into_tensor(at::empty({7}), good); }, "output has sizes");
    usage([&] { all_gather_into_tensor(at::empty({8}, at::kDouble), good); }, "Double");
    usage([&] { reduce_scatter_tensor(at::empty({3}), at::empty({8})); }, "input has sizes");
    usage([&] { reduce_scatter(at::empty({4}), {good}); }, "1 tensors");
    usage(
        [&] {
          reduce_scatter(at::empty({4}, at::kComplexFloat), {at::ones({4, 2}), at::ones({4, 2})},
                         {.op = ReduceOp::kMax});
        },
        "complex");
    all_reduce(good);
    expect_equal(good, at::full({4}, 2.0f));
  });
}

// Whatever the ranks disagree on, all of them learn it; nobody overruns and nobody hangs.
void expect_mismatch(const std::string& what, const std::function<void(int)>& fn) {
  world(3, [&](int rank) {
    const auto error = caught([&] { fn(rank); });
    EXPECT_EQ(error.kind, ErrorKind::kUsage) << what << ": " << error.message;
    EXPECT_TRUE(says(error, "arguments_test.cpp:")) << what << ": " << error.message;
    // Broken for good: nobody knows what the others hold.
    EXPECT_EQ(caught([] { barrier(); }).kind, ErrorKind::kUsage) << what;
  });
}

TEST(Mismatch, BetweenRanksIsAnErrorOnAllOfThem) {
  expect_mismatch("sizes", [](int rank) { all_reduce(at::ones({rank == 1 ? 5 : 4})); });
  expect_mismatch("large sizes", [](int rank) { all_reduce(at::ones({rank == 1 ? 500'000 : 400'000})); });
  expect_mismatch("types", [](int rank) { all_reduce(at::ones({4}, rank == 1 ? at::kInt : at::kFloat)); });
  expect_mismatch("operations", [](int rank) {
    all_reduce(at::ones({4}), {.op = rank == 2 ? ReduceOp::kMax : ReduceOp::kSum});
  });
  expect_mismatch("roots", [](int rank) { broadcast(at::ones({4}), {.src = rank == 0 ? 1 : 0}); });
  expect_mismatch("collectives", [](int rank) {
    if (rank == 0) {
      barrier();
    } else {
      all_reduce(at::ones({4}));
    }
  });
  expect_mismatch("async",
                  [](int rank) { all_reduce(at::ones({rank == 1 ? 5 : 4}), {.async_op = true}).wait(); });
}

void usage(const std::function<void()>& fn, const std::string& part) {
  const auto error = caught(fn);
  EXPECT_EQ(error.kind, ErrorKind::kUsage) << error.message;
  EXPECT_TRUE(says(error, part) && says(error, "arguments_test.cpp:")) << error.message;
}

// The words of each refusal; the group goes on after all of them.
TEST(Arguments, OfRootedCollectivesSayWhatToMend) {
  world(3, [](int rank) {
    const auto one = at::ones({2});
    const auto list = [](std::int64_t n) { return at::empty({3, n}).unbind(0); };
    usage([&] { broadcast(one); }, "neither src nor group_src");
    usage([&] { broadcast(one, {.src = 0, .group_src = 0}); }, "src and group_src are both given");
    usage([&] { broadcast(one, {.group_src = 3}); }, "group_src is 3");
    usage([&] { reduce(one); }, "neither dst nor group_dst");
    usage([&] { reduce(one, {.dst = -1}); }, "dst is -1, ranks of this group are 0 to 2");
    usage([&] { reduce(one, {.dst = 0, .group_dst = 1}); }, "both given");
    usage([&] { gather(one, {}, {.dst = 7}); }, "dst is 7");
    usage([&] { gather(one, {}, {.dst = rank}); }, "gather_list is empty");
    usage([&] { gather(one, list(2), {.dst = (rank + 1) % 3}); }, "gather_list is given on rank");
    usage([&] { gather(one, list(3), {.dst = rank}); }, "gather_list[0] has sizes");
    usage([&] { gather(one, {at::empty({2})}, {.dst = rank}); }, "1 tensors");
    usage([&] { scatter(at::empty({2}), {}, {.src = rank}); }, "scatter_list is empty");
    usage([&] { scatter(at::empty({2}), list(2), {.src = (rank + 1) % 3}); },
          "scatter_list is given on rank");
    usage([&] { scatter(at::empty({2}), list(3), {.src = rank}); }, "scatter_list[0] has sizes");
    usage([&] { scatter(at::empty({2}), {}, {.src = 0, .group_src = 0}); }, "both given");
    barrier();
  });
}

TEST(Arguments, OfExchangesSayWhatToMend) {
  world(2, [](int) {
    const auto rows = [](std::int64_t n) { return at::ones({n, 2}); };
    usage([&] { all_to_all_single(rows(3), rows(3)); },
          "input has 3 rows, which do not divide by the 2 ranks");
    usage([&] { all_to_all_single(rows(3), rows(4)); }, "output has 3 rows");
    usage(
        [&] {
          all_to_all_single(rows(4), rows(4), {.input_split_sizes = {1, 2}});
        },
        "add up to 3, input has 4");
    usage([&] { all_to_all_single(rows(4), rows(4), {.output_split_sizes = {4}}); }, "1 entries");
    usage([&] { all_to_all_single(rows(4), rows(4), {.input_split_sizes = {5, -1}}); }, "holds -1");
    usage([&] { all_to_all_single(rows(2), rows(4)); }, "part for itself");
    usage([&] { all_to_all_single(at::ones({}), rows(4)); }, "without dimensions");
    usage([&] { all_to_all_single(at::ones({4, 2}, at::kInt), rows(4)); }, "one type");
    usage([&] { all_to_all({rows(1), rows(1)}, {}); }, "inputs is empty");
    usage([&] { all_to_all({rows(1)}, {rows(1), rows(1)}); }, "outputs has 1 tensors");
    usage([&] { all_to_all({rows(1), rows(1)}, {rows(2), rows(2)}); }, "part for itself");
    usage([&] { all_to_all({rows(1), rows(1)}, {rows(1), at::ones({1, 2}, at::kInt)}); }, "Int");
    usage([&] { reduce_scatter(rows(1), {rows(2), rows(2)}); }, "they must be identical");
    barrier();
  });
}

TEST(Arguments, OfPremulSumSayWhatToMend) {
  world(2, [](int) {
    const auto usage = [](at::ScalarType dtype, const ReduceOp& op, const std::string& part) {
      const auto error = caught([&] { all_reduce(at::ones({2}, dtype), {.op = op}); });
      EXPECT_EQ(error.kind, ErrorKind::kUsage) << error.message;
      EXPECT_TRUE(says(error, part)) << error.message;
    };
    usage(at::kFloat, ReduceOp::kPremulSum, "no factor");
    usage(at::kFloat, ReduceOp::premul_sum(at::ones({2})), "one element");
    usage(at::kInt, ReduceOp::premul_sum(0.5), "Int");
    barrier();
  });
}

TEST(ReduceOps, HaveTorchsNumbers) {
  EXPECT_EQ(ReduceOp::kSum, 0);
  EXPECT_EQ(ReduceOp::kAvg, 1);
  EXPECT_EQ(ReduceOp::kProduct, 2);
  EXPECT_EQ(ReduceOp::kMin, 3);
  EXPECT_EQ(ReduceOp::kMax, 4);
  EXPECT_EQ(ReduceOp::kBand, 5);
  EXPECT_EQ(ReduceOp::kBor, 6);
  EXPECT_EQ(ReduceOp::kBxor, 7);
  EXPECT_EQ(ReduceOp::kPremulSum, 8);
}

TEST(Mismatch, OfTheNewerCollectivesIsAnErrorOnAllOfThem) {
  expect_mismatch("reduce sizes", [](int rank) { reduce(at::ones({rank == 1 ? 5 : 4}), {.dst = 0}); });
  expect_mismatch("reduce roots", [](int rank) { reduce(at::ones({4}), {.dst = rank == 1 ? 1 : 0}); });
  expect_mismatch("scatter sizes", [](int rank) {
    const auto list = rank == 0 ? at::ones({3, 4}).unbind(0) : std::vector<at::Tensor>{};
    scatter(at::empty({rank == 1 ? 5 : 4}), list, {.src = 0});
  });
  expect_mismatch("uneven all_gather", [](int rank) {
    // Rank 1 thinks that rank 2 sends less.
    all_gather({at::empty({1}), at::empty({2}), at::empty({rank == 1 ? 3 : 4})}, at::ones({rank == 0   ? 1
                                                                                           : rank == 1 ? 2
                                                                                                       : 4}));
  });
  expect_mismatch("all_to_all", [](int rank) {
    // Rank 0 sends two rows to rank 1, which wants one.
    const std::vector<at::Tensor> inputs{at::ones({1}), at::ones({rank == 0 ? 2 : 1}), at::ones({1})};
    all_to_all({at::empty({1}), at::empty({1}), at::empty({1})}, inputs);
  });
}

// Every collective: over when the call returns, or, asynchronously, a Work that is over when the last rank
// has come.
TEST(Collectives, AreOverWhenTheyReturnUnlessAsynchronous) {
  const auto list = [] { return at::zeros({2, 3}).unbind(0); };
  const std::vector<std::function<Work(int, bool)>> calls{
      [](int, bool async) { return all_reduce(at::ones({3}), {.async_op = async}); },
      [](int, bool async) { return broadcast(at::ones({3}), {.src = 1, .async_op = async}); },
      [](int, bool async) { return reduce(at::ones({3}), {.dst = 1, .async_op = async}); },
      [&](int, bool async) { return all_gather(list(), at::ones({3}), {.async_op = async}); },
      [](int, bool async) {
        return all_gather_into_tensor(at::zeros({6}), at::ones({3}), {.async_op = async});
      },
      [&](int rank, bool async) {
        return gather(at::ones({3}), rank == 0 ? list() : std::vector<at::Tensor>{},
                      {.dst = 0, .async_op = async});
      },
      [&](int rank, bool async) {
        return scatter(at::zeros({3}), rank == 0 ? list() : std::vector<at::Tensor>{},
                       {.src = 0, .async_op = async});
      },
      [&](int, bool async) { return reduce_scatter(at::zeros({3}), list(), {.async_op = async}); },
      [](int, bool async) {
        return reduce_scatter_tensor(at::zeros({3}), at::ones({6}), {.async_op = async});
      },
      [&](int, bool async) { return all_to_all(list(), list(), {.async_op = async}); },
      [](int, bool async) { return all_to_all_single(at::zeros({4}), at::ones({4}), {.async_op = async}); },
      [](int, bool async) { return barrier({.async_op = async}); },
      [](int, bool async) {
        return all_reduce_coalesced({at::ones({3}), at::ones({2})}, {.async_op = async});
      },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    std::latch started(1);
    world(2, [&](int rank) {
      EXPECT_TRUE(calls[i](rank, false).done()) << "blocking call " << i;
      if (rank == 1) started.wait();
      const auto work = calls[i](rank, true);
      if (rank == 0) {
        EXPECT_FALSE(work.done()) << "rank 1 has not called " << i;
        started.count_down();
      }
      EXPECT_TRUE(work.wait() && work.is_success()) << i;
    });
  }
}

}  // namespace
}  // namespace lockstep
