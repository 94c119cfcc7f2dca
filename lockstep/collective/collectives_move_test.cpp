// The collectives that only move data, against a local reference, on ranks that are threads.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "lockstep/base/detail/thread.h"
#include "lockstep/collective/internal/packing.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

TEST(Broadcast, GivesEveryRankTheRootsValuesForEveryType) {
  for (const int n : {1, 2, 3, 8}) {
    world(n, [n](int rank) {
      const at::ScalarType types[] = {at::kFloat,         at::kHalf,          at::kBool,  at::kLong,
                                      at::kComplexDouble, at::kFloat8_e4m3fn, at::kUInt16};
      for (const auto dtype : types) {
        for (int root = 0; root < n; ++root) {
          auto tensor = sample(rank, {3, 5}, at::kInt).to(dtype);
          const auto expected = sample(root, {3, 5}, at::kInt).to(dtype);
          broadcast(tensor, {.src = root});
          EXPECT_TRUE(at::equal(tensor.to(at::kFloat), expected.to(at::kFloat))) << c10::toString(dtype);
        }
      }
      auto view = sample(rank, {5, 3}, at::kFloat).t();
      broadcast(view, {.src = n - 1});
      expect_equal(view, sample(n - 1, {5, 3}, at::kFloat).t());
    });
  }
}

TEST(AllGather, FillsOneTensorPerRankWhereverTheyLie) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (const auto dtype : {at::kFloat, at::kBool, at::kComplexFloat, at::kFloat8_e5m2}) {
        const auto input = [&](int r) { return sample(r, {2, 3}, at::kInt).to(dtype); };
        std::vector<at::Tensor> apart, strided, pieces = at::empty({n, 2, 3}, dtype).unbind(0);
        for (int r = 0; r < n; ++r) {
          apart.push_back(at::empty({2, 3}, dtype));
          strided.push_back(at::empty({3, 2}, dtype).t());
        }
        for (const auto& outputs : {apart, strided, pieces}) {
          const auto work = all_gather(outputs, input(rank));
          for (int r = 0; r < n; ++r) {
            EXPECT_TRUE(
                at::equal(outputs[static_cast<std::size_t>(r)].to(at::kFloat), input(r).to(at::kFloat)));
          }
          EXPECT_EQ(work.result().size(), static_cast<std::size_t>(n));
        }
      }
    });
  }
}

TEST(AllGatherIntoTensor, ConcatenatesStacksAndWorksInPlace) {
  for (const int n : {1, 2, 3, 7}) {
    world(n, [n](int rank) {
      std::vector<at::Tensor> inputs;
      for (int r = 0; r < n; ++r) inputs.push_back(sample(r, {3, 4}, at::kFloat));
      const auto& mine = inputs[static_cast<std::size_t>(rank)];
      auto concatenated = at::empty({3 * n, 4}), stacked = at::empty({n, 3, 4}), flat = at::empty({n * 12});
      all_gather_into_tensor(concatenated, mine);
      all_gather_into_tensor(stacked, mine);
      all_gather_into_tensor(flat, mine);
      expect_equal(concatenated, at::cat(inputs));
      expect_equal(stacked, at::stack(inputs));
      expect_equal(flat, at::stack(inputs).flatten());
      auto in_place = at::full({3 * n, 4}, -1.0f);
      auto slot = in_place.narrow(0, 3 * rank, 3);
      slot.copy_(mine);
      all_gather_into_tensor(in_place, slot);
      expect_equal(in_place, at::cat(inputs));
      auto transposed = at::empty({4, 3 * n}).t();
      all_gather_into_tensor(transposed, mine.t().contiguous().t());
      expect_equal(transposed, at::cat(inputs));
    });
  }
}

TEST(AllGatherIntoTensor, LetsAComplexTensorStandForPairsOfReals) {
  world(2, [](int rank) {
    const auto input = [](int r) {
      return at::complex(sample(r, {3}, at::kFloat), sample(r + 1, {3}, at::kFloat));
    };
    auto pairs = at::empty({2, 3, 2});
    all_gather_into_tensor(pairs, input(rank));
    expect_equal(pairs, at::stack({at::view_as_real(input(0)), at::view_as_real(input(1))}));
  });
}

TEST(Collectives, WithNoElementsStillMeet) {
  world(3, [](int rank) {
    auto nothing = at::empty({0, 4});
    all_reduce(nothing);
    broadcast(nothing, {.src = 1});
    all_gather({at::empty({0}), at::empty({0}), at::empty({0})}, at::empty({0}));
    all_gather_into_tensor(at::empty({3, 0}), at::empty({0}));
    reduce_scatter_tensor(at::empty({0}), at::empty({3, 0}));
    auto one = at::full({1}, static_cast<float>(rank));
    all_reduce(one);
    EXPECT_EQ(one.item<float>(), 3);
  });
}

TEST(Collectives, TakeLargeTensors) {
  world(3, [](int rank) {
    constexpr std::int64_t kNumel = (1 << 20) + 3;
    const auto input = [](int r) { return sample(r, {kNumel}, at::kFloat); };
    auto tensor = input(rank);
    all_reduce(tensor, {.async_op = true}).wait();
    expect_equal(tensor, input(0) + input(1) + input(2));
    auto all = at::empty({3, kNumel});
    all_gather_into_tensor(all, input(rank));
    expect_equal(all, at::stack({input(0), input(1), input(2)}));
    auto other = input(rank);
    broadcast(other, {.src = 2});
    expect_equal(other, input(2));
  });
}

TEST(Barrier, IsOverOnlyAfterEarlierOperations) {
  world(3, [](int) {
    auto tensor = at::ones({100'000});
    const auto work = all_reduce(tensor, {.async_op = true});
    barrier();
    EXPECT_TRUE(work.done());
    EXPECT_EQ(tensor[99'999].item<float>(), 3);
  });
}

TEST(Barrier, HoldsEveryRankUntilTheLastHasCome) {
  std::atomic<int> arrived{0};
  world(4, [&](int) {
    for (int round = 1; round <= 50; ++round) {
      ++arrived;
      barrier();
      EXPECT_GE(arrived.load(), 4 * round);
      barrier();
    }
  });
}

TEST(EmptyShared, IsReducedLikeAnyOther) {
  for (const int n : {1, 2, 3}) {
    world(n, [n](int rank) {
      for (const std::int64_t numel : {1, 1000, 200'000}) {
        auto tensor = empty_shared({numel});
        tensor.fill_(static_cast<float>(rank + 1));
        all_reduce(tensor);
        expect_equal(tensor, at::full({numel}, static_cast<float>(n * (n + 1) / 2)));
      }
      EXPECT_EQ(empty_shared({2, 0}, at::kDouble).numel(), 0);
      EXPECT_EQ(empty_shared({2, 3}, at::kHalf).scalar_type(), at::kHalf);
      const auto refused = caught([] { empty_shared({-1}); });
      EXPECT_EQ(refused.kind, ErrorKind::kUsage);
      EXPECT_TRUE(says(refused, "collectives_move_test.cpp:")) << refused.message;
      EXPECT_EQ(caught([] { empty_shared({1L << 40, 1L << 40}); }).kind, ErrorKind::kUsage);
    });
  }
}

TEST(EmptyShared, OutlivesTheGroup) {
  world(2, [](int rank) {
    auto tensor = empty_shared({1000});
    tensor.fill_(static_cast<float>(rank));
    all_reduce(tensor);
    destroy_process_group();
    EXPECT_EQ(tensor.sum().item<float>(), 1000);
    tensor.fill_(7);
    EXPECT_EQ(tensor[999].item<float>(), 7);
  });
}

TEST(AllGather, TakesInputsOfDifferentSizes) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (const auto dtype : {at::kFloat, at::kBool, at::kComplexFloat, at::kFloat8_e4m3fn}) {
        const auto input = [&](int r) { return sample(r, {r == 1 ? 0 : r + 1, 3}, at::kInt).to(dtype); };
        for (const bool async : {false, true}) {
          std::vector<at::Tensor> outputs, strided;
          for (int r = 0; r < n; ++r) {
            outputs.push_back(at::empty_like(input(r)));
            strided.push_back(at::empty({3, input(r).size(0)}, dtype).t());
          }
          all_gather(outputs, input(rank), {.async_op = async}).wait();
          all_gather(strided, input(rank), {.async_op = async}).wait();
          for (int r = 0; r < n; ++r) {
            const auto at = static_cast<std::size_t>(r);
            expect_equal(outputs[at].to(at::kFloat), input(r).to(at::kFloat));
            expect_equal(strided[at].to(at::kFloat), input(r).to(at::kFloat));
          }
        }
      }
    });
  }
}

TEST(Single, FormsHoldOnePartPerRankInOneTensor) {
  for (const int n : {1, 2, 3}) {
    world(n, [n](int rank) {
      std::vector<at::Tensor> inputs;
      for (int r = 0; r < n; ++r) inputs.push_back(sample(r, {2, 3}, at::kFloat));
      const auto& mine = inputs[static_cast<std::size_t>(rank)];
      auto all = at::empty({n, 2, 3});
      all_gather_single(all, mine);
      expect_equal(all, at::stack(inputs));
      for (int dst = 0; dst < n; ++dst) {
        const auto room = rank == dst ? at::full({2 * n, 3}, -1.0f) : at::Tensor();
        gather_single(mine, room, {.dst = dst, .async_op = dst % 2 == 1}).wait();
        if (rank == dst) expect_equal(room, at::cat(inputs));
      }
      auto in_place = at::full({n, 2, 3}, -1.0f);
      if (rank == 0) in_place[0].copy_(mine);
      gather_single(rank == 0 ? in_place[0] : mine, rank == 0 ? in_place : at::Tensor());
      if (rank == 0) expect_equal(in_place, at::stack(inputs));
      auto part = at::empty({2, 3});
      reduce_scatter_single(part, at::stack(inputs));
      expect_equal(part, mine * n);
    });
  }
}

TEST(Single, GatherIsForItsRootAlone) {
  world(2, [](int rank) {
    const auto word = [&](const at::Tensor& room) {
      return caught([&] { gather_single(at::ones({2}), room, {.dst = 0}); });
    };
    EXPECT_EQ(word(rank == 0 ? at::Tensor() : at::empty({4})).kind, ErrorKind::kUsage);
    EXPECT_EQ(word(rank == 0 ? at::empty({3}) : at::empty({4})).kind, ErrorKind::kUsage);
    barrier();
  });
}

TEST(Gather, FillsTheListOfItsRoot) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (int dst = 0; dst < n; ++dst) {
        const auto input = [](int r) { return sample(r, {2, 3}, at::kDouble); };
        std::vector<at::Tensor> list;
        for (int r = 0; rank == dst && r < n; ++r)
          list.push_back(r % 2 == 0 ? at::empty({2, 3}, at::kDouble) : at::empty({3, 2}, at::kDouble).t());
        const auto work = gather(input(rank), list, {.dst = dst, .async_op = dst % 2 == 1});
        work.wait();
        EXPECT_EQ(work.result().size(), list.size());
        for (std::size_t r = 0; r < list.size(); ++r) expect_equal(list[r], input(static_cast<int>(r)));
      }
      std::vector<at::Tensor> list;
      if (rank == 0) list = at::empty({n, 4}).unbind(0);  // one piece, and dst left out
      gather(at::full({4}, static_cast<float>(rank)), list);
      for (std::size_t r = 0; r < list.size(); ++r)
        expect_equal(list[r], at::full({4}, static_cast<float>(r)));
    });
  }
}

TEST(Scatter, GivesEachRankItsTensorOfTheRootsList) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (int src = 0; src < n; ++src) {
        const auto part = [&](int r) { return sample(src + r, {3, 2}, at::kInt); };
        std::vector<at::Tensor> list;
        for (int r = 0; rank == src && r < n; ++r) list.push_back(part(r));
        auto output = at::empty({3, 2}, at::kInt);
        scatter(output, list, {.group_src = src, .async_op = src % 2 == 0}).wait();
        expect_equal(output, part(rank));
        auto strided = at::empty({2, 3}, at::kInt).t();
        scatter(strided, list, {.src = src});
        expect_equal(strided, part(rank));
      }
    });
  }
}

TEST(AllToAll, ExchangesListsOfAnySizes) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      const auto part = [](int from, int to) {
        return sample(from, {(from + 2 * to) % 4, 2}, at::kLong) + to;
      };
      for (const bool async : {false, true}) {
        std::vector<at::Tensor> inputs, outputs;
        for (int r = 0; r < n; ++r) {
          inputs.push_back(part(rank, r));
          outputs.push_back(at::empty_like(part(r, rank)));
        }
        const auto work = all_to_all(outputs, inputs, {.async_op = async});
        work.wait();
        for (int r = 0; r < n; ++r) expect_equal(outputs[static_cast<std::size_t>(r)], part(r, rank));
        EXPECT_EQ(work.result().size(), static_cast<std::size_t>(n));
      }
    });
  }
}

// Columns of a tensor, one per rank, as torch's chunk cuts them.
std::vector<at::Tensor> columns(const at::Tensor& tensor, int n) {
  std::vector<at::Tensor> views;
  const auto width = (tensor.size(1) + n - 1) / n;
  for (std::int64_t r = 0; r < n; ++r) {
    const auto start = std::min(r * width, tensor.size(1));
    views.push_back(tensor.narrow(1, start, std::min(width, tensor.size(1) - start)));
  }
  return views;
}

TEST(Collectives, PiecesOfACutTensorAreNotPacked) {
  const auto whole = at::zeros({6, 300, 2});
  EXPECT_EQ(internal::rows_of(columns(whole, 3)), 6u);
  EXPECT_EQ(internal::rows_of(columns(whole.view({2, 900, 2}), 4)), 2u);
  EXPECT_EQ(internal::rows_of(whole.chunk(3, 0)), 1u);
  EXPECT_EQ(internal::rows_of({whole.select(0, 0).narrow(0, 0, 100), whole.select(0, 1)}), 0u);
  EXPECT_EQ(internal::rows_of(columns(whole.transpose(0, 1).contiguous().transpose(0, 1), 3)), 0u);
  auto swapped = columns(whole, 2);
  std::swap(swapped[0], swapped[1]);
  EXPECT_EQ(internal::rows_of(swapped), 0u);
  EXPECT_EQ(internal::rows_of({columns(whole, 3)[0], columns(whole, 3)[1]}), 0u) << "the third is missing";
  EXPECT_EQ(internal::rows_of(columns(at::zeros({6, 30}), 3)), 0u) << "short runs are packed";
}

TEST(Collectives, ColumnsArriveWhereTheyLie) {
  for (const int n : {2, 3, 4}) {
    for (const std::int64_t width : {std::int64_t{100} * n, std::int64_t{100} * n - 1, std::int64_t{7}}) {
      world(n, [&](int rank) {
        const auto everything = at::arange(6 * n * width, at::kFloat).view({6 * n, width});
        const auto rows = everything.narrow(0, 6 * rank, 6);
        const auto mine = columns(everything, n)[static_cast<std::size_t>(rank)].contiguous();
        // Rows to columns, and back.
        auto received = at::full({6 * n, mine.size(1)}, -1, at::kFloat);
        all_to_all(received.chunk(n, 0), columns(rows.clone(), n));
        expect_equal(received, mine);
        auto back = at::full({6, width}, -1, at::kFloat);
        all_to_all(columns(back, n), received.chunk(n, 0));
        expect_equal(back, rows);
        auto gathered = at::full({6 * n, width}, -1, at::kFloat);
        all_gather(columns(gathered, n), mine);
        expect_equal(gathered, everything);
        // One rank has its outputs apart: the call is the same one.
        auto apart = columns(at::zeros({6 * n, width}), n);
        if (rank == 0) {
          for (auto& output : apart) output = output.clone();
        }
        all_gather(apart, mine);
        expect_equal(apart.back(), columns(everything, n).back().contiguous());
      });
    }
  }
}

TEST(AllToAllSingle, ExchangesRowsInEqualPartsAndBySplits) {
  for (const int n : kSizes) {
    world(n, [n](int rank) {
      for (const auto dtype : {at::kFloat, at::kComplexDouble, at::kBool}) {
        const auto row = [&](int from, int to) { return sample(from + 3 * to, {2, 3}, at::kInt).to(dtype); };
        std::vector<at::Tensor> sent, came;
        for (int r = 0; r < n; ++r) {
          sent.push_back(row(rank, r));
          came.push_back(row(r, rank));
        }
        auto output = at::empty({2 * n, 3}, dtype);
        all_to_all_single(output, at::cat(sent));
        expect_equal(output, at::cat(came));
        auto strided = at::empty({3, 2 * n}, dtype).t();
        all_to_all_single(strided, at::cat(sent).t().contiguous().t(), {.async_op = true}).wait();
        expect_equal(strided, at::cat(came));
      }
      // Rank i sends (i + j) % 3 rows to rank j, which is what j receives from i.
      std::vector<std::int64_t> splits;
      std::vector<at::Tensor> sent, came;
      for (int r = 0; r < n; ++r) {
        splits.push_back((rank + r) % 3);
        sent.push_back(at::full({splits.back(), 2}, static_cast<float>(10 * rank + r)));
        came.push_back(at::full({splits.back(), 2}, static_cast<float>(10 * r + rank)));
      }
      auto output = at::empty_like(at::cat(came));
      all_to_all_single(output, at::cat(sent), {.output_split_sizes = splits, .input_split_sizes = splits});
      expect_equal(output, at::cat(came));
    });
  }
}

TEST(Collectives, WithNoElementsMeetInEveryForm) {
  world(3, [](int rank) {
    const auto none = at::empty({0, 2});
    const auto nones = std::vector<at::Tensor>{at::empty({0, 2}), at::empty({0, 2}), at::empty({0, 2})};
    const auto at_root = rank == 1 ? nones : std::vector<at::Tensor>{};
    reduce(at::empty({0}), {.dst = 2});
    gather(none, at_root, {.dst = 1});
    scatter(at::empty({0, 2}), at_root, {.src = 1});
    all_to_all(nones, {at::empty({0, 2}), at::empty({0, 2}), at::empty({0, 2})});
    all_to_all_single(at::empty({0, 2}), none);
    all_to_all_single(at::empty({0, 2}), none,
                      {.output_split_sizes = {0, 0, 0}, .input_split_sizes = {0, 0, 0}});
    reduce_scatter(at::empty({0, 2}), nones);
    barrier({.device_ids = {0}});
  });
}

}  // namespace
}  // namespace lockstep
