// Starts ranks as processes from inside a program: spawn(4, fn) runs fn(0) .. fn(3) in one process each, with
// the environment of a world of 4, so that init_process_group() in fn needs no argument.
//
//   int main() {
//     lockstep::spawn(4, [](int rank) {
//       lockstep::init_process_group();
//       ...
//     });
//   }
//
// Two start methods. kFork forks this process: fast, and fn sees all variables; only while the process has a
// single thread (a fork of a process that has run an OpenMP region hangs). kReexec executes this program
// again with the same arguments; main() runs again up to the same call of spawn, which there runs fn(index)
// and exits. Earlier calls of spawn return immediately in such a process. kAuto forks when possible.
//
// When a process fails, the others get SIGTERM, and SIGKILL after the grace period; how it ended is published
// in the rendezvous store before they are signalled. A process that failed because it lost a peer is not
// reported as the cause while that peer's own failure may still arrive (supervisor.h). Processes, and all
// they start, end with this process (process_tree.h). Their standard input is empty.
//
// Thread safety: spawn may be called from any thread, concurrently (kReexec counts calls, so their order must
// be the same in every run). A SpawnContext is used by one thread at a time.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"

namespace lockstep {

enum class StartMethod { kAuto, kFork, kReexec };
enum class SpawnJoin { kYes, kNo };

struct SpawnOptions {
  // kNo returns immediately; call join() on the context.
  SpawnJoin join = SpawnJoin::kYes;
  StartMethod start_method = StartMethod::kAuto;
  Milliseconds grace{30'000};  // from SIGTERM to SIGKILL; zero kills at once
};

// A process failed: thrown by spawn and join. kind() is kPeerLost; peer() has rank, pid and cause.
class SpawnError : public Error {
 public:
  SpawnError(Failure failure, int index, int exit_code)
      : Error(std::move(failure)), index_(index), exit_code_(exit_code) {}
  int index() const noexcept { return index_; }
  // 128 + signal for a process ended by a signal.
  int exit_code() const noexcept { return exit_code_; }

 private:
  int index_;
  int exit_code_;
};

// Running processes. The destructor kills those still running.
class SpawnContext {
 public:
  SpawnContext(SpawnContext&&) noexcept;
  SpawnContext& operator=(SpawnContext&&) noexcept;
  ~SpawnContext();

  // In the order of their index.
  const std::vector<pid_t>& pids() const;
  // Waits for all to end: true when they have, false when the timeout passed first (unset: never). Raises
  // SpawnError with index, pid and cause of the first that failed and the text of its exception, once all
  // have ended.
  bool join(std::optional<Milliseconds> timeout = {});
  // The same with another grace period for processes stopped from now on.
  bool join(std::optional<Milliseconds> timeout, Milliseconds grace);

 private:
  friend SpawnContext spawn(int n, const std::function<void(int index)>& fn, const SpawnOptions& options);
  struct State;
  explicit SpawnContext(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Raises kUsage for n < 1, for kFork in a process with threads, and for kReexec inside a spawned process;
// kResource or kSystem when no process can be started. fn runs only in the new processes; an exception ends
// its process with code 1 and becomes the text of the SpawnError.
SpawnContext spawn(int n, const std::function<void(int index)>& fn, const SpawnOptions& options = {});

}  // namespace lockstep
