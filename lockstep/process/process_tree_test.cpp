// Real processes: what is started ends, however its owner, its reaper or itself behaves.
#include "lockstep/process/process_tree.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include "lockstep/base/error.h"
#include "lockstep/process/supervisor.h"
#include "lockstep/process/testing.h"

namespace lockstep::process {
namespace {

using process_testing::dies;
using process_testing::eventually;
using process_testing::is_dead;
using process_testing::pid_in;
using process_testing::read_file;
using process_testing::TemporaryFolder;

ChildSpec shell(const std::string& script) {
  return {.argv = {"sh", "-c", script}, .environment = process_testing::own_environment()};
}

// Steps until everything has ended.
void run_to_end(Supervisor& supervisor) {
  const Deadline deadline = Deadline::after(process_testing::kPatience);
  while (!supervisor.finished() && !deadline.expired()) {
    pollfd wait{.fd = supervisor.fd(), .events = POLLIN, .revents = 0};
    ::poll(&wait, 1, std::min(supervisor.next_deadline(), deadline).poll_timeout_ms());
    supervisor.step();
  }
  ASSERT_TRUE(supervisor.finished());
}

// A process that owns a tree of one script and does nothing else; for killing.
pid_t start_owner(const std::string& script, bool adopt) {
  const pid_t owner = ::fork();
  if (owner != 0) return owner;
  const ChildSpec spec = shell(script);
  Supervisor supervisor(
      ProcessTree::start({&spec, 1}, {.adopt_orphans = adopt, .owner_lost_grace = Milliseconds(50)}), {});
  while (!supervisor.finished()) {
    pollfd wait{.fd = supervisor.fd(), .events = POLLIN, .revents = 0};
    ::poll(&wait, 1, supervisor.next_deadline().poll_timeout_ms());
    supervisor.step();
  }
  ::_exit(0);
}

pid_t parent_of(pid_t pid) {
  const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
  std::istringstream rest(stat.substr(stat.rfind(')') + 2));
  char state = 0;
  pid_t parent = 0;
  rest >> state >> parent;
  return parent;
}

TEST(ProcessTree, ReportsHowAChildEnded) {
  struct Case {
    const char* script;
    const char* cause;
    int exit_code;
  };
  for (const Case& expected :
       {Case{"exit 0", "exited with code 0", 0}, Case{"exit 7", "exited with code 7", 7},
        Case{"kill -SEGV $$", "killed by SIGSEGV (11)", 128 + SIGSEGV}}) {
    const ChildSpec spec = shell(expected.script);
    Supervisor supervisor(ProcessTree::start({&spec, 1}), {});
    run_to_end(supervisor);
    ASSERT_EQ(supervisor.exits().size(), 1u);
    EXPECT_EQ(supervisor.exits()[0].cause(), expected.cause);
    EXPECT_EQ(supervisor.exits()[0].exit_code(), expected.exit_code);
    EXPECT_EQ(supervisor.first_failure().has_value(), expected.exit_code != 0);
  }
}

TEST(ProcessTree, AProgramThatCannotBeExecutedSaysWhy) {
  const std::vector<ChildSpec> specs = {{.argv = {"/no/such/program"}}};
  Supervisor supervisor(ProcessTree::start(specs), {});
  run_to_end(supervisor);
  ASSERT_EQ(supervisor.exits().size(), 1u);
  EXPECT_EQ(supervisor.exits()[0].cause(), "cannot be executed: No such file or directory");
  EXPECT_EQ(supervisor.exits()[0].exit_code(), 127);
}

TEST(ProcessTree, AFunctionRunsInACopyOfThisProcess) {
  int answer = 41;
  const std::vector<ChildSpec> specs = {{.body = [&answer] { return ++answer; }}};
  Supervisor supervisor(ProcessTree::start(specs), {});
  run_to_end(supervisor);
  EXPECT_EQ(supervisor.exits().at(0).exit_code(), 42);
  EXPECT_EQ(answer, 41);
}

TEST(ProcessTree, AProgramGetsOnlyTheDescriptorsItWasGiven) {
  TemporaryFolder folder;
  int given[2];
  int kept[2];
  ASSERT_EQ(::pipe2(given, O_CLOEXEC), 0);
  ASSERT_EQ(::pipe2(kept, O_CLOEXEC), 0);
  ChildSpec spec = shell("ls -l /proc/$$/fd > " + folder.file("list"));
  spec.inherited = {given[0]};
  Supervisor supervisor(ProcessTree::start({&spec, 1}), {});
  run_to_end(supervisor);
  const std::string list = read_file(folder.file("list"));
  EXPECT_NE(list.find(" " + std::to_string(given[0]) + " ->"), std::string::npos) << list;
  EXPECT_EQ(list.find(" " + std::to_string(kept[0]) + " ->"), std::string::npos) << list;
  for (const int fd : {given[0], given[1], kept[0], kept[1]}) ::close(fd);
}

TEST(ProcessTree, TheReaperHoldsNoPipeOpen) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  base::Fd reader(ends[0]);
  base::Fd writer(ends[1]);
  TemporaryFolder folder;
  // The first child closes its end at once, the second lives on: only a reaper that let go lets the pipe end.
  std::vector<ChildSpec> specs = {shell("exit 0"), shell("exec sleep 1000 >/dev/null 2>&1")};
  specs[0].standard_output = writer.get();
  ProcessTree tree = ProcessTree::start(specs);
  writer.reset();
  pollfd wait{.fd = reader.get(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(::poll(&wait, 1, static_cast<int>(process_testing::kPatience.count())), 1);
  char byte = 0;
  EXPECT_EQ(::read(reader.get(), &byte, 1), 0);
}

TEST(ProcessTree, ExitsAreReportedEvenWhenTheReaperEndsWithUnreadCommands) {
  const ChildSpec spec = shell("exec sleep 1000");
  ProcessTree tree = ProcessTree::start({&spec, 1});
  ::kill(tree.reaper_pid(), SIGSTOP);
  ::kill(tree.pids()[0], SIGKILL);
  for (int i = 0; i < 10; ++i) tree.signal(SIGTERM);
  ::kill(tree.reaper_pid(), SIGCONT);
  std::vector<ChildEvent> events;
  ASSERT_TRUE(eventually([&] {
    for (const ChildEvent& event : tree.take_events()) events.push_back(event);
    return tree.over();
  }));
  EXPECT_FALSE(tree.reaper_lost());
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].value, SIGKILL);
}

TEST(Supervisor, TheFirstFailureIsReportedBeforeTheOthersAreStopped) {
  TemporaryFolder folder;
  const std::vector<ChildSpec> specs = {
      shell("trap 'exit 0' TERM; echo > " + folder.file("ready") + "; while :; do sleep 0.01; done"),
      shell("while ! test -e " + folder.file("ready") + "; do sleep 0.01; done; exit 3")};
  ProcessTree tree = ProcessTree::start(specs);
  const pid_t survivor = tree.pids()[0];
  std::vector<int> order;
  bool alive_when_told = false;
  Supervisor supervisor(std::move(tree), {.on_exit = [&](const ChildExit& exit) {
                          if (order.empty()) alive_when_told = !is_dead(survivor);
                          order.push_back(exit.index);
                        }});
  run_to_end(supervisor);
  EXPECT_EQ(order, (std::vector<int>{1, 0}));
  EXPECT_TRUE(alive_when_told);
  EXPECT_EQ(supervisor.first_failure()->cause(), "exited with code 3");
  EXPECT_TRUE(supervisor.exits()[1].stopped);
  EXPECT_FALSE(supervisor.exits()[1].failed());
}

TEST(ProcessTree, ASignalReachesMoreThanAThousandChildren) {
  constexpr std::size_t kChildren = 1'100;
  const ChildSpec sleeper{.body = [] {
    for (;;) ::pause();
    return 0;
  }};
  const std::vector<ChildSpec> specs(kChildren, sleeper);
  ProcessTree tree = ProcessTree::start(specs);
  tree.signal(SIGTERM);
  std::size_t n_ended = 0;
  EXPECT_TRUE(eventually([&] {
    for (const ChildEvent& event : tree.take_events()) n_ended += event.value == SIGTERM;
    return n_ended == kChildren;
  })) << n_ended;
}

TEST(Supervisor, AChildThatIgnoresSigtermIsKilledAfterTheGrace) {
  TemporaryFolder folder;
  const std::vector<ChildSpec> specs = {
      shell("trap '' TERM; echo > " + folder.file("ready") + "; while :; do sleep 1000; done"),
      shell("while ! test -e " + folder.file("ready") + "; do sleep 0.01; done; exit 1")};
  Supervisor supervisor(ProcessTree::start(specs), {.grace = Milliseconds(200)});
  run_to_end(supervisor);
  EXPECT_EQ(supervisor.first_failure()->index, 1);
  EXPECT_EQ(supervisor.exits().at(1).cause(), "killed by SIGKILL (9)");
}

TEST(Supervisor, AStoppedProcessIsEndedToo) {
  ChildSpec spec = shell("kill -STOP $$; exit 0");
  ProcessTree tree = ProcessTree::start({&spec, 1});
  const pid_t child = tree.pids()[0];
  ASSERT_TRUE(eventually([=] {
    const std::string stat = read_file("/proc/" + std::to_string(child) + "/stat");
    const auto end = stat.rfind(')');
    return end != std::string::npos && stat[end + 2] == 'T';
  }));
  Supervisor supervisor(std::move(tree), {});
  supervisor.stop(SIGTERM);
  run_to_end(supervisor);
  EXPECT_EQ(supervisor.exits().at(0).cause(), "killed by SIGTERM (15)");
}

// What a script starts and leaves behind: in the background, and in a session of its own.
std::string leaves_behind(const TemporaryFolder& folder, const std::string& then) {
  return "sh -c 'echo $$ > " + folder.file("background") + "; exec sleep 1000' & " +
         "setsid sh -c 'trap \"\" TERM; echo $$ > " + folder.file("session") +
         "; while :; do sleep 1000; done' & " + "while ! test -s " + folder.file("background") +
         " || ! test -s " + folder.file("session") + "; do sleep 0.01; done; " + then;
}

TEST(Supervisor, WhatAChildLeavesBehindEndsWithTheTree) {
  TemporaryFolder folder;
  const ChildSpec spec = shell(leaves_behind(folder, "exit 0"));
  Supervisor supervisor(ProcessTree::start({&spec, 1}), {.grace = Milliseconds(200)});
  run_to_end(supervisor);
  EXPECT_FALSE(supervisor.first_failure());
  EXPECT_TRUE(is_dead(pid_in(folder.file("background"))));
  EXPECT_TRUE(is_dead(pid_in(folder.file("session"))));
}

TEST(ProcessTree, DestructionLeavesNothingRunning) {
  TemporaryFolder folder;
  const ChildSpec spec = shell(leaves_behind(folder, "trap '' TERM; while :; do sleep 1000; done"));
  pid_t child = 0;
  {
    ProcessTree tree = ProcessTree::start({&spec, 1});
    child = tree.pids()[0];
    ASSERT_GT(pid_in(folder.file("session")), 0);
    ASSERT_GT(pid_in(folder.file("background")), 0);
  }
  EXPECT_TRUE(is_dead(child));
  EXPECT_TRUE(is_dead(pid_in(folder.file("background"))));
  EXPECT_TRUE(is_dead(pid_in(folder.file("session"))));
}

TEST(ProcessTree, NothingOutlivesAnOwnerThatIsKilled) {
  TemporaryFolder folder;
  const std::string script = "echo $$ > " + folder.file("child") + "; " +
                             leaves_behind(folder, "trap '' TERM; while :; do sleep 1000; done");
  const pid_t owner = start_owner(script, /*adopt=*/false);
  const pid_t background = pid_in(folder.file("background"));
  const pid_t session = pid_in(folder.file("session"));
  const pid_t child = pid_in(folder.file("child"));
  const pid_t reaper = parent_of(child);
  ::kill(owner, SIGKILL);
  ::waitpid(owner, nullptr, 0);
  for (const pid_t pid : {child, background, session, reaper}) {
    ASSERT_GT(pid, 1);
    EXPECT_TRUE(dies(pid)) << pid;
  }
}

TEST(ProcessTree, NothingOutlivesAReaperThatIsKilledWhenTheOwnerAdopts) {
  TemporaryFolder folder;
  const std::string script =
      "echo $$ > " + folder.file("child") + "; " + leaves_behind(folder, "while :; do sleep 1000; done");
  const pid_t owner = start_owner(script, /*adopt=*/true);
  const pid_t background = pid_in(folder.file("background"));
  const pid_t session = pid_in(folder.file("session"));
  const pid_t child = pid_in(folder.file("child"));
  const pid_t reaper = parent_of(child);
  ASSERT_GT(reaper, 1);
  ASSERT_NE(reaper, owner);
  ::kill(reaper, SIGKILL);
  int status = -1;
  ASSERT_TRUE(eventually([&] { return ::waitpid(owner, &status, WNOHANG) == owner; }));
  EXPECT_EQ(status, 0) << "the owner went on to its normal end";
  for (const pid_t pid : {child, background, session}) {
    ASSERT_GT(pid, 1);
    EXPECT_TRUE(dies(pid)) << pid;
  }
}

}  // namespace
}  // namespace lockstep::process
