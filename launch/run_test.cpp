// The launcher as users run it: environment, store, output, failures, signals. Real processes.
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <sstream>

#include "launch/launcher_testing.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/net/secret.h"

namespace lockstep::launch {
namespace {

using process_testing::TemporaryFolder;
using Lines = std::multiset<std::string>;

std::vector<std::string> shell(std::vector<std::string> options, const std::string& script) {
  options.insert(options.begin(), "run");
  options.insert(options.end(), {"--", "sh", "-c", script});
  return options;
}

Lines lines_of(const std::string& text) {
  Lines lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.insert(line);
  return lines;
}

// Lines as each rank printed them: whether equal ones were collapsed depends on when they came. "[0,2-3] x"
// counts as "[0] x", "[2] x" and "[3] x".
Lines lines_by_rank(const std::string& text) {
  Lines lines;
  for (const std::string& line : lines_of(text)) {
    const auto end = line.find(']');
    std::istringstream ranges(line.substr(1, end - 1));
    for (std::string range; std::getline(ranges, range, ',');) {
      const auto dash = range.find('-');
      const int last = std::stoi(dash == std::string::npos ? range : range.substr(dash + 1));
      for (int rank = std::stoi(range); rank <= last; ++rank)
        lines.insert(base::cat("[", rank, line.substr(end)));
    }
  }
  return lines;
}

TEST(Run, WorkersGetTorchrunsEnvironment) {
  Launcher launcher(
      shell({"-n", "2", "--role", "trainer"},
            "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE "
            "$ROLE_RANK $ROLE_WORLD_SIZE $ROLE_NAME $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT "
            "$TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_USE_AGENT_STORE $TORCH_NCCL_ASYNC_ERROR_HANDLING; "
            "test -n \"$TORCHELASTIC_RUN_ID\" && test $MASTER_PORT -gt 0 && "
            "test -w \"$TORCHELASTIC_ERROR_FILE\" && echo rest"));
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_EQ(lines_by_rank(launcher.out()), (Lines{
                                               "[0] 0 2 0 2 0 1 0 2 trainer 127.0.0.1 0 0 True 1",
                                               "[1] 1 2 1 2 0 1 1 2 trainer 127.0.0.1 0 0 True 1",
                                               "[0] rest",
                                               "[1] rest",
                                           }));
}

TEST(Run, LauncherVariableIsTheLaunchersPid) {
  Launcher launcher(shell({}, "echo $LOCKSTEP_LAUNCHER"));
  const pid_t pid = launcher.pid();
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_EQ(launcher.out(), base::cat(pid, "\n"));
}

TEST(Run, WorkersMeetInTheLaunchersStore) {
  Launcher launcher({"run", "-n", "3", "--", kTestWorker, "meet"});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  const auto lines = lines_of(launcher.out());
  EXPECT_FALSE(lines.empty());
  for (const std::string& line : lines) EXPECT_TRUE(line.ends_with("] met 3")) << line;
}

TEST(Run, TheStoreRejectsClientsWithoutTheSecret) {
  Launcher launcher({"run", "--", "env", "-u", "LOCKSTEP_SECRET_FD", kTestWorker, "meet"});
  EXPECT_EQ(launcher.wait(), 1) << launcher.err();
  EXPECT_FALSE(contains(launcher.out(), "met"));
}

TEST(Run, TheSecretIsInNoEnvironmentAndInNoArguments) {
  Launcher launcher(shell({},
                          "secret=$(cat /proc/self/fd/$LOCKSTEP_SECRET_FD); echo ${#secret}; "
                          "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep -c -F -f "
                          "/proc/self/fd/$LOCKSTEP_SECRET_FD"));
  EXPECT_EQ(launcher.wait(), 1) << "grep found none";
  EXPECT_EQ(launcher.out(), "64\n0\n");
}

// The name has two addresses, and anybody may listen at the one that the store does not have.
TEST(Run, WorkersDialTheAddressOfLocalhostThatIsBound) {
  Launcher launcher(shell({"-n", "1", "--master-addr", "localhost"}, "echo $MASTER_ADDR"));
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_TRUE(launcher.out() == "127.0.0.1\n" || launcher.out() == "::1\n") << launcher.out();
}

TEST(Run, SurvivorsCanReadHowARankEnded) {
  Launcher launcher({"run", "-n", "3", "--", kTestWorker, "lose", "1"});
  EXPECT_EQ(launcher.wait(), 128 + SIGKILL) << launcher.err();
  EXPECT_TRUE(contains(launcher.out(), "rank 1 killed by SIGKILL (9)")) << launcher.out();
}

TEST(Run, TheFirstFailureIsReportedAsRootCauseAndItsExitCodeIsTheLaunchers) {
  Launcher launcher(
      shell({"-n", "3", "--grace", "5"},
            "if test $RANK = 2; then echo \"something broke\" >&2; exit 7; fi; exec sleep 1000"));
  EXPECT_EQ(launcher.wait(), 7);
  const std::string err = launcher.err();
  EXPECT_TRUE(contains(err, "root cause")) << err;
  EXPECT_TRUE(contains(err, "rank    2 (local rank 2)")) << err;
  EXPECT_TRUE(contains(err, "cause   exited with code 7")) << err;
  EXPECT_TRUE(contains(err, "    | something broke")) << err;
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  EXPECT_TRUE(contains(err, base::cat("host    ", host))) << err;
  EXPECT_FALSE(contains(err, "also failed")) << "workers that the launcher stopped have not failed: " << err;
}

TEST(Run, ARankThatFailedOnItsOwnIsTheRootCauseAndNotOneThatLostIt) {
  Launcher launcher({"run", "-n", "3", "--", kTestWorker, "blame", "1"});
  EXPECT_EQ(launcher.wait(), 3) << launcher.err();
  const std::string err = launcher.err();
  EXPECT_TRUE(contains(err, "rank    1 (local rank 1)")) << err;
  EXPECT_TRUE(contains(err, "cause   exited with code 3")) << err;
  EXPECT_TRUE(contains(err, "rank 0 (local rank 0, pid ")) << err;
  EXPECT_TRUE(contains(err, "killed by SIGABRT (6), as it lost a peer")) << err;
}

TEST(Run, ASignalIsNamedAndBecomes128PlusItsNumber) {
  Launcher launcher(shell({"-n", "2"}, "test $RANK = 0 && kill -SEGV $$; exec sleep 1000"));
  EXPECT_EQ(launcher.wait(), 128 + SIGSEGV);
  EXPECT_TRUE(contains(launcher.err(), "cause   killed by SIGSEGV (11)")) << launcher.err();
}

TEST(Run, WhatAWorkerWroteToItsErrorFileIsInTheReport) {
  Launcher launcher(shell({"-n", "2"},
                          "test $RANK = 0 || exec sleep 1000; echo '{\"message\": \"bad data\"}' > "
                          "$TORCHELASTIC_ERROR_FILE; exit 1"));
  EXPECT_EQ(launcher.wait(), 1);
  EXPECT_TRUE(contains(launcher.err(), "    | {\"message\": \"bad data\"}")) << launcher.err();
}

TEST(Run, AnUncaughtExceptionIsReportedOnceAndAsText) {
  Launcher launcher(shell(
      {"-n", "2"},
      "test $RANK = 0 || exec sleep 1000; echo 'opening' >&2; echo '[rank0]: Error: no \"data.bin\"' >&2; "
      "echo '{\"message\": {\"message\": \"Error: no \\\"data.bin\\\"\", \"extraInfo\": {\"timestamp\": "
      "\"17\"}}}' > $TORCHELASTIC_ERROR_FILE; exit 1"));
  EXPECT_EQ(launcher.wait(), 1);
  const std::string err = launcher.err();
  const std::string report = err.substr(err.find("root cause"));
  EXPECT_TRUE(contains(report, "\n    | Error: no \"data.bin\"\n")) << err;
  EXPECT_FALSE(contains(report, "extraInfo")) << err;
  EXPECT_FALSE(contains(report, "[rank0]: ")) << "told twice: " << err;
  EXPECT_TRUE(contains(report, "\n    | opening")) << err;
}

TEST(Run, AProgramThatCannotBeExecutedIsNamed) {
  Launcher launcher({"run", "-n", "2", "--", "/no/such/program"});
  EXPECT_EQ(launcher.wait(), 127);
  EXPECT_TRUE(contains(launcher.err(), "cannot be executed: No such file or directory")) << launcher.err();
  EXPECT_TRUE(contains(launcher.err(), "/no/such/program")) << launcher.err();
}

TEST(Run, EqualLinesArePrintedOnceAndOthersByRank) {
  bool collapsed = false;
  // Four processes that print within the window, on a machine that may be busy: it happens, but not every
  // time.
  for (int attempt = 0; attempt < 50 && !collapsed; ++attempt) {
    Launcher launcher(shell({"-n", "4"}, "echo same; echo $RANK; sleep 0.05"));
    EXPECT_EQ(launcher.wait(), 0);
    EXPECT_EQ(lines_by_rank(launcher.out()),
              (Lines{"[0] same", "[1] same", "[2] same", "[3] same", "[0] 0", "[1] 1", "[2] 2", "[3] 3"}));
    collapsed = contains(launcher.out(), "[0-3] same\n");
  }
  EXPECT_TRUE(collapsed);
}

TEST(Run, OneWorkerHasNoPrefix) {
  Launcher launcher(shell({}, "echo out; printf unfinished >&2"));
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_EQ(launcher.out(), "out\n");
  EXPECT_EQ(launcher.err(), "unfinished");
}

TEST(Run, NoPrefixPrintsEveryLineAsItIs) {
  Launcher launcher(shell({"-n", "2", "--no-prefix"}, "echo same"));
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_EQ(launcher.out(), "same\nsame\n");
}

TEST(Run, ThePrefixFollowsTorchrunsTemplate) {
  Launcher launcher(
      shell({"-n", "2", "--role", "w"}, "echo $RANK"),
      {.environment = {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name} ${rank}/${local_rank}]:"}}});
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_EQ(lines_of(launcher.out()), (Lines{"[w 0/0]:0", "[w 1/1]:1"}));
}

TEST(Run, NoLineIsLostInAFlood) {
  Launcher launcher(
      shell({"-n", "3"}, "i=0; while test $i -lt 2000; do i=$((i+1)); echo line $i of $RANK; done"));
  EXPECT_EQ(launcher.wait(), 0);
  const auto lines = lines_of(launcher.out());
  EXPECT_EQ(lines.size(), 6000u);
  EXPECT_EQ(lines.count("[1] line 1999 of 1"), 1u);
}

TEST(Run, OnlyWorkerZeroHasStandardInput) {
  Launcher launcher(shell({"-n", "2"}, "echo \"got $(cat)\""), {.input = "words\n"});
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_EQ(lines_of(launcher.out()), (Lines{"[0] got words", "[1] got "}));
}

TEST(Run, ThreadsAreOneEachUnlessTheUserSaysOtherwise) {
  const auto threads = [](const std::string& n, const std::string& preset) {
    Launcher launcher(shell({"-n", n}, "echo threads=$OMP_NUM_THREADS"),
                      {.environment = {{"OMP_NUM_THREADS", preset}}});
    EXPECT_EQ(launcher.wait(), 0);
    return std::pair(n == "1" ? lines_of(launcher.out()) : lines_by_rank(launcher.out()),
                     contains(launcher.err(), "OMP_NUM_THREADS"));
  };
  EXPECT_EQ(threads("2", ""), std::pair(Lines{"[0] threads=1", "[1] threads=1"}, true));
  EXPECT_EQ(threads("2", "3"), std::pair(Lines{"[0] threads=3", "[1] threads=3"}, false));
  EXPECT_EQ(threads("1", ""), std::pair(Lines{"threads="}, false));
}

TEST(Run, FlagsMayBePresetAndTheCommandLineWins) {
  const process::EnvironmentList preset = {{"PET_NPROC_PER_NODE", "3"}, {"PET_ROLE", "preset"}};
  Launcher from_environment(shell({}, "echo $WORLD_SIZE $ROLE_NAME"), {.environment = preset});
  EXPECT_EQ(from_environment.wait(), 0);
  EXPECT_EQ(lines_by_rank(from_environment.out()), (Lines{"[0] 3 preset", "[1] 3 preset", "[2] 3 preset"}));
  Launcher from_flags(shell({"--nproc_per_node", "2", "--role=given"}, "echo $WORLD_SIZE $ROLE_NAME"),
                      {.environment = preset});
  EXPECT_EQ(from_flags.wait(), 0);
  EXPECT_EQ(lines_by_rank(from_flags.out()), (Lines{"[0] 2 given", "[1] 2 given"}));
}

TEST(Run, AProgramNeedsNoDashesBeforeIt) {
  Launcher launcher({"run", "-n", "1", "echo", "-n", "x", "--", "--help"});
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_EQ(launcher.out(), "x -- --help");
}

TEST(Run, WrongUsageExitsWithCodeTwo) {
  const auto refused = [](std::vector<std::string> arguments, const std::string& text) {
    Launcher launcher(arguments);
    EXPECT_EQ(launcher.wait(), 2) << text;
    EXPECT_TRUE(contains(launcher.err(), text)) << launcher.err();
  };
  refused({"run", "-n", "many", "true"}, "\"many\"");
  refused({"run", "-n", "0", "true"}, "\"0\"");
  refused({"run", "--nnodes", "3:2", "true"}, "\"3:2\"");
  refused({"run", "--nnodes", "2", "--node-rank", "2", "true"}, "--node-rank");
  refused({"run", "--no-such-option", "true"}, "--no-such-option");
  refused({"run", "-n", "2"}, "no program");
  refused({"rum", "-n", "2", "--", "true"}, "there is no command \"rum\"");
  refused({"-n", "2", "--", "true"}, "lockstep run -n 4 -- program");
  refused({}, "lockstep --help");
  refused({"run", "--nnodes", "2", "--master-addr", "127.0.0.1", "true"}, "LOCKSTEP_SECRET_FILE");
}

TEST(Run, ManyWorkersNeedNoHigherLimitOfOpenFilesAndKeepTheirs) {
  Launcher launcher(shell({"-n", "16", "--no-prefix"}, "ulimit -S -n"), {.open_files = 48});
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  EXPECT_EQ(lines_of(launcher.out()).count("48"), 16u) << launcher.out();
}

TEST(Run, AutoIsOnePerCore) {
  Launcher launcher(shell({"-n", "auto", "--no-prefix"}, "echo $WORLD_SIZE"));
  EXPECT_EQ(launcher.wait(), 0);
  const auto lines = lines_of(launcher.out());
  EXPECT_EQ(lines.count(base::cat(base::available_cores())),
            static_cast<std::size_t>(base::available_cores()))
      << launcher.out();
}

// Two launchers on this machine as if on two hosts.
struct TwoHosts {
  TwoHosts() { JobSecret::mint().write_file(folder.file("secret")); }
  std::unique_ptr<Launcher> launch(const std::string& node_rank, std::vector<std::string> command,
                                   const std::string& n = "2") const {
    std::vector<std::string> arguments = {"run",           "-n", n,   "--nnodes=2", "--node-rank", node_rank,
                                          "--master-port", port, "--"};
    arguments.insert(arguments.end(), command.begin(), command.end());
    return std::make_unique<Launcher>(
        arguments, Launcher::Options{.environment = {{"LOCKSTEP_SECRET_FILE", folder.file("secret")}}});
  }
  TemporaryFolder folder;
  // Below the range from which the kernel gives ports away.
  std::string port = std::to_string(20000 + ::getpid() % 10000);
};

TEST(Run, TwoLaunchersMakeOneJob) {
  TwoHosts hosts;
  const auto second = hosts.launch("1", {kTestWorker, "meet"});
  const auto first = hosts.launch("0", {kTestWorker, "meet"});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  EXPECT_EQ(lines_by_rank(first->out()), (Lines{"[0] met 4", "[1] met 4"}));
  EXPECT_EQ(lines_by_rank(second->out()), (Lines{"[2] met 4", "[3] met 4"}));
}

TEST(Run, AFailureOnOneHostStopsTheWorkersOfTheOther) {
  TwoHosts hosts;
  const auto first = hosts.launch("0", {"sleep", "1000"});
  const auto second = hosts.launch("1", {"sh", "-c", "test $RANK = 2 && exit 5; exec sleep 1000"});
  EXPECT_EQ(second->wait(), 5) << second->err();
  EXPECT_EQ(first->wait(), 128 + SIGTERM) << first->err();
  EXPECT_TRUE(contains(first->err(), "exited with code 5; stopping the workers of this host"))
      << first->err();
}

TEST(Run, HostsThatRunDifferentNumbersOfWorkersFailWithTheReason) {
  TwoHosts hosts;
  const auto first = hosts.launch("0", {"sleep", "1000"}, "1");
  const auto second = hosts.launch("1", {"sleep", "1000"}, "2");
  EXPECT_NE(second->wait(), 0);
  EXPECT_NE(first->wait(), 0);
  for (const auto& launcher : {&*first, &*second})
    EXPECT_TRUE(contains(launcher->err(), "every host must run the same number")) << launcher->err();
}

TEST(Run, TwoHostsOfTheSameNumberFailWithTheReason) {
  TwoHosts hosts;
  const auto zero = hosts.launch("0", {"sleep", "1000"});
  const auto one = hosts.launch("1", {"sleep", "1000"});
  const auto twin = hosts.launch("1", {"sleep", "1000"});
  for (const auto& launcher : {&*zero, &*one, &*twin}) {
    EXPECT_NE(launcher->wait(), 0);
    EXPECT_TRUE(contains(launcher->err(), "two launchers have --node-rank 1")) << launcher->err();
  }
}

TEST(Command, VersionAndEnvironment) {
  Launcher version({"--version"});
  EXPECT_EQ(version.wait(), 0);
  EXPECT_TRUE(version.out().starts_with("lockstep ")) << version.out();
  Launcher env(
      {"env"},
      {.environment = {
           {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "29500"}}});
  EXPECT_EQ(env.wait(), 0);
  EXPECT_TRUE(contains(env.out(), "torchrun")) << env.out();
  EXPECT_TRUE(contains(env.out(), "rank         1 of 4")) << env.out();
  EXPECT_TRUE(contains(env.out(), "WORLD_SIZE=4")) << env.out();
}

TEST(Command, EnvironmentInAWorkerDoesNotShowTheSecret) {
  Launcher launcher(
      shell({}, base::cat("secret=$(cat /proc/self/fd/$LOCKSTEP_SECRET_FD); ", kLauncher,
                          " env > /dev/fd/1 | tee /dev/null; ", kLauncher, " env | grep -c \"$secret\"")));
  EXPECT_EQ(launcher.wait(), 1) << "grep found none";
  EXPECT_TRUE(contains(launcher.out(), "(held by the launcher)")) << launcher.out();
  EXPECT_TRUE(contains(launcher.out(), "cluster      lockstep run")) << launcher.out();
}

}  // namespace
}  // namespace lockstep::launch
