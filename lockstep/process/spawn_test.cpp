// spawn in real programs (spawn_program.cpp), by fork and by starting the program anew.
#include "lockstep/process/spawn.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <optional>
#include <set>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/path_testing.h"
#include "lockstep/process/process_tree.h"
#include "lockstep/process/supervisor.h"
#include "lockstep/process/testing.h"

namespace lockstep {
namespace {

using process_testing::dies;
using process_testing::pid_in;
using process_testing::read_file;
using process_testing::TemporaryFolder;
using Lines = std::multiset<std::string>;

// A run of spawn_program.
class Program {
 public:
  explicit Program(const std::string& method, const std::string& which) {
    const base::Fd out(::open(folder.file("out").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const process::ChildSpec spec{
        .argv = {path_testing::from_program(LOCKSTEP_SPAWN_PROGRAM), method, which, folder.file("")},
        .environment = process_testing::own_environment(),
        .standard_output = out.get()};
    supervisor_.emplace(process::ProcessTree::start({&spec, 1}), process::SupervisorOptions{});
  }
  // Exit code, once it and all it started have ended.
  int wait() {
    const Deadline deadline = Deadline::after(process_testing::kPatience);
    while (!supervisor_->finished() && !deadline.expired()) {
      pollfd ready{.fd = supervisor_->fd(), .events = POLLIN, .revents = 0};
      ::poll(&ready, 1, std::min(deadline, supervisor_->next_deadline()).poll_timeout_ms());
      supervisor_->step();
    }
    return supervisor_->exits().empty() ? -1 : supervisor_->exits()[0].exit_code();
  }
  pid_t pid() const { return supervisor_->pids()[0]; }
  std::string out() const { return read_file(folder.file("out")); }
  Lines lines() const {
    Lines found;
    std::istringstream text(out());
    for (std::string line; std::getline(text, line);) found.insert(line);
    return found;
  }

  TemporaryFolder folder;

 private:
  std::optional<process::Supervisor> supervisor_;
};

class Spawn : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Methods, Spawn, ::testing::Values("fork", "reexec"),
                         [](const auto& method) { return std::string(method.param); });

TEST_P(Spawn, RunsTheFunctionInAWorldOfProcesses) {
  Program program(GetParam(), "meet");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.lines(), (Lines{"0 is rank 0 of 3", "1 is rank 1 of 3", "2 is rank 2 of 3", "joined"}));
}

TEST_P(Spawn, EachCallRunsItsOwnFunctionOnce) {
  Program program(GetParam(), "twice");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.lines(), (Lines{"first 0", "first 1", "second 0", "second 1"}));
}

TEST_P(Spawn, AnExceptionComesBackWithIndexAndText) {
  Program program(GetParam(), "throws");
  EXPECT_EQ(program.wait(), 0);
  const std::string out = program.out();
  EXPECT_EQ(out.rfind("index 1 code 1 pid 1 spawned process 1 (pid ", 0), 0u) << out;
  EXPECT_NE(out.find("exited with code 1: bad weights"), std::string::npos) << out;
}

TEST_P(Spawn, AProcessThatFailedByItselfIsNamedAndNotOneThatLostIt) {
  Program program(GetParam(), "blames");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.out().rfind("index 1 spawned process 1 ", 0), 0u) << program.out();
  EXPECT_NE(program.out().find("bad weights"), std::string::npos) << program.out();
}

TEST_P(Spawn, ASignalIsNamedHereAndInTheStore) {
  Program program(GetParam(), "killed");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.lines(), (Lines{"1 killed by SIGKILL (9)", "killed by SIGKILL (9)"}));
}

TEST_P(Spawn, ASurvivorThatIgnoresSigtermIsKilledAfterTheGrace) {
  Program program(GetParam(), "stubborn");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.lines(), (Lines{"1 exited with code 4"}));
}

TEST_P(Spawn, JoinTimesOutAndDestructionEndsTheProcesses) {
  Program program(GetParam(), "wait_then_join");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.lines(), (Lines{"pids 2 ended 0", "zero is no timeout"}));
}

TEST_P(Spawn, ProcessesAndTheirOwnChildrenEndWithTheirParent) {
  Program program(GetParam(), "forever");
  std::vector<pid_t> pids;
  for (const char* name : {"child0", "child1", "grandchild0", "grandchild1"}) {
    pids.push_back(pid_in(program.folder.file(name)));
    ASSERT_GT(pids.back(), 1) << name;
  }
  ::kill(program.pid(), SIGKILL);
  for (const pid_t pid : pids) EXPECT_TRUE(dies(pid)) << pid;
}

TEST_P(Spawn, StandardInputIsEmpty) {
  Program program(GetParam(), "reads_input");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.lines(), (Lines{"end of input 1"}));
}

TEST(SpawnMethod, ForkIsRefusedInAProcessWithThreads) {
  Program program("fork", "with_threads");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.out().rfind("usage: spawn by fork needs a process with a single thread", 0), 0u)
      << program.out();
}

TEST(SpawnMethod, AutoReexecutesAProgramWithThreads) {
  Program program("auto", "with_threads");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.lines(), (Lines{"ran 0"}));
}

TEST(SpawnMethod, AThreadThatEndsLeavesItsProcessesRunning) {
  Program program("auto", "from_a_thread");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.lines(), (Lines{"done 0", "done 1", "ended 1"}));
}

TEST(SpawnMethod, ASpawnedProcessMaySpawnByFork) {
  Program program("fork", "nested");
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.lines(), (Lines{"0 0", "0 1", "1 0", "1 1"}));
}

TEST(SpawnMethod, ASpawnedProcessCannotBeReexecutedToSpawn) {
  Program program("reexec", "nested");
  EXPECT_EQ(program.wait(), 1);
}

TEST(SpawnMethod, AWorldNeedsAProcess) {
  EXPECT_THROW(spawn(0, [](int) {}), Error);
}

}  // namespace
}  // namespace lockstep
