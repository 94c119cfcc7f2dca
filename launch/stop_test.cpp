// However a job ends, nothing of it is left. Real processes, real kills.
#include <gtest/gtest.h>

#include "launch/launcher_testing.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/net/secret.h"

namespace lockstep::launch {
namespace {

using process_testing::dies;
using process_testing::is_dead;
using process_testing::pid_in;
using process_testing::read_file;
using process_testing::TemporaryFolder;

pid_t parent_of(pid_t pid) {
  const std::string stat = read_file(base::cat("/proc/", pid, "/stat"));
  std::istringstream rest(stat.substr(stat.rfind(')') + 2));
  char state = 0;
  pid_t parent = 0;
  rest >> state >> parent;
  return parent;
}

// Whether both workers printed the word, in one line or in two.
bool both_print(const Launcher& launcher, const std::string& word) {
  return process_testing::eventually([&] {
    const std::string out = launcher.out();
    return contains(out, "[0,1] " + word) || (contains(out, "[0] " + word) && contains(out, "[1] " + word));
  });
}

// A job whose worker 0 ignores SIGTERM and has a child in the background, one in a session of its own, and
// one that was orphaned on purpose.
struct StubbornJob {
  std::string script() const {
    const std::string stay = "while :; do sleep 1000; done";
    return base::cat("if test $RANK = 0; then trap '' TERM; ",                                //
                     "sh -c 'echo $$ > ", folder.file("background"), "; ", stay, "' & ",      //
                     "setsid sh -c 'echo $$ > ", folder.file("session"), "; ", stay, "' & ",  //
                     "sh -c '(setsid sh -c \"echo \\$\\$ > ", folder.file("orphan"), "; ", stay,
                     "\" &)'; ",  //
                     "fi; echo $$ > ", folder.file("worker"), "$RANK; ", stay);
  }
  // All have started.
  std::vector<pid_t> pids() const {
    std::vector<pid_t> found;
    for (const char* name : {"worker0", "worker1", "background", "session", "orphan"}) {
      found.push_back(pid_in(folder.file(name)));
    }
    return found;
  }
  TemporaryFolder folder;
};

std::vector<std::string> arguments(const StubbornJob& job) {
  return {"run", "-n", "2", "--grace", "0.3", "--", "sh", "-c", job.script()};
}

TEST(Stop, KillingTheLauncherLeavesNothing) {
  StubbornJob job;
  Launcher launcher(arguments(job));
  const auto pids = job.pids();
  const pid_t reaper = parent_of(pids[0]);
  launcher.kill(SIGKILL);
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  for (const pid_t pid : pids) {
    ASSERT_GT(pid, 1);
    EXPECT_TRUE(dies(pid)) << pid;
  }
  EXPECT_TRUE(dies(reaper));
}

TEST(Stop, KillingTheReaperLeavesNothing) {
  StubbornJob job;
  Launcher launcher(arguments(job));
  const auto pids = job.pids();
  const pid_t reaper = parent_of(pids[0]);
  ASSERT_GT(reaper, 1);
  ASSERT_NE(reaper, launcher.pid());
  ::kill(reaper, SIGKILL);
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL) << launcher.err();
  for (const pid_t pid : pids) {
    ASSERT_GT(pid, 1);
    EXPECT_TRUE(is_dead(pid)) << pid;
  }
}

TEST(Stop, TheWholeTreeEndsWhenAWorkerFails) {
  StubbornJob job;
  Launcher launcher(arguments(job));
  const auto pids = job.pids();
  ::kill(pids[1], SIGKILL);
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL);
  EXPECT_TRUE(contains(launcher.err(), "rank    1 (local rank 1)")) << launcher.err();
  for (const pid_t pid : pids) {
    ASSERT_GT(pid, 1);
    EXPECT_TRUE(is_dead(pid)) << pid;
  }
}

TEST(Stop, ASecondInterruptKillsAtOnce) {
  StubbornJob job;
  Launcher launcher({"run", "-n", "2", "--grace", "1000", "--", "sh", "-c", job.script()});
  const auto pids = job.pids();
  launcher.kill(SIGTERM);
  ASSERT_TRUE(process_testing::eventually([&] { return contains(launcher.err(), "SIGTERM passed on"); }));
  launcher.kill(SIGINT);
  EXPECT_NE(launcher.wait(), 0);
  for (const pid_t pid : pids) EXPECT_TRUE(is_dead(pid)) << pid;
}

TEST(Stop, WorkersMayAnswerATerminationThemselves) {
  Launcher launcher({"run", "-n", "2", "--", "sh", "-c",
                     "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.01; done"});
  ASSERT_TRUE(both_print(launcher, "ready"));
  launcher.kill(SIGTERM);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_TRUE(both_print(launcher, "saved")) << launcher.out();
}

TEST(Stop, AnInterruptEndsTheWorkersAndShowsInTheExitCode) {
  Launcher launcher({"run", "-n", "2", "--", "sh", "-c", "echo ready; exec sleep 1000"});
  ASSERT_TRUE(both_print(launcher, "ready"));
  launcher.kill(SIGINT);
  EXPECT_EQ(launcher.wait(), 128 + SIGINT);
  EXPECT_FALSE(contains(launcher.err(), "root cause")) << launcher.err();
}

TEST(Stop, AnInterruptDoesNotWaitForAHostThatNeverCame) {
  TemporaryFolder folder;
  JobSecret::mint().write_file(folder.file("secret"));
  Launcher launcher({"run", "--nnodes=2", "--node-rank=0", "--master-port",
                     base::cat(30000 + ::getpid() % 2000), "--", "sh", "-c", "echo ready; exec sleep 1000"},
                    {.environment = {{"LOCKSTEP_SECRET_FILE", folder.file("secret")}}});
  ASSERT_TRUE(process_testing::eventually([&] { return contains(launcher.out(), "ready"); }))
      << launcher.err();
  launcher.kill(SIGINT);
  EXPECT_EQ(launcher.wait(), 128 + SIGINT) << launcher.err();
}

TEST(Stop, UserSignalsArePassedOnWithoutStopping) {
  // A shell without a handler stands between the launcher and the one that has one, and is not harmed.
  Launcher launcher({"run", "-n", "2", "--", "sh", "-c", "sh -c \"$0\"; true",
                     "trap 'echo checkpoint; exit 0' USR1; echo ready; while :; do sleep 0.01; done"});
  ASSERT_TRUE(both_print(launcher, "ready"));
  launcher.kill(SIGUSR1);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_TRUE(both_print(launcher, "checkpoint")) << launcher.out();
}

// A worker that prints "ready" and ends well when the file is there.
std::string wait_for(const std::string& file) {
  return base::cat("echo ready; while ! test -e ", file, "; do sleep 0.01; done");
}

TEST(Stop, AUserSignalWithoutAHandlerEndsNoWorker) {
  TemporaryFolder folder;
  Launcher launcher({"run", "-n", "2", "--", "sh", "-c", wait_for(folder.file("go"))});
  ASSERT_TRUE(both_print(launcher, "ready"));
  launcher.kill(SIGUSR1);
  EXPECT_TRUE(process_testing::eventually([&] {
    return contains(launcher.err(), "SIGUSR1: no process of the workers handles it") ||
           is_dead(launcher.pid());
  })) << launcher.err();
  std::ofstream(folder.file("go")) << "";
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
}

// As the shell starts jobs in the background of a script, and nohup.
TEST(Stop, ASignalThatWasIgnoredFromTheStartStaysIgnored) {
  TemporaryFolder folder;
  Launcher launcher({"run", "-n", "2", "--", "sh", "-c", wait_for(folder.file("go"))},
                    {.ignored = {SIGINT, SIGHUP}});
  ASSERT_TRUE(both_print(launcher, "ready"));
  launcher.kill(SIGINT);
  launcher.kill(SIGHUP);
  launcher.kill(SIGUSR2);  // seen after the others
  EXPECT_TRUE(process_testing::eventually(
      [&] { return contains(launcher.err(), "SIGUSR2") || is_dead(launcher.pid()); }));
  EXPECT_FALSE(contains(launcher.err(), "SIGINT") || contains(launcher.err(), "SIGHUP")) << launcher.err();
  std::ofstream(folder.file("go")) << "";
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
}

TEST(Stop, WhatAFinishedScriptLeftRunningIsEnded) {
  TemporaryFolder folder;
  Launcher launcher({"run", "--grace", "0.3", "--", "sh", "-c",
                     base::cat("setsid sh -c 'trap \"\" TERM; echo $$ > ", folder.file("left"),
                               "; while :; do sleep 1000; done' & while ! test -s ", folder.file("left"),
                               "; do sleep 0.01; done")});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_TRUE(is_dead(pid_in(folder.file("left"))));
}

TEST(Stop, AReaderThatGoesAwayEndsTheJob) {
  TemporaryFolder folder;
  // `head` leaves after two lines; the launcher then gets SIGPIPE, as any program would.
  Launcher launcher({"run", "--", "sh", "-c",
                     base::cat(kLauncher, " run -n 2 -- sh -c 'echo $$ > ", folder.file("worker"),
                               "$RANK; while echo line $RANK; do sleep 0.01; done' | head -n 2")});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_TRUE(dies(pid_in(folder.file("worker0"))));
  EXPECT_TRUE(dies(pid_in(folder.file("worker1"))));
}

}  // namespace
}  // namespace lockstep::launch
