// Child processes that are never leaked. A ProcessTree starts its children through a reaper: a small process
// between the owner and the children that only forks, reaps and kills.
//
//   owner ── socket ── reaper (subreaper) ── child 0 (own session) ── whatever it starts
//                                         └─ child 1 ...
//
// When the owner dies, even by SIGKILL, the reaper sees it through a pidfd, sends SIGTERM to every
// descendant, then SIGKILL. When the reaper dies, the kernel kills the children (PDEATHSIG), and an owner
// that adopts orphans becomes the parent of their descendants and kills them. When a child leaves processes
// behind, in its session or another, the kernel reparents them to the reaper: the tree is over only when they
// have ended too.
//
// Not covered: owner and reaper killed at the same instant, or SIGKILL to the reaper of an owner that adopts
// no orphans (spawn). The children die, but processes they started may survive.
//
// Thread safety: none; one thread at a time. The destructor kills all remaining processes and waits for them.
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/fd.h"

namespace lockstep::internal {
struct ReaperMessage;
}

namespace lockstep::process {

struct ChildSpec {
  // The program and its arguments; a name without a slash is looked up in PATH.
  std::vector<std::string> argv{};
  // Executed instead of argv[0]; the program still sees argv[0] as its name.
  std::string program{};
  // Or a function to run in a forked copy of this process; its result is the exit code. It must not throw.
  // Only for a single-threaded owner: otherwise locks in the copy may be held by threads that do not exist
  // there.
  std::function<int()> body{};
  // The complete environment of a program, "NAME=value" each. A function sees the owner's.
  std::vector<std::string> environment{};
  // Become the child's 0, 1, 2; unset: it inherits the owner's. Borrowed until start() returns.
  std::optional<int> standard_input{};
  std::optional<int> standard_output{};
  std::optional<int> standard_error{};
  // Close-on-exec descriptors that the program inherits nevertheless, under the same numbers.
  std::vector<int> inherited{};
};

struct ChildEvent {
  enum class Kind : std::int32_t { kExited, kStartFailed };
  Kind kind;
  int index;
  pid_t pid;  // of kExited
  int value;  // kExited: the wait(2) status. kStartFailed: errno of exec; exit code 127 follows
  std::int64_t realtime_ns;  // when the reaper saw it
};

struct ProcessTreeOptions {
  // Makes this process a subreaper, so that it can clean up after a reaper that was killed. For programs that
  // start no other processes (the launcher), since their orphans would be reparented here too.
  bool adopt_orphans = false;
  // Time between SIGTERM and SIGKILL when the owner has died.
  Milliseconds owner_lost_grace{2'000};
  // Replaces the calling thread's own at the time of start().
  std::optional<sigset_t> child_signal_mask{};
  std::optional<rlimit> child_open_files{};
};

class ProcessTree {
 public:
  // Starts all children, each as a session leader. Returns when all are forked (a program that cannot be
  // executed is reported as an event). Raises kResource or kSystem, with nothing left running, when fork
  // fails.
  static ProcessTree start(std::span<const ChildSpec> children, const ProcessTreeOptions& options = {});
  ProcessTree(ProcessTree&& other) noexcept;
  ProcessTree& operator=(ProcessTree&&) = delete;
  ~ProcessTree();

  // One per child, in order.
  const std::vector<pid_t>& pids() const { return pids_; }
  pid_t reaper_pid() const { return reaper_; }

  // Readable when there are events, or when the tree is over.
  int fd() const { return socket_.get(); }
  // Returns the pending events; never blocks. Exits are in the order the children ended, as far as the kernel
  // reports it.
  std::vector<ChildEvent> take_events();
  // True once take_events() has seen the reaper end: no descendant is left, or the reaper was killed.
  bool over() const { return over_; }
  // The reaper was killed; exits it had not reported are unknown. The children are dead.
  bool reaper_lost() const { return reaper_lost_; }

  // Sends `signal` to the process group of every child and of every process they left behind. Never blocks.
  void signal(int signal);
  // Kills every descendant, at any depth, until none is left. Never blocks; over() becomes true when it is
  // done.
  void kill();

 private:
  ProcessTree() = default;
  void read_pids();
  void send(const internal::ReaperMessage& message);
  void see_end_of_reaper();
  void end() noexcept;

  pid_t reaper_ = -1;
  base::Fd socket_;
  std::vector<pid_t> pids_;
  std::vector<ChildEvent> early_;
  int n_exits_ = 0;
  bool adopt_orphans_ = false;
  bool over_ = false;
  bool reaper_lost_ = false;
};

}  // namespace lockstep::process
