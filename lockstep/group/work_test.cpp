// A Work: order, waiting, continuations, dropping.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/detail/thread.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

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
      EXPECT_TRUE(works[at].done());
      EXPECT_TRUE(works[at].is_success());
      EXPECT_EQ(works[at].error(), nullptr);
      expect_equal(works[at].result().at(0), at::full({1 << i}, static_cast<float>(3 + 3 * i)));
      EXPECT_TRUE(works[at].result().at(0).is_same(tensors[at]));
    }
    EXPECT_EQ(default_group()->sequence_number(), 8u);
    EXPECT_EQ(barrier().sequence_number(), 9u);
  });
}

TEST(Work, CallsWhatFollowsItOnceWhenItIsOver) {
  std::latch asked(1), called(2);
  world(2, [&](int rank) {
    auto tensor = at::ones({4});
    if (rank == 1) asked.wait();
    const auto work = all_reduce(tensor, {.async_op = true});
    work.on_done([&, rank](const Work& over) {
      EXPECT_TRUE(over.done());
      expect_equal(over.result().at(0), at::full({4}, 2.0f));
      EXPECT_EQ(get_rank(), rank);
      called.count_down();
      throw std::runtime_error("is logged");
    });
    if (rank == 0) asked.count_down();
    called.wait();
    int n_called = 0;
    work.on_done([&](const Work&) { ++n_called; });
    EXPECT_EQ(n_called, 1) << "at once";
  });
}

TEST(Work, PassesAFailureToItsContinuations) {
  std::latch over(1);
  world(2, [&](int rank) {
    if (rank == 1) return over.wait();
    const auto work = all_reduce(at::ones({4}), {.async_op = true, .timeout = Milliseconds(20)});
    EXPECT_EQ(caught([&] { work.wait(); }).kind, ErrorKind::kTimeout);
    bool called = false;
    work.on_done([&](const Work& failed) {
      called = true;
      EXPECT_FALSE(failed.is_success());
      EXPECT_NE(failed.error(), nullptr);
    });
    EXPECT_TRUE(called) << "it was over";
    over.count_down();
  });
}

TEST(Work, RefusesATimeoutThatIsNotPositiveAndGoesOn) {
  world(2, [](int) {
    const auto work = all_reduce(at::ones({4}), {.async_op = true});
    for (const int timeout : {0, -1}) {
      refused([&] { work.wait(Milliseconds(timeout)); },
              "Work::wait: a timeout of " + std::to_string(timeout));
      refused([&] { Work().wait(Milliseconds(timeout)); }, "it must be positive, kNoTimeout");
    }
    EXPECT_TRUE(work.wait(kNoTimeout));
    expect_equal(work.result().at(0), at::full({4}, 2.0f));
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
    EXPECT_FALSE(work.done());
    EXPECT_FALSE(work.is_success());
    EXPECT_EQ(work.error(), nullptr);
    EXPECT_EQ(caught([&] { work.result(); }).kind, ErrorKind::kUsage);
    const auto late = caught([&] { work.wait(Milliseconds(5)); });
    EXPECT_EQ(late.kind, ErrorKind::kTimeout);
    EXPECT_TRUE(says(late, "all_reduce #1") && says(late, "work_test.cpp:")) << late.message;
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
      std::vector<base::Thread> waiters;
      for (int i = 0; i < 3; ++i) waiters.emplace_back("waiter", [work] { work.wait(); });
      while (!work.done()) std::this_thread::yield();
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
  EXPECT_TRUE(work.done());
  EXPECT_TRUE(work.is_success());
  EXPECT_TRUE(work.result().empty());
  EXPECT_EQ(work.sequence_number(), 0u);
}

TEST(Work, KnowsWhatItDid) {
  world(2, [](int rank) {
    auto one = at::ones({2}), two = at::ones({4});
    const auto pieces = [] { return at::ones({2, 2}).unbind(0); };
    const auto at_root = rank == 0 ? pieces() : std::vector<at::Tensor>{};
    for (const bool async : {false, true}) {
      const auto check = [](const Work& work, OpType type, const std::string& name) {
        work.wait();
        work.synchronize();
        work.block_current_stream();
        EXPECT_EQ(work.op_type(), type);
        EXPECT_EQ(name_of(type), name);
      };
      check(all_reduce(one, {.async_op = async}), OpType::kAllReduce, "all_reduce");
      check(broadcast(one, {.src = 1, .async_op = async}), OpType::kBroadcast, "broadcast");
      check(all_gather(pieces(), one, {.async_op = async}), OpType::kAllGather, "all_gather");
      check(all_gather_into_tensor(two, one, {.async_op = async}), OpType::kAllGatherIntoTensor,
            "all_gather_into_tensor");
      check(gather(one, at_root, {.async_op = async}), OpType::kGather, "gather");
      check(scatter(one, at_root, {.async_op = async}), OpType::kScatter, "scatter");
      check(reduce_scatter(one, pieces(), {.async_op = async}), OpType::kReduceScatter, "reduce_scatter");
      check(reduce_scatter_tensor(one, two, {.async_op = async}), OpType::kReduceScatterTensor,
            "reduce_scatter_tensor");
      check(all_to_all(pieces(), pieces(), {.async_op = async}), OpType::kAllToAll, "all_to_all");
      check(all_to_all_single(two, at::ones({4}), {.async_op = async}), OpType::kAllToAllSingle,
            "all_to_all_single");
      check(barrier({.async_op = async}), OpType::kBarrier, "barrier");
    }
    EXPECT_EQ(static_cast<int>(OpType::kBarrier), 15);
    EXPECT_EQ(static_cast<int>(Work().op_type()), 100);
  });
}

}  // namespace
}  // namespace lockstep
