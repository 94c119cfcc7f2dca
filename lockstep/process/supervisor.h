// Watches a ProcessTree to its end: the first failure wins, the others are asked to end, and after a grace
// killed. Shared by the launcher and by spawn.
//
// Driven by its owner's poll loop: wait for fd() or next_deadline(), then step(). Thread safety: none.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/process/process_tree.h"

namespace lockstep {

inline constexpr Milliseconds kDefaultGrace{30'000};

struct ChildExit {
  int index = -1;
  pid_t pid = -1;
  int status = 0;           // of wait(2)
  std::string start_error;  // not empty: the program could not be executed, and why
  std::chrono::system_clock::time_point time;
  bool stopped = false;  // ended after all were asked to

  bool failed() const { return status != 0; }
  // "exited with code 3", "killed by SIGKILL (9)", "cannot be executed: No such file or directory".
  std::string cause() const;
  // What a shell would report: the exit code, or 128 + signal.
  int exit_code() const;
};

struct SupervisorOptions {
  Milliseconds grace = kDefaultGrace;  // from SIGTERM to SIGKILL; zero kills at once
  // Called from step() once per child that ended, before any other child is signalled on its account.
  std::function<void(const ChildExit&)> on_exit{};
};

class Supervisor {
 public:
  Supervisor(ProcessTree tree, SupervisorOptions options);

  int fd() const { return tree_.fd(); }
  // When step() must be called even if fd() is quiet.
  Deadline next_deadline() const { return finished_ ? Deadline::never() : kill_at_; }
  // Takes what happened and acts on it. Never blocks beyond on_exit.
  void step();

  // Asks all children to end with `signal` and starts the grace, unless stopping already.
  void stop(int signal);
  // Kills all at once.
  void kill();
  // Passes a signal on without stopping.
  void signal(int signal) { tree_.signal(signal); }
  void set_grace(Milliseconds grace) { options_.grace = grace; }

  // Every child and all they started have ended.
  bool finished() const { return finished_; }
  bool stopping() const { return stopping_; }
  const std::vector<pid_t>& pids() const { return tree_.pids(); }
  // In the order they ended.
  const std::vector<ChildExit>& exits() const { return exits_; }
  // The first child that failed by itself; when none did, the first that failed after it was asked to end.
  std::optional<ChildExit> first_failure() const;

 private:
  void take(const ChildEvent& event);
  void add_exit(ChildExit exit);
  void end_lost_children();

  ProcessTree tree_;
  SupervisorOptions options_;
  std::vector<std::string> start_errors_;
  std::vector<ChildExit> exits_;
  bool stopping_ = false;
  bool killing_ = false;
  bool swept_ = false;  // what the children left behind was asked to end
  bool finished_ = false;
  Deadline kill_at_ = Deadline::never();
};

}  // namespace lockstep
