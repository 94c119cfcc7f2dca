// The reaper's side of a ProcessTree (process_tree.h): the code of the process between owner and children.
//
// It is forked from an owner that may have threads, so nothing here takes a lock or allocates: all strings
// and arrays are prepared by the owner before the fork.
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <span>

namespace lockstep::internal {

// One datagram on the socket between owner and reaper, in both directions.
struct ReaperMessage {
  enum class Kind : std::int32_t {
    kStarted,      // reaper: index, pid
    kForkFailed,   // reaper: index, value = errno; nothing is left running
    kStartFailed,  // child, before it exits with 127: index, value = errno of exec
    kExited,       // reaper: index, pid, value = wait status
    kSignal,       // owner: value = signal for every child's process group
    kKill,         // owner: kill every descendant
  };
  Kind kind{};
  std::int32_t index = -1;
  std::int32_t pid = -1;
  std::int32_t value = 0;
  std::int64_t realtime_ns = 0;
};

// A ChildSpec in the form that exec takes.
struct PreparedChild {
  char* const* argv = nullptr;  // null: run body
  const char* program = nullptr;
  char* const* environment = nullptr;
  const std::function<int()>* body = nullptr;
  int standard[3] = {-1, -1, -1};
  std::span<const int> inherited{};
};

struct ReaperPlan {
  std::span<const PreparedChild> children;
  std::span<pid_t> pids;  // filled by the reaper, in its own copy
  pid_t owner = -1;
  int socket = -1;
  int owner_socket = -1;                     // the owner's end, to close
  sigset_t child_mask{};                     // the owner's signal mask before the fork
  const rlimit* child_open_files = nullptr;  // null: the owner's
  struct sigaction child_sigchld {};         // and its disposition of SIGCHLD
  char owner_name[16] = {};                  // as ps shows it
  int owner_lost_grace_ms = 2'000;
};

// Never returns; every signal is blocked on entry.
[[noreturn]] void reaper_main(const ReaperPlan& plan);

// Pids of the direct children of the calling thread, as many as fit; -1 when /proc does not list them.
int list_children(std::span<pid_t> out);

}  // namespace lockstep::internal
