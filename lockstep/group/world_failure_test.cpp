// Ranks as threads, and what happens when one of them throws, does not come or goes away, or the group is
// aborted.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>

#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/base/error.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/world.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep {
namespace {

using namespace testing;

TEST(RunThreads, MakesEachThreadARankOfItsOwnWorld) {
  for (const int n : {1, 2, 3, 8}) {
    std::atomic<int> ranks{0};
    run_threads(n, [&](int rank) {
      EXPECT_EQ(get_rank(), rank);
      EXPECT_EQ(get_world_size(), n);
      EXPECT_EQ(get_backend(), n == 1 ? "none" : "host");
      EXPECT_EQ(get_backend_config(), "cpu:" + get_backend());
      EXPECT_EQ(get_process_group_ranks().size(), static_cast<std::size_t>(n));
      ++ranks;
      // Threads a rank starts are no ranks.
      base::Thread("helper", [] { EXPECT_FALSE(is_initialized()); });
    });
    EXPECT_EQ(ranks, n);
    EXPECT_FALSE(is_initialized());
  }
}

TEST(RunThreads, RefusesNonsenseAndNesting) {
  EXPECT_EQ(caught([] { run_threads(0, [](int) {}); }).kind, ErrorKind::kUsage);
  EXPECT_EQ(caught([] { run_threads(1, nullptr); }).kind, ErrorKind::kUsage);
  run_threads(1, [](int) { EXPECT_EQ(caught([] { run_threads(1, [](int) {}); }).kind, ErrorKind::kUsage); });
}

TEST(RunThreads, RethrowsTheFirstExceptionAndTheOthersNameWhoThrew) {
  for (const bool async : {false, true}) {
    std::atomic<int> told{0};
    const auto body = [&](int rank) {
      all_reduce(at::ones({1}));
      if (rank == 2) throw std::out_of_range("no more data");
      const auto failure = caught([&] { all_reduce(at::ones({1}), {.async_op = async}).wait(); });
      EXPECT_EQ(failure.kind, ErrorKind::kPeerLost) << failure.message;
      EXPECT_TRUE(says(failure, "no more data")) << failure.message;
      ASSERT_TRUE(failure.peer);
      EXPECT_EQ(failure.peer->rank, 2);
      EXPECT_TRUE(failure.peer->cause.find("no more data") != std::string::npos) << failure.peer->cause;
      // Broken for good: the same error again.
      EXPECT_EQ(caught([] { barrier(); }).kind, ErrorKind::kPeerLost);
      ++told;
      base::raise(failure);  // an echo: must not hide the first
    };
    EXPECT_THROW(run_threads(4, body), std::out_of_range);
    EXPECT_EQ(told, 3);
  }
}

TEST(RunThreads, ARankThatReturnsEarlyIsMissedByName) {
  run_threads(3, [](int rank) {
    if (rank == 1) return;
    const auto failure = caught([] { barrier(); });
    EXPECT_EQ(failure.kind, ErrorKind::kPeerLost) << failure.message;
    ASSERT_TRUE(failure.peer);
    EXPECT_EQ(failure.peer->rank, 1);
  });
}

TEST(Timeouts, NameWhoIsMissingAndBreakTheGroup) {
  std::latch done(2);
  run_threads(3, [&](int rank) {
    if (rank == 1) return done.wait();
    const auto failure = caught([] { barrier({.timeout = Milliseconds(50)}); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
    EXPECT_TRUE(says(failure, "barrier #1") && says(failure, "world_failure_test.cpp:")) << failure.message;
    EXPECT_TRUE(says(failure, "rank 1") || says(failure, "ranks 1")) << failure.message;
    EXPECT_EQ(caught([] { barrier(); }).kind, ErrorKind::kTimeout);
    done.count_down();
  });
}

TEST(Timeouts, ComeFromTheEnvironmentWhereTheProgramGivesNone) {
  const auto timeout_of = [](const InitOptions& options) {
    init_process_group(options);
    const auto timeout = default_group()->timeout();
    destroy_process_group();
    return timeout;
  };
  ::setenv("LOCKSTEP_TIMEOUT", "2.5", 1);
  EXPECT_EQ(timeout_of({}), Milliseconds(2500));
  EXPECT_EQ(timeout_of({.timeout = Milliseconds(7000)}), Milliseconds(7000));
  EXPECT_EQ(timeout_of({.timeout = std::chrono::minutes(30)}), kDefaultGroupTimeout)
      << "given, though it is the default";
  run_threads(2, [](int) { EXPECT_EQ(default_group()->timeout(), Milliseconds(2500)); });
  ::setenv("LOCKSTEP_TIMEOUT", "soon", 1);
  const auto failure = caught([] { init_process_group(); });
  EXPECT_EQ(failure.kind, ErrorKind::kUsage);
  EXPECT_TRUE(says(failure, "LOCKSTEP_TIMEOUT")) << failure.message;
  ::unsetenv("LOCKSTEP_TIMEOUT");
}

// Its server is stopped: the kernel goes on to accept connections, and nobody answers.
TEST(Timeouts, OfInitHoldWhenTheStoreDoesNotAnswerAnyMore) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const base::Fd in(ends[0]), out(ends[1]);
  const pid_t server = ::fork();
  if (server == 0) {
    const auto master = TcpStore::open("127.0.0.1", {.port = 0, .is_master = true});
    const std::uint16_t port = master->port();
    [[maybe_unused]] const auto n = ::write(out.get(), &port, sizeof port);
    for (;;) ::pause();
  }
  std::uint16_t port = 0;
  ASSERT_EQ(::read(in.get(), &port, sizeof port), static_cast<ssize_t>(sizeof port));
  // Much longer than anything here takes.
  const std::shared_ptr<Store> store =
      TcpStore::open("127.0.0.1", {.port = port, .timeout = Milliseconds(3'600'000)});
  ASSERT_EQ(::kill(server, SIGSTOP), 0);
  auto init = std::async(std::launch::async, [&] {
    return caught([&] {
      init_process_group({.timeout = Milliseconds(200), .world_size = 2, .rank = 0, .store = store});
    });
  });
  const bool ended = init.wait_for(std::chrono::seconds(30)) == std::future_status::ready;
  ::kill(server, SIGKILL);  // ends it in any case
  ::waitpid(server, nullptr, 0);
  EXPECT_TRUE(ended) << "it waits as long as the store's handle would";
  EXPECT_EQ(init.get().kind, ErrorKind::kTimeout);
}

TEST(Timeouts, OfACallArePositiveOrNone) {
  run_threads(2, [](int rank) {
    const int other = 1 - rank;
    auto tensor = at::ones({2});
    for (const auto timeout : {Milliseconds(0), Milliseconds(-1)}) {
      const std::function<void()> calls[] = {
          [&] { all_reduce(tensor, {.timeout = timeout}); },
          [&] { barrier({.async_op = true, .timeout = timeout}); },
          [&] { send(tensor, {.dst = other, .timeout = timeout}); },
          [&] {
            batch_isend_irecv({{P2PKind::kIrecv, tensor, other}}, {.timeout = timeout});
          },
          [&] {
            all_reduce_coalesced({tensor, tensor}, {.timeout = timeout});
          },
      };
      for (const auto& call : calls) {
        const auto failure = caught(call);
        EXPECT_EQ(failure.kind, ErrorKind::kUsage) << failure.message;
        EXPECT_TRUE(says(failure, base::cat("a timeout of ", timeout.count(), " ms")) &&
                    says(failure, "world_failure_test.cpp:"))
            << failure.message;
      }
    }
    // The group goes on. No timeout: of a call, then of all.
    all_reduce(tensor, {.timeout = kNoTimeout});
    EXPECT_EQ(tensor[0].item<float>(), 2);
    set_timeout(kNoTimeout);
    all_reduce(tensor);
    EXPECT_EQ(tensor[0].item<float>(), 4);
  });
  // A rank that refuses alone is found out by its next collective, as with every refusal.
  run_threads(2, [](int rank) {
    if (rank == 0) {
      EXPECT_EQ(caught([] { barrier({.timeout = Milliseconds(0)}); }).kind, ErrorKind::kUsage);
    }
    const auto failure = caught([] { barrier(); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage) << failure.message;
    EXPECT_TRUE(says(failure, "after it refused barrier")) << failure.message;
  });
}

TEST(Timeouts, ComeFromTheGroupUnlessTheCallHasItsOwn) {
  std::latch done(1);
  run_threads(2, [&](int rank) {
    if (rank == 1) return done.wait();
    EXPECT_EQ(default_group()->timeout(), kDefaultGroupTimeout);
    set_timeout(Milliseconds(30));
    EXPECT_EQ(default_group()->timeout(), Milliseconds(30));
    EXPECT_EQ(caught([] { set_timeout(Milliseconds(0)); }).kind, ErrorKind::kUsage);
    EXPECT_EQ(caught([] { set_timeout(Milliseconds(1), non_member_group()); }).kind, ErrorKind::kUsage);
    EXPECT_EQ(caught([] { all_reduce(at::ones({1}), {.async_op = true}).wait(); }).kind, ErrorKind::kTimeout);
    done.count_down();
  });
}

TEST(Abort, EndsWhatEveryRankWaitsForAndGivesTheReason) {
  run_threads(3, [](int rank) {
    if (rank == 2) {
      default_group()->abort("operator pressed the button");
    } else {
      const auto failure = caught([] { barrier(); });
      EXPECT_EQ(failure.kind, ErrorKind::kAborted) << failure.message;
      EXPECT_TRUE(says(failure, "operator pressed the button")) << failure.message;
    }
    EXPECT_EQ(caught([] { all_reduce(at::ones({1})); }).kind, ErrorKind::kAborted);
  });
}

TEST(Abort, ReachesAThreadBlockedInAnOperation) {
  std::latch done(1);
  run_threads(2, [&](int rank) {
    if (rank == 1) return done.wait();
    const auto group = default_group();
    base::Thread aborter("aborter", [group] { group->abort("from another thread"); });
    EXPECT_EQ(caught([] { broadcast(at::ones({1}), {.src = 0}); }).kind, ErrorKind::kAborted);
    done.count_down();
  });
}

}  // namespace
}  // namespace lockstep
