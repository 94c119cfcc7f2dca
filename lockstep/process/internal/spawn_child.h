// The parts of spawn that are about a single process: counting threads and calls, starting this program anew, and
// what runs in the new process.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

// Which call of spawn, and which index of it, a process that was started anew is for: LOCKSTEP_SPAWN.
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
// True in a process that spawn made.
bool inside_spawned();
// Threads of this process. Threads that were joined a moment ago are given time to leave the kernel's list.
int count_threads();
// argv of this process, as the kernel knows it.
std::vector<std::string> own_arguments();

// Runs fn(index), writes what it throws into `report`; returns the exit code. Never throws.
int run_spawned(const std::function<void(int)>& fn, int index, int report) noexcept;
// The same in a process that was started anew; ends it.
[[noreturn]] void become_spawned(const std::function<void(int)>& fn, const SpawnTarget& target);

}  // namespace lockstep::internal
