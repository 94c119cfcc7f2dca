// The futures of a Work: what they resolve to, on which thread and in which modes, and their errors.
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

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

}  // namespace
}  // namespace lockstep
