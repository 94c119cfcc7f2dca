// Errors, deadlines, bytes, the environment table and what the kernel tells about processes.
#include "lockstep/base/bytes.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/loss_note.h"
#include "lockstep/base/detail/numbers.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/rank_thread.h"
#include "lockstep/base/detail/slow_wait.h"
#include "lockstep/base/detail/stack_trace.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/thread.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/env_dump.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/path_testing.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace lockstep::base {
namespace {

TEST(Error, RaiseThrowsTheClassOfItsFamily) {
  EXPECT_THROW(raise(ErrorKind::kTimeout, "late", ErrorFamily::kStore), DistStoreError);
  EXPECT_THROW(raise(ErrorKind::kSystem, "no route", ErrorFamily::kNetwork), DistNetworkError);
  EXPECT_THROW(raise(ErrorKind::kPeerLost, "gone", ErrorFamily::kBackend), DistBackendError);
}

TEST(Error, CurrentFailureKeepsKindPeerAndText) {
  try {
    raise(Failure{
        .kind = ErrorKind::kPeerLost, .message = "rank 3 is gone", .peer = LostPeer{3, 42, "killed"}});
  } catch (...) {
    const Failure failure = current_failure();
    EXPECT_EQ(failure.kind, ErrorKind::kPeerLost);
    ASSERT_TRUE(failure.peer);
    EXPECT_EQ(failure.peer->rank, 3);
    EXPECT_EQ(failure.message, "rank 3 is gone");
  }
}

TEST(Error, OutOfMemoryAndDescriptorsAreResourceErrors) {
  EXPECT_EQ(system_failure(ENOSPC, "fallocate").kind, ErrorKind::kResource);
  EXPECT_EQ(system_failure(EMFILE, "open").kind, ErrorKind::kResource);
  EXPECT_EQ(system_failure(ECONNREFUSED, "connect").kind, ErrorKind::kSystem);
}

TEST(Deadline, ZeroMeansNeverAndPastMeansExpired) {
  EXPECT_TRUE(Deadline::after(Milliseconds(0)).is_never());
  EXPECT_EQ(Deadline::never().poll_timeout_ms(), -1);
  EXPECT_TRUE(Deadline::from_monotonic_ns(1).expired());
  EXPECT_EQ(Deadline::from_monotonic_ns(1).poll_timeout_ms(), 0);
  EXPECT_FALSE(Deadline::after(std::chrono::hours(1)).expired());
  EXPECT_TRUE(Deadline::after(std::chrono::nanoseconds::max()).is_never());
  EXPECT_TRUE(Deadline::after(Milliseconds::max()).is_never());
  EXPECT_TRUE(Deadline::after(Milliseconds(18'446'744'073'710)).is_never())
      << "2^64 ns, and not what it wraps to";
  EXPECT_TRUE(Deadline::after(std::chrono::hours::max()).is_never());
}

TEST(Timeout, OfAPartOfACallIsWhatIsLeftAndNeverZero) {
  EXPECT_EQ(time_left(Deadline::never()), kNoTimeout);
  EXPECT_EQ(time_left(Deadline::from_monotonic_ns(1)), Milliseconds(1));
  EXPECT_GT(time_left(Deadline::after(std::chrono::hours(1))), std::chrono::minutes(1));
  EXPECT_EQ(twice(Milliseconds(3)), Milliseconds(6));
  EXPECT_EQ(twice(kNoTimeout), kNoTimeout);
}

TEST(Bytes, ReaderRefusesALengthBeyondWhatIsLeft) {
  ByteWriter out;
  out.put<std::uint64_t>(1ull << 32).raw(to_bytes("abc"));
  ByteReader in(out.view());
  EXPECT_FALSE(in.sized());
  EXPECT_EQ(in.position(), 0u) << "a refused read leaves the reader where it was";
}

TEST(Bytes, WriterAndReaderAgree) {
  ByteWriter out;
  out.sized("key").put<std::int64_t>(-5).sized("");
  ByteReader in(out.view());
  EXPECT_EQ(to_text(*in.sized()), "key");
  EXPECT_EQ(in.get<std::int64_t>(), -5);
  EXPECT_EQ(in.sized()->size(), 0u);
  EXPECT_EQ(in.left(), 0u);
  EXPECT_FALSE(in.get<std::uint8_t>());
}

TEST(Environment, AVariableThatIsNotAnIntegerIsNamedInTheError) {
  ::setenv("WORLD_SIZE", "four", 1);
  try {
    environment_int(EnvVar::kWorldSize);
    FAIL() << "accepted \"four\"";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(error.what()).find("WORLD_SIZE"), std::string::npos);
  }
  ::unsetenv("WORLD_SIZE");
  EXPECT_EQ(environment_int(EnvVar::kWorldSize), std::nullopt);
}

TEST(Environment, DocumentListsExactlyTheTable) {
  std::ifstream file(path_testing::from_program(LOCKSTEP_ENV_PAGE));
  std::string line;
  std::string listed;
  while (std::getline(file, line)) {
    if (line.rfind("| `", 0) == 0) listed += line + "\n";
  }
  std::string expected;
  for (const EnvVarInfo& info : environment_table()) {
    expected += cat("| `", info.name, "` | ", info.default_text, " | ", info.meaning, " |\n");
  }
  EXPECT_EQ(listed, expected) << "docs/env.md and the table in environment.cpp differ";
}

TEST(LossNote, ALostPeerIsNotedForTheStarterAndForOtherProcesses) {
  const LossNotes notes(3);
  EXPECT_EQ(notes.read(1), std::nullopt);
  EXPECT_EQ(notes.read(3), std::nullopt) << "there is no such slot";
  ::setenv("LOCKSTEP_NOTES", notes.variable(1).c_str(), 1);
  EXPECT_THROW(raise(ErrorKind::kTimeout, "late"), Error);
  EXPECT_EQ(notes.read(1), std::nullopt) << "only a lost peer makes a failure another's";
  EXPECT_THROW(raise(ErrorKind::kPeerLost, "rank 2 is gone"), Error);
  EXPECT_EQ(notes.read(1), "rank 2 is gone");
  EXPECT_EQ(notes.read(0), std::nullopt);
  EXPECT_EQ(loss_noted_by(::getpid()), "rank 2 is gone");
  EXPECT_EQ(loss_noted_by(1), "");
  EXPECT_THROW(raise(ErrorKind::kPeerLost, std::string(4096, 'x')), Error);
  EXPECT_EQ(notes.read(1), std::string(500, 'x'));
  ::unsetenv("LOCKSTEP_NOTES");
}

// The thread's mark is set by this program and read in the library: one variable, also where the library is
// shared.
TEST(LossNote, ARankThreadLeavesNone) {
  const LossNotes notes(1);
  ::setenv("LOCKSTEP_NOTES", notes.variable(0).c_str(), 1);
  {
    RankThread rank;
    const RankThreadScope scope(&rank);
    EXPECT_THROW(raise(ErrorKind::kPeerLost, "rank 2 is gone"), Error);
  }
  EXPECT_EQ(notes.read(0), std::nullopt);
  EXPECT_THROW(raise(ErrorKind::kPeerLost, "rank 2 is gone"), Error);
  EXPECT_EQ(notes.read(0), "rank 2 is gone");
  ::unsetenv("LOCKSTEP_NOTES");
}

// A program may close what it inherited and open files of its own under the same numbers.
TEST(LossNote, AFileOfTheProgramUnderTheSameNumberIsLeftAlone) {
  std::string variable;
  int number = -1;
  {
    const LossNotes notes(1);
    variable = notes.variable(0);
    number = notes.fd();
  }
  const Fd file(::memfd_create("mine", MFD_CLOEXEC));
  ASSERT_EQ(file.get(), number);
  ::setenv("LOCKSTEP_NOTES", variable.c_str(), 1);
  EXPECT_THROW(raise(ErrorKind::kPeerLost, "rank 2 is gone"), Error);
  ::unsetenv("LOCKSTEP_NOTES");
  struct stat found {};
  ASSERT_EQ(::fstat(file.get(), &found), 0);
  EXPECT_EQ(found.st_size, 0);
}

std::atomic<int> g_lines{0};
std::string g_line;  // written by the thread that waits

TEST(SlowWait, SaysOnceWhatItWaitsForAndUntilWhen) {
  set_slow_wait_time(Milliseconds(1));
  set_log_sink([](LogLevel, std::string_view text) { g_line = text, ++g_lines; });
  const Deadline deadline = Deadline::after(std::chrono::hours(1));
  SlowWait slow(deadline);
  EXPECT_LT(slow.next(), deadline);
  while (g_lines == 0) slow.say_if_due([] { return "rank 0 waits for rank 1"; });
  EXPECT_EQ(slow.next(), deadline) << "there is nothing more to say";
  slow.say_if_due([] { return "again"; });
  set_log_sink(nullptr);
  set_slow_wait_time(Milliseconds(0));
  EXPECT_EQ(SlowWait(deadline).next(), deadline) << "zero: never";
  set_slow_wait_time(Milliseconds(10'000));
  EXPECT_EQ(g_lines, 1);
  EXPECT_EQ(g_line.rfind("slow: rank 0 waits for rank 1; waiting continues until ", 0), 0u) << g_line;
}

TEST(Error, IsTheBaseOfEveryFamily) {
  for (const auto family :
       {ErrorFamily::kGeneral, ErrorFamily::kBackend, ErrorFamily::kNetwork, ErrorFamily::kStore}) {
    EXPECT_THROW(raise(ErrorKind::kTimeout, "late", family), Error);
  }
}

// One line of each level; what comes out is what the level lets through.
void log_every_level() {
  log(LogLevel::kError, "said error");
  log(LogLevel::kWarn, "said warn");
  log(LogLevel::kInfo, "said info");
  log(LogLevel::kDebug, "said debug");
  log(LogLevel::kTrace, "said trace");
}

struct TorchLevels {
  const char *torch, *debug;
  int n_lines;  // of the five above
};
constexpr TorchLevels kMatrix[] = {
    {"ERROR", nullptr, 1}, {"WARNING", nullptr, 2}, {"INFO", nullptr, 3},  {"INFO", "OFF", 3},
    {"INFO", "INFO", 4},   {"INFO", "DETAIL", 5},   {"INFO", "info", 4},   {"INFO", "Detail", 5},
    {"0", "DETAIL", 5},    {"1", "DETAIL", 2},      {"2", "DETAIL", 1},    {"WARNING", "DETAIL", 2},
    {"ERROR", "INFO", 1},  {nullptr, "DETAIL", 2},  {nullptr, nullptr, 2},
};
constexpr const char* kLogVars[] = {"LOCKSTEP_LOG", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG"};

int n_heard = 0;

TEST(Log, FollowsTheLevelsOfTorch) {
  const auto set = [](const char* name, const char* value) {
    value == nullptr ? ::unsetenv(name) : ::setenv(name, value, 1);
  };
  set_log_sink([](LogLevel, std::string_view) { ++n_heard; });
  for (const auto& row : kMatrix) {
    set("TORCH_CPP_LOG_LEVEL", row.torch);
    set("TORCH_DISTRIBUTED_DEBUG", row.debug);
    set_log_level_from_env();
    n_heard = 0;
    log_every_level();
    EXPECT_EQ(n_heard, row.n_lines) << (row.torch ? row.torch : "-") << " " << (row.debug ? row.debug : "-");
  }
  // Our own variable wins.
  ::setenv("LOCKSTEP_LOG", "trace", 1);
  set_log_level_from_env();
  n_heard = 0;
  log_every_level();
  EXPECT_EQ(n_heard, 5);
  for (const char* name : kLogVars) ::unsetenv(name);
  set_log_level_from_env();
  set_log_sink(nullptr);
}

// As a program that never asks for a level: this test again, in a process of its own with the variables set.
TEST(Log, FollowsTheLevelsOfTorchFromTheFirstLineOn) {
  if (std::getenv("LOCKSTEP_TEST_LOG_CHILD") != nullptr) return log_every_level();
  for (const auto& row : {kMatrix[0], kMatrix[4], kMatrix[5]}) {
    const std::string command =
        std::string("env -u LOCKSTEP_LOG LOCKSTEP_TEST_LOG_CHILD=1 TORCH_CPP_LOG_LEVEL=") + row.torch +
        " TORCH_DISTRIBUTED_DEBUG=" + (row.debug ? row.debug : "OFF") + " '" +
        std::filesystem::read_symlink("/proc/self/exe").string() +
        "' --gtest_filter=Log.FollowsTheLevelsOfTorchFromTheFirstLineOn 2>&1";
    FILE* pipe = ::popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    int n_lines = 0;
    for (char line[512]; std::fgets(line, sizeof line, pipe) != nullptr;)
      n_lines += std::strstr(line, "] said ") != nullptr ? 1 : 0;
    EXPECT_EQ(::pclose(pipe), 0);
    EXPECT_EQ(n_lines, row.n_lines) << row.torch;
  }
}

TEST(Environment, IsDumpedLineByLineForBugReports) {
  ::setenv("RANK", "3", 1);
  ::setenv("NCCL_DEBUG", "INFO", 1);
  ::unsetenv("GLOO_SOCKET_IFNAME");
  const std::string dump = dump_environment();
  ::unsetenv("RANK");
  ::unsetenv("NCCL_DEBUG");
  EXPECT_TRUE(dump.starts_with("env:RANK=3\nenv:LOCAL_RANK=")) << dump;
  for (const char* line :
       {"env:NCCL_DEBUG=INFO\n", "env:GLOO_SOCKET_IFNAME=N/A\n", "env:NCCL_TOPO_DUMP_FILE=N/A\n"})
    EXPECT_NE(dump.find(line), std::string::npos) << line;
  // Lockstep's own variables are all there, and each name once.
  std::set<std::string> names;
  std::istringstream lines(dump);
  for (std::string line; std::getline(lines, line);)
    EXPECT_TRUE(names.insert(line.substr(0, line.find('='))).second) << line;
  for (const EnvVarInfo& info : environment_table())
    EXPECT_TRUE(names.contains(std::string("env:") + info.name)) << info.name;
}

TEST(StackTrace, IsThereOnlyWhenAskedForAndNamesItsFile) {
  EXPECT_EQ(stack_trace_if_asked(), "");
  ::setenv("TORCH_SHOW_CPP_STACKTRACES", "1", 1);
  const auto text = stack_trace_if_asked();
  ::unsetenv("TORCH_SHOW_CPP_STACKTRACES");
  EXPECT_NE(text.find("#0 "), std::string::npos) << text;
  EXPECT_NE(text.find("base_test+0x"), std::string::npos) << text;
}

[[gnu::noinline]] std::string trace_of_a_function_that_only_this_file_knows() {
  std::string text = stack_trace();
  text += '\n';  // no tail call
  return text;
}

TEST(StackTrace, NamesFunctionsThatTheDynamicLinkerDoesNotKnow) {
  const auto text = trace_of_a_function_that_only_this_file_knows();
  EXPECT_NE(text.find("trace_of_a_function_that_only_this_file_knows"), std::string::npos) << text;
  EXPECT_EQ(text.find("_ZN"), std::string::npos) << "as one writes them: " << text;
}

TEST(Process, TheKernelOrTheParentReportsHowAChildEnded) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(7);
  const Fd pidfd = open_pidfd(child);
  ASSERT_TRUE(pidfd);
  pollfd wait{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(::poll(&wait, 1, 10'000), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(describe_wait_status(status), "exited with code 7");
  EXPECT_EQ(exit_cause(pidfd.get()).value_or("exited with code 7"), "exited with code 7");
  EXPECT_EQ(describe_wait_status(SIGKILL), "killed by SIGKILL (9)");
}

TEST(Numbers, AreReadOnlyFromTextThatHasNothingElse) {
  int a = 0;
  unsigned long b = 0;
  EXPECT_TRUE(read_numbers("-1:18446744073709551615", ':', a, b));
  EXPECT_EQ(a, -1);
  EXPECT_EQ(b, 18446744073709551615UL);
  for (const char* text : {"", "1", "1:", "1:2:", "1:2x", ":1:2", "1,2", "1: 2", "4294967296:2", "1:-2"})
    EXPECT_FALSE(read_numbers(text, ':', a, b)) << text;
}

TEST(Process, HostIdentityIsStableAndRandomIsNot) {
  EXPECT_EQ(host_identity(), host_identity());
  EXPECT_EQ(random_hex(16).size(), 32u);
  EXPECT_NE(random_hex(16), random_hex(16));
}

}  // namespace
}  // namespace lockstep::base
