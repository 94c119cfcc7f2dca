// Watches a ProcessTree to its end: the first failure wins, the others are asked to end, and after a grace
// killed. Shared by the launcher and by spawn.
//
// A child that leaves its group in order and ends with an error is often outrun by a neighbour that failed because of
// it. A child that failed after it had lost a peer is therefore not the verdict yet: for two seconds the supervisor
// holds it, and a child that fails by itself meanwhile is the one to blame.
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

namespace lockstep {

inline constexpr Milliseconds kDefaultGrace{30'000};

struct ChildExit {
  int index = -1;
  pid_t pid = -1;
  int status = 0;           // of wait(2)
  std::string start_error;  // not empty: the program could not be executed, and why
  std::chrono::system_clock::time_point time;
  bool stopped = false;  // ended after all were asked to
  std::string loss{};    // not empty: it failed after it had lost a peer; the text of that error

  bool failed() const { return status != 0; }
  // "exited with code 3", "killed by SIGKILL (9)", "cannot be executed: No such file or directory".
  std::string cause() const;
  // It failed, and not because another had.
  bool failed_by_itself() const { return failed() && !stopped && loss.empty(); }
  // What a shell would report: the exit code, or 128 + signal.
  int exit_code() const;
};

struct SupervisorOptions {
  Milliseconds grace = kDefaultGrace;  // from SIGTERM to SIGKILL; zero kills at once
  // Called from step() once per child that ended, before any other child is signalled on its account.
  std::function<void(const ChildExit&)> on_exit{};
  // Called at most once, with the failure that ends the job, before the others are stopped on its account.
  std::function<void(const ChildExit&)> on_failure{};
  // Where the children note that they lost a peer; borrowed. Null: every failure is a child's own.
  const base::LossNotes* notes = nullptr;
};

class Supervisor {
 public:
  Supervisor(ProcessTree tree, SupervisorOptions options);

  int fd() const { return tree_.fd(); }
  // When step() must be called even if fd() is quiet.
  Deadline next_deadline() const { return finished_ ? Deadline::never() : std::min(kill_at_, hold_until_); }
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
  // A child failed because of another, and that one's failure may still come.
  bool holding() const { return !hold_until_.is_never(); }
  const std::vector<pid_t>& pids() const { return tree_.pids(); }
  // In the order they ended.
  const std::vector<ChildExit>& exits() const { return exits_; }
  // The first child that failed by itself; when none did, the first that failed because of another; when none did,
  // the first that failed after it was asked to end.
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
  bool swept_ = false;  // what the children left behind was asked to end
  bool finished_ = false;
  Deadline kill_at_ = Deadline::never();
  Deadline hold_until_ = Deadline::never();
};

}  // namespace lockstep
