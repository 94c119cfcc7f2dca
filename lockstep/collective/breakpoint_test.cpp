#include "lockstep/collective/breakpoint.h"

#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

#include "lockstep/base/log.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using namespace testing;

// A child under a debugger, which is this test: it stops at the breakpoint, and goes on when told to.
TEST(Breakpoint, StopsUnderADebuggerAndGoesOn) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(77);
    init_process_group();
    breakpoint();
    ::_exit(default_group()->timeout() >= Milliseconds(3600 * 1000) ? 0 : 1);
  }
  int status = 0, n_traps = 0;
  while (::waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
    n_traps += WSTOPSIG(status) == SIGTRAP ? 1 : 0;
    const int pass_on = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status);
    ::ptrace(PTRACE_CONT, child, nullptr, pass_on);
  }
  ASSERT_TRUE(WIFEXITED(status)) << status;
  ASSERT_NE(WEXITSTATUS(status), 77) << "ptrace is not allowed here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(n_traps, 1);
}

std::atomic<int> n_told{0};

TEST(Breakpoint, HoldsTheOthersUntilItsRankGoesOn) {
  n_told = 0;
  set_log_sink([](LogLevel, std::string_view text) {
    n_told += text.find("rank 1 waits") != text.npos && text.find("gdb -p ") != text.npos ? 1 : 0;
  });
  std::atomic<bool> reached{false};
  world(3, [&](int rank) {
    const auto other = new_group({.timeout = Milliseconds(50'000)});
    for (int hit = 0; hit < 3; ++hit) {
      if (rank == 1 && hit == 2) reached = true;
      breakpoint({.rank = 1, .skip = 2, .timeout = Milliseconds(100)});  // no debugger comes
      if (rank == 1) {
        EXPECT_EQ(n_told, hit == 2 ? 1 : 0) << "passes twice";
      }
    }
    EXPECT_TRUE(reached);
    EXPECT_EQ(other->timeout(), Milliseconds(50'000)) << "longer than asked for: kept";
    other->set_timeout(Milliseconds(10));
    breakpoint({.rank = 1, .timeout = Milliseconds(100)});
    EXPECT_EQ(other->timeout(), Milliseconds(100));
    refused([] { breakpoint({.rank = 3}); }, "rank is 3");
    refused([] { breakpoint({.skip = -1}); }, "skip");
    refused([] { breakpoint({.timeout = Milliseconds(0)}); }, "timeout");
  });
  set_log_sink(nullptr);
}

}  // namespace
}  // namespace lockstep
