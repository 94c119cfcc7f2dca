// The barrier that knows who is missing, and the wrapper that compares what ranks run.
#include "lockstep/debug/debug.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <latch>
#include <stdexcept>
#include <string>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/slow_wait_testing.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

constexpr Milliseconds kShort{200};

// Groups made in this scope compare what their ranks run.
struct Detail {
  Detail() { set_debug_level(DebugLevel::kDetail); }
  ~Detail() { set_debug_level(DebugLevel::kOff); }
};

void refused_by_timeout(const std::function<void()>& fn, const std::string& part) {
  const auto failure = caught(fn);
  EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
  EXPECT_TRUE(says(failure, part)) << failure.message;
}

TEST(MonitoredBarrier, LetsNoRankPassBeforeAllHaveArrived) {
  for (const int n : {1, 2, 3, 8}) {
    std::atomic<int> come{0};
    run_threads(n, [&](int) {
      for (int round = 1; round <= 5; ++round) {
        ++come;
        monitored_barrier();
        EXPECT_GE(come, n * round);
        monitored_barrier();
      }
    });
  }
}

TEST(MonitoredBarrier, RemovesItsKeys) {
  run_threads(2, [&](int rank) {
    for (int round = 0; round < 20; ++round) monitored_barrier();
    barrier();
    if (rank != 0) return;
    int left = 0;
    for (const auto& key : default_group()->store()->list_keys())
      left += key.starts_with("monitored_barrier");
    EXPECT_LE(left, 1);
  });
}

TEST(MonitoredBarrier, NamesTheFirstMissingRankAndLetsNoRankPass) {
  std::latch told(2);
  run_threads(4, [&](int rank) {
    if (rank == 1 || rank == 3) return told.wait();
    const auto failure = caught([] { monitored_barrier({.timeout = kShort}); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
    EXPECT_TRUE(says(failure, "rank 1 did not arrive within 200 ms")) << failure.message;
    EXPECT_FALSE(says(failure, "3 did not")) << failure.message;
    EXPECT_TRUE(says(failure, "debug_test.cpp:")) << failure.message;
    EXPECT_EQ(says(failure, "this rank arrived, but rank 0 gave up"), rank != 0) << failure.message;
    told.count_down();
  });
}

TEST(MonitoredBarrier, NamesEveryMissingRankWhenRequestedAndNotifiesLateRanks) {
  std::latch told(2);
  run_threads(4, [&](int rank) {
    const bool late = rank % 2 == 1;
    if (late) told.wait();
    const auto failure = caught([] { monitored_barrier({.timeout = kShort, .wait_all_ranks = true}); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
    EXPECT_TRUE(says(failure, "ranks 1 3 did not arrive")) << failure.message;
    if (!late) told.count_down();
    monitored_barrier();  // in step again
    all_reduce(at::ones({1}));
  });
}

TEST(MonitoredBarrier, SaysThatRankZeroDidNotCome) {
  std::latch told(1);
  run_threads(2, [&](int rank) {
    default_group()->set_timeout(kShort);
    if (rank == 0) return told.wait();
    const auto failure = caught([] { monitored_barrier(); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
    EXPECT_TRUE(says(failure, "this rank arrived, but rank 0 did not answer")) << failure.message;
    told.count_down();
  });
}

// Longer than a store is asked at a time, so that only the meeting itself has something to say.
constexpr Milliseconds kSlow{300};

// The late ranks come once the lines of those that wait were seen.
void say_who_is_missing(const std::string& where, const std::function<void()>& meet) {
  const SlowLines lines(kSlow);
  run_threads(4, [&](int rank) {
    if (rank == 1 || rank == 3) {
      EXPECT_NE(lines.await("this rank waits for ranks 1 3; waiting continues until "), "");
      EXPECT_NE(lines.await("this rank waits for rank 0, which waits for the others; waiting continues"), "");
    }
    meet();
  });
  for (const int rank : {0, 2}) {
    const auto said = lines.with(base::cat("(rank ", rank, " of 4, called at "));
    ASSERT_EQ(said.size(), 1u);
    EXPECT_TRUE(said.front().starts_with("slow: " + where)) << said.front();
    EXPECT_NE(said.front().find("debug_test.cpp:"), std::string::npos) << said.front();
  }
}

TEST(MonitoredBarrier, SaysOnceWhoIsMissingWhenItLasts) {
  say_who_is_missing("monitored_barrier of group \"0\"", [] { monitored_barrier(); });
}

TEST(DetailWrapper, SaysOnceWhoIsMissingWhenItsCheckLasts) {
  const Detail detail;
  say_who_is_missing("all_reduce of group \"0\"", [] { all_reduce(at::ones({1})); });
}

TEST(MonitoredBarrier, WorksInSubGroupsByTheirWorldRanks) {
  std::latch told(1);
  run_threads(3, [&](int rank) {
    const auto group = new_group({1, 2});
    if (rank == 0) return monitored_barrier({.group = group});  // warns, does nothing
    monitored_barrier({.group = group});
    if (rank == 2) return told.wait();
    EXPECT_TRUE(says(caught([&] { monitored_barrier({.group = group, .timeout = kShort}); }),
                     "rank 2 did not arrive"));
    told.count_down();
    destroy_process_group(group);
    EXPECT_EQ(caught([&] { monitored_barrier({.group = group}); }).kind, ErrorKind::kUsage);
    EXPECT_EQ(caught([&] { monitored_barrier({.timeout = Milliseconds(-1)}); }).kind, ErrorKind::kUsage);
  });
}

TEST(MonitoredBarrier, WithATimeoutOfZeroLooksOnce) {
  std::latch told(1);
  run_threads(2, [&](int rank) {
    if (rank == 1) {
      told.wait();
      refused_by_timeout([] { monitored_barrier({.timeout = Milliseconds(0)}); }, "rank 0 gave up waiting");
      return monitored_barrier();
    }
    refused_by_timeout([] { monitored_barrier({.timeout = Milliseconds(0)}); },
                       "rank 1 did not arrive within 0 ms");
    told.count_down();
    monitored_barrier();
  });
}

TEST(DetailWrapper, LetsRanksInStepThrough) {
  const Detail detail;
  for (const int n : {1, 2, 3, 4}) {
    run_threads(n, [n](int rank) {
      const auto group = new_group();
      for (const auto& each : {default_group(), group}) {
        auto tensor = at::ones({5});
        all_reduce(tensor, {.group = each});
        all_reduce(tensor, {.group = each, .async_op = true}).wait();
        broadcast(tensor, {.src = 0, .group = each});
        barrier({.group = each});
        EXPECT_EQ(tensor[0].item<float>(), static_cast<float>(n * n));
        EXPECT_EQ(each->sequence_number(), 4u);
      }
      EXPECT_EQ(get_rank(group), rank);
      EXPECT_EQ(get_backend(group), n == 1 ? "none" : "host");
      auto shared = empty_shared({3});
      all_reduce(shared.fill_(1));
      EXPECT_EQ(shared[0].item<float>(), static_cast<float>(n));
    });
  }
}

TEST(DetailWrapper, ComparesNoMessagesAndNoShapesThatMayDiffer) {
  const Detail detail;
  run_threads(3, [](int rank) {
    auto tensor = at::ones({2});
    if (rank == 0) send(tensor, {.dst = 1});
    if (rank == 1) recv(tensor, {.src = 0});
    all_reduce(tensor);  // rank 2 has started fewer operations
    // Rank r sends r rows to each rank.
    const auto rows = static_cast<std::int64_t>(rank);
    auto output = at::empty({3});
    all_to_all_single(output, at::ones({3 * rows}),
                      {.output_split_sizes = {0, 1, 2}, .input_split_sizes = {rows, rows, rows}});
    EXPECT_EQ(output[2].item<float>(), 1);
  });
}

// Runs `mine` on rank 1 and `theirs` elsewhere: every rank must report what differs, and the group go on.
void expect_out_of_step(const std::function<void()>& mine, const std::function<void()>& theirs,
                        const std::string& difference) {
  const Detail detail;
  run_threads(3, [&](int rank) {
    const auto failure = caught([&] { rank == 1 ? mine() : theirs(); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage) << failure.message;
    EXPECT_TRUE(says(failure, "out of step")) << failure.message;
    EXPECT_TRUE(says(failure, rank == 1 ? "rank 1 runs" : "but rank 1 runs")) << failure.message;
    EXPECT_TRUE(says(failure, difference)) << failure.message;
    // Both fingerprints, whole.
    std::size_t n_prints = 0;
    for (std::size_t at = 0; (at = failure.message.find(", sequence number ", at)) != std::string::npos; ++at)
      ++n_prints;
    EXPECT_EQ(n_prints, 2u) << failure.message;
    EXPECT_TRUE(says(failure, ", device types cpu")) << failure.message;
  });
}

TEST(DetailWrapper, ReportsOnEveryRankWhatDiffers) {
  const auto reduce = [](at::Tensor tensor) { return [tensor] { all_reduce(tensor); }; };
  const auto ones = at::ones({2, 3});
  expect_out_of_step([] { barrier(); }, reduce(ones), "operation: ");
  expect_out_of_step(reduce(at::ones({3, 2})), reduce(ones), "shapes: ");
  expect_out_of_step(reduce(at::ones({2, 3}, at::kDouble)), reduce(ones), "dtypes: ");
  expect_out_of_step([&] { all_reduce_coalesced({ones.clone()}); },
                     [&] {
                       all_reduce_coalesced({ones.clone(), ones.clone()});
                     },
                     "number of tensors: ");
  // Rank 1 has refused a call that the others did not make.
  expect_out_of_step(
      [&] {
        caught([] { all_reduce(at::Tensor()); });
        all_reduce(ones.clone());
      },
      reduce(ones), "sequence number: ");
}

TEST(DetailWrapper, NamesTheMissingRanksAndWhatTheOthersRun) {
  const Detail detail;
  std::latch told(2);
  run_threads(3, [&](int rank) {
    if (rank == 1) return told.wait();
    const auto failure = caught([] { all_reduce(at::ones({2, 3}), {.timeout = kShort}); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
    EXPECT_TRUE(says(failure, "running all_reduce, sequence number 1")) << failure.message;
    EXPECT_TRUE(says(failure, "[2, 3]")) << failure.message;
    EXPECT_TRUE(says(failure, "rank 1 did not arrive")) << failure.message;
    told.count_down();
  });
}

// The group's own timeout is half an hour: only the news of the loss can end these.
TEST(DetailWrapper, NoRankWaitsForALostRank) {
  const Detail detail;
  std::atomic<int> told{0};
  const auto body = [&](int rank) {
    all_reduce(at::ones({1}));
    if (rank == 1) throw std::out_of_range("no more data");
    EXPECT_EQ(caught([] { all_reduce(at::ones({1})); }).kind, ErrorKind::kPeerLost);
    EXPECT_EQ(caught([] { monitored_barrier(); }).kind, ErrorKind::kPeerLost);
    ++told;
  };
  EXPECT_THROW(run_threads(3, body), std::out_of_range);
  EXPECT_EQ(told, 2);
}

TEST(DetailWrapper, AddsTheStackWhenAsked) {
  ::setenv("TORCH_SHOW_CPP_STACKTRACES", "1", 1);
  expect_out_of_step([] { barrier(); }, [] { all_reduce(at::ones({1})); },
                     "C++ stack, innermost first:\n#0 ");
  ::unsetenv("TORCH_SHOW_CPP_STACKTRACES");
}

}  // namespace
}  // namespace lockstep
