// Every collective against a local reference, on ranks that are threads; then what callers may do wrong.
#include "lockstep/group/group.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <latch>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/thread.h"

namespace lockstep {
namespace {

constexpr int kSizes[] = {1, 2, 3, 4, 7, 8};
constexpr Milliseconds kPatience{60'000};

void world(int n, const std::function<void(int)>& fn) {
  at::set_num_threads(1);
  run_threads(n, fn, {.timeout = kPatience});
}

// Small whole numbers, so that every type holds every sum exactly; different on every rank.
at::Tensor sample(int rank, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto n = c10::multiply_integers(sizes);
  auto values = at::arange(n, at::kLong).add_(rank).remainder_(3).add_(rank % 2).reshape(sizes);
  return values.to(dtype);
}

at::Tensor fold(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  const bool logical = a.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return logical ? a.logical_or(b) : a + b;
    case ReduceOp::kProduct:
      return logical ? a.logical_and(b) : a * b;
    case ReduceOp::kMin:
      return at::minimum(a, b);
    case ReduceOp::kMax:
      return at::maximum(a, b);
    case ReduceOp::kBand:
      return a.bitwise_and(b);
    case ReduceOp::kBor:
      return a.bitwise_or(b);
    case ReduceOp::kBxor:
      return a.bitwise_xor(b);
  }
  return {};
}

at::Tensor reduced(const std::function<at::Tensor(int)>& input, int n, ReduceOp op) {
  const auto dtype = input(0).scalar_type();
  const auto wide = at::isFloatingType(dtype) ? at::kDouble : dtype;
  auto total = input(0).to(wide);
  for (int r = 1; r < n; ++r) total = fold(total, input(r).to(wide), op);
  if (op == ReduceOp::kAvg) total = total / n;
  return total.to(dtype);
}

// Equal to a few units in the last place of the type (AVG divides).
void expect_near(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  const bool half = actual.scalar_type() == at::kHalf || actual.scalar_type() == at::kBFloat16;
  const double tolerance = half ? 1e-2 : 1e-6;
  EXPECT_TRUE(at::allclose(actual.to(at::kDouble), expected.to(at::kDouble), tolerance, 0)) << what;
}

void expect_equal(const at::Tensor& actual, const at::Tensor& expected, const std::string& what = "") {
  EXPECT_TRUE(at::equal(actual, expected)) << what << " got\n" << actual << "\nexpected\n" << expected;
}

// The kind and words of the error `fn` raises; fails the test when it raises none.
struct Caught {
  ErrorKind kind = ErrorKind::kInternal;
  std::string words = "nothing was raised";
  bool says(const std::string& part) const { return words.find(part) != std::string::npos; }
};
Caught caught(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  ADD_FAILURE() << "nothing was raised";
  return {};
}

const at::ScalarType kFloats[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
const at::ScalarType kInts[] = {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kBool};

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
      EXPECT_TRUE(error.says("ComplexFloat")) << error.words;
    }
  });
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

TEST(Work, RunsInTheOrderStartedAndNumbersItself) {
  world(3, [](int rank) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 8; ++i) {
      tensors.push_back(at::full({1 << i}, static_cast<float>(rank + i)));
      works.push_back(all_reduce(tensors.back(), {.async_op = true}));
      EXPECT_EQ(works.back().sequence_number(), static_cast<std::uint64_t>(i + 1));
    }
    for (int i = 7; i >= 0; --i) {
      const auto at = static_cast<std::size_t>(i);
      works[at].wait();
      EXPECT_TRUE(works[at].is_completed());
      EXPECT_TRUE(works[at].is_success());
      EXPECT_EQ(works[at].exception(), nullptr);
      expect_equal(works[at].result().at(0), at::full({1 << i}, static_cast<float>(3 + 3 * i)));
      EXPECT_TRUE(works[at].result().at(0).is_same(tensors[at]));
    }
    EXPECT_EQ(default_group()->sequence_number(), 8u);
    EXPECT_EQ(barrier().sequence_number(), 9u);
  });
}

TEST(Work, IsNotOverBeforeEveryRankHasJoined) {
  std::latch asked(1);
  world(2, [&](int rank) {
    auto tensor = at::ones({4}).expand({1, 4}).t();
    if (rank == 1) {
      asked.wait();
      all_reduce(tensor);
      return;
    }
    const auto work = all_reduce(tensor, {.async_op = true});
    EXPECT_FALSE(work.is_completed());
    EXPECT_FALSE(work.is_success());
    EXPECT_EQ(work.exception(), nullptr);
    EXPECT_EQ(caught([&] { work.result(); }).kind, ErrorKind::kUsage);
    const auto late = caught([&] { work.wait(Milliseconds(5)); });
    EXPECT_EQ(late.kind, ErrorKind::kTimeout);
    EXPECT_TRUE(late.says("all_reduce #1") && late.says("group_test.cpp:")) << late.words;
    asked.count_down();
    work.wait();
    expect_equal(tensor, at::full({4, 1}, 2.0f));
  });
}

TEST(Work, CanBeWaitedForByManyThreadsAndCopiesBackOnce) {
  world(2, [](int rank) {
    for (int round = 0; round < 20; ++round) {
      auto base = at::full({2, 3}, static_cast<float>(rank + round));
      const auto work = all_reduce(base.t(), {.async_op = true});
      std::vector<Thread> waiters;
      for (int i = 0; i < 3; ++i) waiters.emplace_back("waiter", [work] { work.wait(); });
      while (!work.is_completed()) std::this_thread::yield();
      waiters.clear();
      base.add_(1);  // a second copy would undo this
      work.wait();
      expect_equal(base, at::full({2, 3}, static_cast<float>(2 + 2 * round)));
    }
  });
}

// A tensor that says when its memory is let go.
at::Tensor watched(std::vector<float>& memory, std::atomic<bool>& freed) {
  return at::from_blob(
      memory.data(), {static_cast<std::int64_t>(memory.size())}, [&freed](void*) { freed = true; },
      at::kFloat);
}

TEST(Work, DroppedBeforeItIsOverKeepsItsTensorsUntilThen) {
  std::latch dropped(1);
  std::vector<float> memory(1000, 1);
  std::atomic<bool> freed{false};
  world(2, [&](int rank) {
    if (rank == 0) {
      all_reduce(watched(memory, freed), {.async_op = true});
      EXPECT_FALSE(freed);
      dropped.count_down();
    } else {
      dropped.wait();
      auto tensor = at::full({1000}, 2.0f);
      all_reduce(tensor);
      expect_equal(tensor, at::full({1000}, 3.0f));
    }
    barrier();
    barrier();  // reaps what the first one brought to its end
    if (rank == 0) {
      EXPECT_TRUE(freed);
      EXPECT_EQ(memory[999], 3);
    }
  });
}

TEST(Work, AnEmptyOneIsOver) {
  const Work work;
  work.wait();
  EXPECT_TRUE(work.is_completed());
  EXPECT_TRUE(work.is_success());
  EXPECT_TRUE(work.result().empty());
  EXPECT_EQ(work.sequence_number(), 0u);
}

TEST(Barrier, IsOverOnlyAfterEarlierOperations) {
  world(3, [](int) {
    auto tensor = at::ones({100'000});
    const auto work = all_reduce(tensor, {.async_op = true});
    barrier();
    EXPECT_TRUE(work.is_completed());
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
      EXPECT_TRUE(refused.says("group_test.cpp:")) << refused.words;
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

// Argument errors are raised before anything is sent: the group goes on.
TEST(Arguments, AreCheckedOnEveryRankAndNameTheCaller) {
  world(2, [](int) {
    auto good = at::ones({4});
    const auto usage = [](const std::function<void()>& fn, const std::string& part) {
      const auto error = caught(fn);
      EXPECT_EQ(error.kind, ErrorKind::kUsage) << error.words;
      EXPECT_TRUE(error.says(part) && error.says("group_test.cpp:") && error.says("rank ")) << error.words;
    };
    const auto unsupported = [](const std::function<void()>& fn, const std::string& part) {
      const auto error = caught(fn);
      EXPECT_EQ(error.kind, ErrorKind::kUnsupported) << error.words;
      EXPECT_TRUE(error.says(part)) << error.words;
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
    usage([&] { all_gather({good, at::empty({4})}, good); }, "share memory");
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
    EXPECT_EQ(error.kind, ErrorKind::kUsage) << what << ": " << error.words;
    EXPECT_TRUE(error.says("group_test.cpp:")) << what << ": " << error.words;
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

}  // namespace
}  // namespace lockstep
