// Supervises a ProcessTree until it ends: after the first failure the other children get SIGTERM, and SIGKILL
// after a grace period. Used by the launcher and by spawn.
//
// A child that leaves its group cleanly and exits with an error is often overtaken by a peer that failed
// because of it. A child that failed after losing a peer is therefore not yet taken as the root cause: the
// supervisor waits two seconds, and a child that fails on its own within that time is the root cause.
//
// Driven by its owner's poll loop: wait for fd() or next_deadline(), then step(). Thread safety: none.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/loss_note.h"
#include "lockstep/process/process_tree.h"

namespace lockstep::process {

inline constexpr Milliseconds kDefaultGrace{30'000};

struct ChildExit {
  int index = 0;
  pid_t pid = 0;
  int status = 0;           // from wait(2)
  std::string start_error;  // not empty: why the program could not be executed
  std::chrono::system_clock::time_point time;
  bool stopped = false;  // ended after all were told to stop
  std::string loss{};    // not empty: it failed after losing a peer; the text of that error

  bool failed() const { return status != 0; }
  // "exited with code 3", "killed by SIGKILL (9)", "cannot be executed: No such file or directory".
  std::string cause() const;
  // Failed on its own, not as a consequence of another failure.
  bool failed_by_itself() const { return failed() && !stopped && loss.empty(); }
  // What a shell would report: the exit code, or 128 + signal.
  int exit_code() const;
};

struct SupervisorOptions {
  Milliseconds grace = kDefaultGrace;  // from SIGTERM to SIGKILL; zero kills at once
  // Called from step() once per child that ended, before any other child is signalled because of it.
  std::function<void(const ChildExit&)> on_exit{};
  // Called at most once, with the failure that ends the job, before the others are stopped because of it.
  std::function<void(const ChildExit&)> on_failure{};
  // Where the children record that they lost a peer; borrowed. Null: every failure counts as the child's own.
  const base::LossNotes* notes = nullptr;
};

class Supervisor {
 public:
  Supervisor(ProcessTree tree, SupervisorOptions options);

  int fd() const { return tree_.fd(); }
  // When step() must be called even if fd() is not readable.
  Deadline next_deadline() const { return finished_ ? Deadline::never() : std::min(kill_at_, hold_until_); }
  // Processes pending events. Blocks no longer than on_exit does.
  void step();

  // Sends `signal` to all children and starts the grace period, unless already stopping.
  void stop(int signal);
  // Kills all immediately.
  void kill();
  // Forwards a signal without stopping.
  void signal(int signal) { tree_.signal(signal); }
  void set_grace(Milliseconds grace) { options_.grace = grace; }

  // All children and their descendants have ended.
  bool finished() const { return finished_; }
  bool stopping() const { return stopping_; }
  // A child failed because of another, whose failure may still arrive.
  bool holding() const { return !hold_until_.is_never(); }
  const std::vector<pid_t>& pids() const { return tree_.pids(); }
  // In the order they ended.
  const std::vector<ChildExit>& exits() const { return exits_; }
  // The first child that failed on its own; else the first that failed because of another; else the first
  // that failed after it was told to stop.
  std::optional<ChildExit> first_failure() const;

 private:
  void take(const ChildEvent& event);
  void add_exit(ChildExit exit);
  void judge(const ChildExit& exit);
  void end_hold();
  void end_lost_children();

  ProcessTree tree_;
  SupervisorOptions options_;
  std::vector<std::string> start_errors_;
  std::vector<ChildExit> exits_;
  bool stopping_ = false;
  bool killing_ = false;
  bool swept_ = false;  // processes the children left behind were told to stop
  bool finished_ = false;
  Deadline kill_at_ = Deadline::never();
  Deadline hold_until_ = Deadline::never();
};

}  // namespace lockstep::process
