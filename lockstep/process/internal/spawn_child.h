// The parts of spawn that are about a single process: counting threads and calls, starting this program anew, and
// what runs in the new process.
#pragma once

#include <signal.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/thread.h"

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

// A thread that takes no signals: they belong to the program's own threads.
template <class Function>
Thread quiet_thread(std::string name, Function function) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    const sigset_t& mask;
    ~Restore() { ::pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
  } restore{before};
  return Thread(std::move(name), std::move(function));
}

}  // namespace lockstep::internal
