// A Work: order, waiting, dropping, futures, timing.
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <latch>
#include <mutex>
#include <sstream>
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

std::vector<at::Tensor> tensors_of(c10::ivalue::Future& future) {
  return future.value().toTensorVector();
}

TEST(Future, ResolvesToTheOutputsOfBlockingAndOtherOperations) {
  for (const int n : {1, 2, 3}) {
    world(n, [n](int rank) {
      for (const bool async : {false, true}) {
        auto tensor = at::full({3}, static_cast<float>(rank)).t();
        const auto work = all_reduce(tensor, {.async_op = async});
        const auto future = work.get_future();
        const auto doubled =
            future->then([](c10::ivalue::Future& done) -> c10::IValue { return tensors_of(done).at(0) * 2; },
                         c10::TensorType::get());
        doubled->waitAndThrow();
        expect_equal(tensors_of(*future).at(0), at::full({3}, static_cast<float>(n * (n - 1) / 2)));
        expect_equal(doubled->value().toTensor(), at::full({3}, static_cast<float>(n * (n - 1))));
        EXPECT_TRUE(tensors_of(*future).at(0).is_same(tensor));
        EXPECT_EQ(work.get_future_result()->value().toInt(), 0);  // over by now
        EXPECT_EQ(work.get_future() == future, async);
        auto list = at::empty({n, 2}).unbind(0);
        const auto gathered = all_gather(list, at::ones({2}), {.async_op = async}).get_future();
        gathered->waitAndThrow();
        EXPECT_EQ(tensors_of(*gathered).size(), static_cast<std::size_t>(n));
        barrier({.async_op = async}).get_future()->waitAndThrow();
      }
    });
  }
}

// Callbacks that run although the Work is gone and nobody waits, on the completion thread.
TEST(Future, CallsBackWithoutAWaiter) {
  std::latch asked(2), called(3);
  std::string thread;
  world(3, [&](int rank) {
    auto base = at::full({2, 3}, static_cast<float>(rank));
    if (rank == 2) {
      asked.wait();
      all_reduce(base.t());
      called.count_down();
    } else {
      {
        const auto future = all_reduce(base.t(), {.async_op = true}).get_future();
        EXPECT_FALSE(future->completed());
        future->addCallback([&, base, rank](c10::ivalue::Future& done) {
          expect_equal(tensors_of(done).at(0), at::full({3, 2}, 3.0f));
          expect_equal(base, at::full({2, 3}, 3.0f));  // copied back before
          if (rank == 0) {
            char name[16] = "";
            pthread_getname_np(pthread_self(), name, sizeof name);
            thread = name;
          }
          called.count_down();
        });
      }
      asked.count_down();
    }
    called.wait();
  });
  EXPECT_EQ(thread, "ls-completion");
}

// Copies back into the caller's tensor, which only someone in InferenceMode may write.
TEST(Future, OfInferenceTensorsIsFinishedInTheCallersModes) {
  std::latch asked(2), called(2);
  world(3, [&](int rank) {
    const c10::InferenceMode inference;
    auto base = at::full({2, 3}, static_cast<float>(rank));
    if (rank == 2) {
      asked.wait();
      all_reduce(base.t());
    } else {
      const auto future = all_reduce(base.t(), {.async_op = true}).get_future();
      future->addCallback([&](c10::ivalue::Future& done) {
        EXPECT_FALSE(done.hasError()) << done.tryRetrieveErrorMessage();
        EXPECT_TRUE(c10::InferenceMode::is_enabled()) << "callbacks too";
        called.count_down();
      });
      asked.count_down();
    }
    called.wait();
    expect_equal(base, at::full({2, 3}, 3.0f));
  });
}

// As torch's PowerSGD hook does: the callback of one operation starts another one and waits for it.
TEST(Future, CallbacksMayWaitForOtherOperationsOfTheirRank) {
  constexpr int kRanks = 3, kDepth = 3;
  std::latch asked(2);
  world(kRanks, [&](int rank) {
    std::atomic<int> n_done{0};
    const auto more = [&](auto& self, int depth) -> void {
      EXPECT_EQ(get_rank(), rank) << "the default group is its rank's";
      const auto future = all_reduce(at::ones({4}), {.async_op = true}).get_future();
      std::atomic<bool> inner{depth == kDepth};
      if (!inner) {
        future->addCallback([&](c10::ivalue::Future&) {
          self(self, depth + 1);
          inner = true;
        });
      }
      future->waitAndThrow();
      expect_equal(tensors_of(*future).at(0), at::full({4}, float{kRanks}));
      while (!inner) std::this_thread::yield();  // it runs just after waiters are woken
      ++n_done;
    };
    if (rank == 2) {
      asked.wait();
      all_reduce(at::ones({2}));
      more(more, 1);
    } else {
      const auto first = all_reduce(at::ones({2}), {.async_op = true}).get_future();
      first->addCallback([&](c10::ivalue::Future&) { more(more, 1); });
      asked.count_down();
    }
    while (n_done < kDepth) std::this_thread::yield();
  });
}

TEST(Future, OfManyOperationsResolveInAnyMixture) {
  world(2, [](int rank) {
    constexpr int kOperations = 200;
    std::atomic<int> called{0};
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    for (int i = 0; i < kOperations; ++i) {
      const auto work = all_reduce(at::full({1 + i}, static_cast<float>(rank)), {.async_op = true});
      if (i % 3 == 0) work.wait();
      futures.push_back(i % 5 == 0 ? work.get_future_result() : work.get_future());
      futures.back()->addCallback([&](c10::ivalue::Future&) { ++called; });
    }
    for (const auto& future : futures) future->waitAndThrow();
    while (called < kOperations) std::this_thread::yield();  // callbacks run just after waiters are woken
  });
}

TEST(Future, CarriesTheErrorAndItsNumber) {
  std::latch timed_out(1);
  world(2, [&](int rank) {
    if (rank == 1) {
      timed_out.wait();
    } else {
      const auto work = all_reduce(at::ones({2}), {.async_op = true, .timeout = Milliseconds(30)});
      const auto future = work.get_future();
      const auto number = work.get_future_result();
      number->waitAndThrow();
      EXPECT_EQ(number->value().toInt(), 1);
      EXPECT_EQ(caught([&] { future->waitAndThrow(); }).kind, ErrorKind::kTimeout);
      EXPECT_TRUE(future->hasError());
      EXPECT_EQ(caught([&] { work.duration(); }).kind, ErrorKind::kTimeout);
      EXPECT_FALSE(work.is_success());
      timed_out.count_down();
    }
  });
  world(2, [](int rank) {
    const auto work = all_reduce(at::ones({2 + rank}), {.async_op = true});
    const auto number = work.get_future_result();
    number->waitAndThrow();
    EXPECT_EQ(number->value().toInt(), 100);
  });
  std::latch posted(2);
  world(2, [&](int rank) {
    const auto work = rank == 0 ? all_reduce(at::ones({2}), {.async_op = true}) : Work();
    posted.arrive_and_wait();
    if (rank == 1) {
      default_group()->abort("enough");
      return;
    }
    const auto number = work.get_future_result();
    number->waitAndThrow();
    EXPECT_EQ(number->value().toInt(), 2);
  });
}

TEST(Duration, IsKnownOfAsynchronousOperationsAndOfOthersWhenAskedFor) {
  for (const int n : {1, 2}) {
    world(n, [](int) {
      auto tensor = at::ones({1000});
      const auto quick = all_reduce(tensor);
      const auto untimed = caught([&] { quick.duration(); });
      EXPECT_EQ(untimed.kind, ErrorKind::kUsage);
      EXPECT_TRUE(says(untimed, "enable_collectives_timing")) << untimed.message;
      const auto posted = all_reduce(tensor, {.async_op = true});
      posted.wait();
      EXPECT_GE(posted.duration(), 0);
      default_group()->enable_collectives_timing();
      EXPECT_GE(all_reduce(tensor).duration(), 0);
      EXPECT_GE(barrier().duration(), 0);
    });
  }
  std::latch asked(1);
  world(2, [&](int rank) {
    if (rank == 1) {
      asked.wait();
      barrier();
      return;
    }
    const auto work = barrier({.async_op = true});
    EXPECT_EQ(caught([&] { work.duration(); }).kind, ErrorKind::kUsage);
    std::this_thread::sleep_for(Milliseconds(20));
    asked.count_down();
    work.wait();
    EXPECT_GE(work.duration(), 20);  // it was on its way at least that long
  });
}

TEST(CompletionHook, IsCalledForEveryOperationOnce) {
  for (const int n : {1, 2}) {
    world(n, [](int) {
      std::mutex mutex;
      std::vector<std::string> heard;
      default_group()->register_on_completion_hook([&](const WorkInfo& info) {
        const std::lock_guard lock(mutex);
        heard.push_back(info.op + std::to_string(info.sequence_number) + (info.failure ? "!" : ""));
        EXPECT_GE(info.finished, info.started);
      });
      all_reduce(at::ones({3}));
      all_reduce(at::ones({3}), {.async_op = true}).wait();
      all_reduce_coalesced({at::ones({3}), at::ones({2}, at::kLong)});
      barrier();
      const std::lock_guard lock(mutex);
      EXPECT_EQ(heard, (std::vector<std::string>{"all_reduce1", "all_reduce2", "all_reduce_coalesced3",
                                                 "barrier4"}));
    });
  }
}

// Also of those that failed, blocking or not, with the error; and how long an operation took.
TEST(CompletionHook, ReceivesFailuresAndDurations) {
  std::latch started(1);
  world(2, [&](int rank) {
    std::mutex mutex;
    std::vector<std::string> heard;
    double longest_ms = 0;
    default_group()->register_on_completion_hook([&](const WorkInfo& info) {
      const std::lock_guard lock(mutex);
      const std::chrono::duration<double, std::milli> took = info.finished - info.started;
      longest_ms = std::max(longest_ms, took.count());
      heard.push_back(std::string(info.op) + (info.failure ? ": " + info.failure->message : ""));
    });
    if (rank == 1) started.wait();
    const auto work = barrier({.async_op = true});
    if (rank == 0) {
      std::this_thread::sleep_for(Milliseconds(20));
      started.count_down();
    }
    work.wait();
    caught([&] { all_reduce(at::ones({rank + 1}), {.async_op = rank == 0}).wait(); });
    const std::lock_guard lock(mutex);
    EXPECT_GE(longest_ms, rank == 0 ? 20 : 0);
    ASSERT_EQ(heard.size(), 2u);
    EXPECT_EQ(heard[0], "barrier");
    EXPECT_NE(heard[1].find("all_reduce: all_reduce #2"), std::string::npos) << heard[1];
    EXPECT_NE(heard[1].find("different operations"), std::string::npos) << heard[1];
  });
}

// What a profiler sees: names, and that events of asynchronous operations last as long as these.
std::mutex seen_mutex;
std::vector<std::string> seen;  // guarded by seen_mutex

std::unique_ptr<at::ObserverContext> see_start(const at::RecordFunction& event) {
  const std::lock_guard lock(seen_mutex);
  seen.push_back(std::string("+") + event.name());
  return nullptr;
}

void see_end(const at::RecordFunction& event, at::ObserverContext*) {
  const std::lock_guard lock(seen_mutex);
  seen.push_back(std::string("-") + event.name());
}

TEST(Profiler, SeesNamedEventsThatSpanTheOperation) {
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&see_start, &see_end).scopes({at::RecordScope::USER_SCOPE}));
  std::latch started(1);
  const auto n_seen = [](const std::string& what) {
    const std::lock_guard lock(seen_mutex);
    return std::ranges::count(seen, what);
  };
  world(2, [&](int rank) {
    broadcast(at::ones({2}), {.src = 0});
    if (rank == 1) {
      started.wait();
      all_reduce(at::ones({2}));
      return;
    }
    const auto work = all_reduce(at::ones({2}), {.async_op = true});
    EXPECT_EQ(n_seen("+lockstep:all_reduce"), 1);
    EXPECT_EQ(n_seen("-lockstep:all_reduce"), 0);
    started.count_down();
    work.wait();
    EXPECT_GE(n_seen("-lockstep:all_reduce"), 1);
  });
  at::removeCallback(handle);
  EXPECT_EQ(n_seen("+lockstep:broadcast"), 2);
  EXPECT_EQ(n_seen("-lockstep:broadcast"), 2);
  EXPECT_EQ(n_seen("-lockstep:all_reduce"), 2);
}

TEST(Profiler, SeesTheNameThatAScopeGives) {
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&see_start, &see_end).scopes({at::RecordScope::USER_SCOPE}));
  world(1, [](int) {
    const auto outer = record_comm("outer");
    {
      const auto inner = record_comm("inner");
      all_reduce(at::ones({2}));
    }
    all_reduce(at::ones({2}), {.async_op = true}).wait();
  });
  at::removeCallback(handle);
  const std::lock_guard lock(seen_mutex);
  for (const char* event : {"+inner", "-inner", "+outer", "-outer"})
    EXPECT_EQ(std::ranges::count(seen, event), 1);
}

std::vector<std::string> seen_shapes;  // guarded by seen_mutex

std::unique_ptr<at::ObserverContext> see_inputs(const at::RecordFunction& event) {
  std::ostringstream line;
  line << event.name() << (event.isAsync() ? " async" : " blocking");
  for (const auto& input : event.inputs()) line << " " << input.toTensor().sizes();
  const std::lock_guard lock(seen_mutex);
  seen_shapes.push_back(line.str());
  return nullptr;
}

// As torch's events: the shapes of what goes in, and may end on another thread.
TEST(Profiler, SeesTheShapesOfTheInputs) {
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&see_inputs).needsInputs(true).scopes({at::RecordScope::USER_SCOPE}));
  world(1, [](int) {
    all_reduce(at::ones({2, 3}));
    all_reduce(at::ones({4}).as_strided({2}, {2}), {.async_op = true}).wait();
    all_gather({at::empty({5})}, at::ones({5}));
    all_reduce_coalesced({at::ones({1}), at::ones({2}, at::kLong)});
    const auto sent = isend(at::ones({7}), {.dst = 0});
    irecv(at::empty({7}), {.src = 0}).wait();
    sent.wait();
    barrier();
  });
  at::removeCallback(handle);
  const std::lock_guard lock(seen_mutex);
  EXPECT_EQ(seen_shapes,
            (std::vector<std::string>{
                "lockstep:all_reduce async [2, 3]", "lockstep:all_reduce async [2]",
                "lockstep:all_gather async [5]", "lockstep:all_reduce_coalesced async [1] [2]",
                "lockstep:send async [7]", "lockstep:recv async [7]", "lockstep:barrier async"}));
}

}  // namespace
}  // namespace lockstep
