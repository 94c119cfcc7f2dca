// The collectives that reduce, against a local reference, on ranks that are threads.
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/base/detail/thread.h"
#include "lockstep/collective/detail/all_reduce_into.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

TEST(AllReduce, MatchesTheReferenceForEveryTypeOperationAndWorldSize) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      const auto check = [&](at::ScalarType dtype, ReduceOp op, std::int64_t numel) {
        auto tensor = sample(rank, {numel}, dtype);
        all_reduce(tensor, {.op = op});
        const auto expected = reduced([&](int r) { return sample(r, {numel}, dtype); }, n, op);
        expect_near(tensor, expected,
                    c10::toString(dtype) + std::string(" op ") + std::to_string(static_cast<int>(op)));
      };
      for (const std::int64_t numel : {1, 7, 4099}) {
        for (const auto dtype : kFloats) {
          for (const auto op :
               {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
            check(dtype, op, numel);
          }
        }
        for (const auto dtype : kInts) {
          for (const auto op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax,
                                ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor}) {
            check(dtype, op, numel);
          }
        }
      }
    });
  }
}

TEST(AllReduce, GivesEveryRankTheSameBits) {
  for (const int n : {2, 3, 7}) {
    world(n, [n](int rank) {
      for (const std::int64_t numel : {5, 3000, 300'000}) {
        auto tensor = at::sin(at::arange(numel, at::kFloat) * (rank + 1.37));
        all_reduce(tensor);
        auto all = at::empty({n, numel});
        all_gather_into_tensor(all, tensor);
        for (int r = 0; r < n; ++r) expect_equal(all[r], tensor);
      }
    });
  }
}

TEST(AllReduce, TakesComplexNumbersAsPairsForSumAndAverage) {
  world(3, [](int rank) {
    const auto input = [](int r) {
      return at::complex(sample(r, {2, 5}, at::kFloat), sample(r + 1, {2, 5}, at::kFloat));
    };
    auto sum = input(rank);
    all_reduce(sum);
    expect_equal(sum, input(0) + input(1) + input(2));
    auto mean = input(rank);
    all_reduce(mean, {.op = ReduceOp::kAvg});
    EXPECT_TRUE(at::allclose(mean, (input(0) + input(1) + input(2)) / 3));
    for (const auto op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kBand}) {
      const auto error = caught([&] { all_reduce(sum, {.op = op}); });
      EXPECT_EQ(error.kind, ErrorKind::kUsage);
      EXPECT_TRUE(says(error, "ComplexFloat")) << error.message;
    }
  });
}

TEST(AllReduce, IntoAnotherTensorLeavesTheInputAlone) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (const std::int64_t numel : {5, 4099, 70'001}) {
        const auto input = sample(rank, {numel}, at::kFloat);
        const auto expected =
            reduced([&](int r) { return sample(r, {numel}, at::kFloat); }, n, ReduceOp::kMax);
        for (const bool shared : {false, true}) {
          const auto from = shared ? empty_shared({numel}).copy_(input) : input.clone();
          auto to = shared ? empty_shared({numel}) : at::empty({numel});
          internal::all_reduce_into(to, from, {.op = ReduceOp::kMax});
          expect_near(to, expected, "into another");
          expect_equal(from, input);
          auto strided = at::zeros({numel, 2}).select(1, 0);
          internal::all_reduce_into(strided, from, {.op = ReduceOp::kMax, .async_op = true}).wait();
          expect_near(strided, expected, "into a view");
        }
      }
      auto tensor = at::ones({4});
      EXPECT_THROW(internal::all_reduce_into(tensor, tensor), Error);
      EXPECT_THROW(internal::all_reduce_into(tensor, at::ones({5})), Error);
    });
  }
}

TEST(AllReduce, WritesThroughAnyStrides) {
  world(3, [](int rank) {
    const auto expected = reduced([](int r) { return sample(r, {4, 6}, at::kFloat); }, 3, ReduceOp::kSum);
    const bool modes[] = {false, true};
    for (const bool async : modes) {
      // A transposed view, on one rank only: order is that of the elements, not of the memory.
      auto base =
          rank == 1 ? sample(rank, {4, 6}, at::kFloat).t().contiguous() : sample(rank, {4, 6}, at::kFloat);
      auto view = rank == 1 ? base.t() : base;
      all_reduce(view, {.async_op = async}).wait();
      expect_equal(view, expected, "transposed");
      // Every second column; the others stay as they are.
      auto wide = at::full({4, 12}, -1.0f);
      auto columns = wide.slice(1, 0, 12, 2);
      columns.copy_(sample(rank, {4, 6}, at::kFloat));
      all_reduce(columns, {.async_op = async}).wait();
      expect_equal(columns, expected, "columns");
      EXPECT_TRUE(at::equal(wide.slice(1, 1, 12, 2), at::full({4, 6}, -1.0f)));
    }
    auto complex = at::complex(sample(rank, {4, 6}, at::kFloat), sample(rank, {4, 6}, at::kFloat));
    auto conjugate = complex.conj();
    all_reduce(conjugate);
    expect_equal(complex, at::complex(expected, expected), "conjugate");
  });
}

TEST(AllReduce, WorksOnALeafThatRequiresGrad) {
  world(2, [](int) {
    auto parameter = at::ones({3, 2}).t().requires_grad_();  // not contiguous: through a temporary
    all_reduce(parameter);
    EXPECT_TRUE(parameter.is_leaf());
    expect_equal(parameter.detach(), at::full({2, 3}, 2.0f));
  });
}

TEST(ReduceScatter, GivesEachRankItsPartOfTheReduction) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
        for (const auto op : {ReduceOp::kSum, ReduceOp::kMax}) {
          const auto input = [&](int r) { return sample(r, {n, 2, 5}, dtype); };
          const auto expected = reduced(input, n, op)[rank];
          auto output = at::empty({2, 5}, dtype);
          reduce_scatter_tensor(output, input(rank), {.op = op});
          expect_equal(output, expected, "stacked");
          output.zero_();
          reduce_scatter_tensor(output, input(rank).reshape({n * 2, 5}), {.op = op});
          expect_equal(output, expected, "concatenated");
          auto strided = at::empty({5, 2}, dtype).t();
          reduce_scatter(strided, input(rank).unbind(0), {.op = op});
          expect_equal(strided, expected, "one piece");
          std::vector<at::Tensor> apart;
          for (const auto& part : input(rank).unbind(0)) apart.push_back(part.clone());
          output.zero_();
          reduce_scatter(output, apart, {.op = op});
          expect_equal(output, expected, "list");
          auto in_place = input(rank);
          reduce_scatter_tensor(in_place[rank], in_place, {.op = op});
          expect_equal(in_place[rank], expected, "in place");
        }
      }
    });
  }
}

TEST(Reduce, GivesTheResultToItsRootAndLeavesTheOthersAlone) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (int dst = 0; dst < n; ++dst) {
        for (const auto dtype : {at::kFloat, at::kShort, at::kBFloat16}) {
          for (const auto op : {ReduceOp::kSum, ReduceOp::kMax}) {
            const auto expected = reduced([&](int r) { return sample(r, {3, 4}, dtype); }, n, op);
            const auto own = sample(rank, {3, 4}, dtype);
            auto tensor = own.clone();
            reduce(tensor, {.dst = dst, .op = op});
            expect_equal(tensor, rank == dst ? expected : own);
            auto view = own.clone().t().contiguous().t();  // not contiguous
            const auto work = reduce(view, {.group_dst = dst, .op = op, .async_op = true});
            work.wait();
            expect_equal(view, rank == dst ? expected : own);
            EXPECT_EQ(work.op_type(), OpType::kReduce);
          }
        }
      }
    });
  }
}

TEST(PremulSum, MultipliesByEachRanksFactorAndAdds) {
  for (const int n : {1, 2, 3, 4}) {
    world(n, [n](int rank) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kInt, at::kComplexFloat}) {
        const auto input = [&](int r) { return sample(r, {2, 3}, at::kInt).to(dtype); };
        auto expected = at::zeros({2, 3}, dtype);
        for (int r = 0; r < n; ++r) expected = expected + input(r) * (r + 2);
        const ReduceOp factors[] = {ReduceOp::premul_sum(rank + 2),
                                    ReduceOp::premul_sum(at::full({1}, rank + 2, at::kInt))};
        for (const auto& op : factors) {
          EXPECT_EQ(op, ReduceOp::kPremulSum);
          auto tensor = input(rank);
          all_reduce(tensor, {.op = op});
          expect_equal(tensor, expected, "all_reduce");
          auto strided = at::empty({3, 2}, dtype).t().copy_(input(rank));
          all_reduce(strided, {.op = op, .async_op = true}).wait();
          expect_equal(strided, expected, "strided");
          tensor = input(rank);
          reduce(tensor, {.dst = 0, .op = op});
          expect_equal(tensor, rank == 0 ? expected : input(rank), "reduce");
          auto part = at::empty({2, 3}, dtype);
          reduce_scatter_tensor(
              part, at::cat(std::vector<at::Tensor>(static_cast<std::size_t>(n), input(rank))), {.op = op});
          expect_equal(part, expected, "reduce_scatter_tensor");
        }
      }
      // A factor that is no whole number, in a type that holds no wide one.
      auto half = at::full({4}, 3.0, at::kHalf);
      all_reduce(half, {.op = ReduceOp::premul_sum(0.5)});
      expect_equal(half, at::full({4}, 1.5 * n, at::kHalf));
    });
  }
}

TEST(ReduceScatter, TakesPartsOfDifferentSizes) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      // Rank r gets r + 1 rows, and rank 1 none.
      const auto rows = [](int r) { return r == 1 ? 0 : r + 1; };
      const auto part = [&](int from, int to) { return sample(from + to, {rows(to), 2}, at::kFloat); };
      const auto expected = reduced([&](int r) { return part(r, rank); }, n, ReduceOp::kSum);
      std::vector<at::Tensor> inputs, strided;
      for (int to = 0; to < n; ++to) {
        inputs.push_back(part(rank, to));
        strided.push_back(part(rank, to).t().contiguous().t());
      }
      auto output = at::empty({rows(rank), 2});
      reduce_scatter(output, inputs);
      expect_equal(output, expected);
      auto view = at::empty({2, rows(rank)}).t();
      const auto work = reduce_scatter(view, strided, {.async_op = true});
      work.wait();
      expect_equal(view, expected);
      expect_equal(work.result().at(0), expected);
      barrier();
    });
  }
}

at::Tensor sparse_sample(int rank, bool hybrid) {
  // Entry (0, rank) twice, and (1, 0) on every rank.
  const auto indices = at::tensor(std::vector<std::int64_t>{0, 1, 0, rank, 0, rank}).view({2, 3});
  const auto values = hybrid ? at::ones({3, 2}) * (rank + 1) : at::ones({3}) * (rank + 1);
  const auto sizes = hybrid ? std::vector<std::int64_t>{2, 8, 2} : std::vector<std::int64_t>{2, 8};
  return at::sparse_coo_tensor(indices, values, sizes, at::TensorOptions().dtype(at::kFloat));
}

TEST(SparseAllReduce, AddsEntriesAndIsCoalesced) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (const bool hybrid : {false, true}) {
        for (const bool async : {false, true}) {
          auto expected = at::zeros_like(sparse_sample(0, hybrid).to_dense());
          for (int r = 0; r < n; ++r) expected += sparse_sample(r, hybrid).to_dense();
          auto tensor = sparse_sample(rank, hybrid);
          const auto work = all_reduce(tensor, {.async_op = async});
          work.wait();
          EXPECT_TRUE(tensor.is_coalesced());
          expect_equal(tensor.to_dense(), expected);
          EXPECT_EQ(work.op_type(), OpType::kAllReduceSparse);
        }
      }
      // Nothing on most ranks.
      auto rare = rank == n - 1 ? sparse_sample(0, false) : at::zeros({2, 8}).to_sparse();
      all_reduce(rare);
      expect_equal(rare.to_dense(), sparse_sample(0, false).to_dense());
    });
  }
}

TEST(SparseAllReduce, RejectsOtherReductionsAndTensorsThatDiffer) {
  world(2, [](int rank) {
    auto tensor = sparse_sample(rank, false);
    const auto max = caught([&] { all_reduce(tensor, {.op = ReduceOp::kMax}); });
    EXPECT_EQ(max.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(max, "SUM") && says(max, "MAX")) << max.message;
    auto other = rank == 0 ? at::zeros({2, 8}).to_sparse() : at::zeros({8, 2}).to_sparse();
    const auto sizes = caught([&] { all_reduce(other); });
    EXPECT_EQ(sizes.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(sizes, "differ")) << sizes.message;
    barrier();  // the group goes on
  });
}

}  // namespace
}  // namespace lockstep
