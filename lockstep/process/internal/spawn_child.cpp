#include "lockstep/process/internal/spawn_child.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>

#include "lockstep/base/detail/environment.h"
#include "lockstep/base/detail/numbers.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/process/report.h"

namespace lockstep::internal {
namespace {

// Facts about the process, not state of the library: how often spawn was called, and whether it made this
// process.
std::atomic<int> g_calls{0};
std::atomic<bool> g_inside{false};

#ifdef __SANITIZE_THREAD__
constexpr int kSanitizerThreads = 1;  // of the sanitizer's own; it takes care of itself over a fork
#else
constexpr int kSanitizerThreads = 0;
#endif

int count_tasks() {
  int n = 0;
  std::error_code error;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) ++n;
  return std::max(1, n - kSanitizerThreads);
}

}  // namespace

std::string SpawnTarget::text() const {
  return base::cat(call, ":", index, ":", report);
}

std::optional<SpawnTarget> SpawnTarget::from_environment() {
  const auto text = base::environment(base::EnvVar::kLockstepSpawn);
  if (!text) return std::nullopt;
  SpawnTarget target;
  if (!base::read_numbers(*text, ':', target.call, target.index, target.report)) {
    base::raise(ErrorKind::kUsage, base::cat(name_of(base::EnvVar::kLockstepSpawn),
                                             " is set by spawn alone, but is \"", *text, "\""));
  }
  return target;
}

int count_spawn_call() {
  return ++g_calls;
}

bool inside_spawned() {
  return g_inside.load();
}

int count_threads() {
  int n = count_tasks();
  for (int i = 0; n > 1 && i < 20; ++i) {
    ::poll(nullptr, 0, 2);
    n = count_tasks();
  }
  return n;
}

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  if (arguments.empty())
    base::raise(ErrorKind::kSystem, "cannot read this program's arguments from /proc/self/cmdline");
  return arguments;
}

int run_spawned(const std::function<void(int)>& fn, int index, int report) noexcept {
  g_inside = true;
  base::set_log_rank(index);
  int code = 0;
  try {
    fn(index);
  } catch (...) {
    code = 1;
    process::write_report(report, base::current_failure().message);
  }
  // The process ends without destructors of static objects: a forked copy must not run those of the original.
  std::cout.flush();
  std::fflush(nullptr);
  return code;
}

void become_spawned(const std::function<void(int)>& fn, const SpawnTarget& target) {
  ::unsetenv(name_of(base::EnvVar::kLockstepSpawn));  // a program that this one starts is not spawned
  ::fcntl(target.report, F_SETFD, FD_CLOEXEC);
  ::_exit(run_spawned(fn, target.index, target.report));
}

}  // namespace lockstep::internal
