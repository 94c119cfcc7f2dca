#include "lockstep/process/process_tree.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/process/internal/reaper.h"
#include "lockstep/process/internal/signals_blocked.h"

namespace lockstep::process {
namespace {

using internal::PreparedChild;
using internal::ReaperMessage;
using internal::ReaperPlan;
using internal::SignalsBlocked;

constexpr Milliseconds kEndTimeout{10'000};  // for processes that got SIGKILL to be gone

// The specs in the form the reaper can use without memory of its own. Points into the specs.
struct Prepared {
  explicit Prepared(std::span<const ChildSpec> specs) {
    strings.reserve(2 * specs.size());
    for (const ChildSpec& spec : specs) {
      PreparedChild child;
      child.standard[0] = spec.standard_input.value_or(-1);
      child.standard[1] = spec.standard_output.value_or(-1);
      child.standard[2] = spec.standard_error.value_or(-1);
      child.inherited = spec.inherited;
      if (spec.body) {
        child.body = &spec.body;
      } else if (spec.argv.empty()) {
        base::raise(ErrorKind::kUsage, "a child process needs a program or a function");
      } else {
        child.program = spec.program.empty() ? spec.argv[0].c_str() : spec.program.c_str();
        child.argv = pointers(spec.argv);
        child.environment = pointers(spec.environment);
      }
      children.push_back(child);
    }
  }
  char* const* pointers(const std::vector<std::string>& texts) {
    auto& list = strings.emplace_back();
    for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
    list.push_back(nullptr);
    return list.data();
  }

  std::vector<std::vector<char*>> strings;
  std::vector<PreparedChild> children;
};

// Direct children of every thread of this process; orphans arrive at any of them.
std::vector<pid_t> children_of_all_threads() {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::ifstream file(task.path() / "children");
    for (pid_t pid = 0; file >> pid;) found.push_back(pid);
  }
  return found;
}

// Kills and reaps every child of this process until none is left.
void kill_own_children(Deadline deadline) {
  while (!deadline.expired()) {
    for (const pid_t pid : children_of_all_threads()) {
      const pid_t group = ::getpgid(pid);
      if (group > 0 && group != ::getpgrp()) ::kill(-group, SIGKILL);
      ::kill(pid, SIGKILL);
    }
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    if (errno == ECHILD) return;
    ::poll(nullptr, 0, 10);
  }
  base::log(LogLevel::kError, "processes that received SIGKILL still exist after 10 s");
}

// A reaper that ends with an order unread makes the kernel say "connection reset" once, before what the
// reaper had sent; that is still there.
bool is_passing(int code) {
  return code == EINTR || code == ECONNRESET;
}

ChildEvent to_event(const ReaperMessage& message) {
  const bool exited = message.kind == ReaperMessage::Kind::kExited;
  return {.kind = exited ? ChildEvent::Kind::kExited : ChildEvent::Kind::kStartFailed,
          .index = message.index,
          .pid = message.pid,
          .value = message.value,
          .realtime_ns = message.realtime_ns};
}

}  // namespace

//   owner --fork--> reaper (subreaper, own session) --fork--> child 0, child 1, ... (own sessions)
//     '----- socket: started, exited, signal, kill ---'
//
// The reaper outlives its owner by at most a grace period and takes the children with it; each child gets
// SIGKILL from the kernel when the reaper dies. So no order of deaths leaves one behind.
ProcessTree ProcessTree::start(std::span<const ChildSpec> specs, const ProcessTreeOptions& options) {
  Prepared prepared(specs);
  std::vector<pid_t> pids(specs.size(), -1);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    base::raise(base::system_failure(errno, "socketpair for the processes to start"));
  }
  ProcessTree tree;
  tree.socket_.reset(ends[0]);
  base::Fd reaper_socket(ends[1]);
  tree.adopt_orphans_ = options.adopt_orphans;
  if (options.adopt_orphans) ::prctl(PR_SET_CHILD_SUBREAPER, 1);

  ReaperPlan plan{.children = prepared.children,
                  .pids = pids,
                  .owner = ::getpid(),
                  .socket = ends[1],
                  .owner_socket = ends[0]};
  plan.owner_lost_grace_ms = static_cast<int>(options.owner_lost_grace.count());
  if (options.child_open_files) plan.child_open_files = &*options.child_open_files;
  ::prctl(PR_GET_NAME, plan.owner_name);
  ::sigaction(SIGCHLD, nullptr, &plan.child_sigchld);
  // Buffered output would be written again by every forked copy that runs a function.
  if (std::any_of(specs.begin(), specs.end(), [](const ChildSpec& spec) { return bool(spec.body); })) {
    std::cout.flush();
    std::fflush(nullptr);
  }
  {
    const SignalsBlocked blocked;
    plan.child_mask = options.child_signal_mask.value_or(blocked.before());
    // From here to reaper_main() only async-signal-safe calls: another thread may have held any lock at the
    // fork.
    tree.reaper_ = ::fork();
    if (tree.reaper_ == 0) internal::reaper_main(plan);
  }
  if (tree.reaper_ < 0) base::raise(base::system_failure(errno, "start a process"));
  tree.pids_.assign(specs.size(), -1);
  reaper_socket.reset();
  tree.read_pids();
  return tree;
}

ProcessTree::ProcessTree(ProcessTree&& other) noexcept
    : reaper_(std::exchange(other.reaper_, -1)),
      socket_(std::move(other.socket_)),
      pids_(std::move(other.pids_)),
      early_(std::move(other.early_)),
      n_exits_(other.n_exits_),
      adopt_orphans_(other.adopt_orphans_),
      over_(other.over_),
      reaper_lost_(other.reaper_lost_) {}

ProcessTree::~ProcessTree() {
  if (reaper_ > 0) end();
}

// start() returns when every child has been forked, so that pids() is complete; whether its program could be
// executed is an event.
void ProcessTree::read_pids() {
  std::size_t n_started = 0;
  while (n_started < pids_.size()) {
    ReaperMessage message;
    const ssize_t n = ::recv(socket_.get(), &message, sizeof message, 0);
    if (n < 0 && is_passing(errno)) continue;
    if (n != sizeof message)
      base::raise(ErrorKind::kSystem, "the process that starts the others ended at once");
    if (message.kind == ReaperMessage::Kind::kForkFailed) {
      base::raise(base::system_failure(message.value, base::cat("start process ", message.index)));
    }
    if (message.kind == ReaperMessage::Kind::kStarted) {
      pids_[static_cast<std::size_t>(message.index)] = message.pid;
      ++n_started;
    } else {
      early_.push_back(
          to_event(message));  // a program that could not be executed, before the last one was forked
    }
  }
}

std::vector<ChildEvent> ProcessTree::take_events() {
  std::vector<ChildEvent> events = std::exchange(early_, {});
  while (!over_) {
    ReaperMessage message;
    const ssize_t n = ::recv(socket_.get(), &message, sizeof message, MSG_DONTWAIT);
    if (n < 0 && is_passing(errno)) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n != sizeof message) {
      see_end_of_reaper();
      break;
    }
    if (message.kind == ReaperMessage::Kind::kExited) ++n_exits_;
    events.push_back(to_event(message));
  }
  return events;
}

// Normal when all exits were reported before. Otherwise the reaper was killed, and the kernel has killed the
// children with it; orphans of theirs come to this process if it asked for that.
void ProcessTree::see_end_of_reaper() {
  over_ = true;
  reaper_lost_ = n_exits_ < static_cast<int>(pids_.size());
  if (reaper_lost_ && adopt_orphans_) kill_own_children(Deadline::after(kEndTimeout));
  // Its exit code says nothing; ECHILD when the program reaps every child itself.
  while (::waitpid(reaper_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void ProcessTree::signal(int signal) {
  send({.kind = ReaperMessage::Kind::kSignal, .value = signal});
}

void ProcessTree::kill() {
  send({.kind = ReaperMessage::Kind::kKill});
}

void ProcessTree::send(const ReaperMessage& message) {
  // A reaper that has died or does not read needs no command; take_events() will report it.
  if (!over_) ::send(socket_.get(), &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void ProcessTree::end() noexcept {
  const Deadline deadline = Deadline::after(kEndTimeout);
  kill();
  while (!over_ && !deadline.expired()) {
    pollfd wait{.fd = socket_.get(), .events = POLLIN, .revents = 0};
    ::poll(&wait, 1, deadline.poll_timeout_ms());
    try {
      take_events();
    } catch (...) {
      return;  // out of memory; the reaper goes on by itself
    }
  }
}

}  // namespace lockstep::process
