// What others see of an operation: its duration, completion hooks, and a profiler's events.
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <latch>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

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
