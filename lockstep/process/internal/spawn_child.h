// The parts of spawn that concern a single process: counting threads and calls, re-executing this program,
// and what runs in the new process.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

// The call of spawn and the index that a re-executed process is for: LOCKSTEP_SPAWN.
struct SpawnTarget {
  int call = 0;  // counted from 1
  int index = 0;
  int report = -1;  // descriptor for the text of an exception

  std::string text() const;  // "call:index:report"
  // Nothing when the variable is unset. Raises kUsage when it is malformed.
  static std::optional<SpawnTarget> from_environment();
};

// The number of this call of spawn in this process, from 1.
int count_spawn_call();
// True in a process started by spawn.
bool inside_spawned();
// Number of threads of this process. Waits briefly for recently joined threads to leave the kernel's list.
int count_threads();
// argv of this process, from the kernel.
std::vector<std::string> own_arguments();

// Runs fn(index) and writes its exception's text to `report`; returns the exit code.
int run_spawned(const std::function<void(int)>& fn, int index, int report) noexcept;
// The same in a re-executed process; exits it.
[[noreturn]] void become_spawned(const std::function<void(int)>& fn, const SpawnTarget& target);

}  // namespace lockstep::internal
