#include "lockstep/process/internal/reaper.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>

namespace lockstep::internal {
namespace {

constexpr int kKillRoundMs = 20;            // between two rounds of SIGKILL
constexpr std::size_t kMaxPids = 1u << 22;  // as many as Linux has (PID_MAX_LIMIT)

std::int64_t clock_ns(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void send_message(int socket, ReaperMessage message) {
  message.realtime_ns = clock_ns(CLOCK_REALTIME);
  while (::send(socket, &message, sizeof message, MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

void keep_over_exec(int fd) {
  const int flags = ::fcntl(fd, F_GETFD);
  if (flags >= 0) ::fcntl(fd, F_SETFD, flags & ~FD_CLOEXEC);
}

bool redirect(int fd, int target) {
  if (fd < 0) return true;
  if (fd != target) return ::dup2(fd, target) >= 0;
  keep_over_exec(fd);
  return true;
}

bool asks_to_end(int signal) {
  return signal == SIGTERM || signal == SIGINT || signal == SIGHUP || signal == SIGQUIT;
}

// Runs in a forked copy of the owner: no heap, no stdio, no locks, only system calls on memory that was
// prepared before or mapped here.
//
//   owner lives     forwards signals, reports exits
//   owner is lost   SIGTERM to all, after a grace period SIGKILL in rounds
//   kill            SIGKILL in rounds, until no child is left
//
// In rounds, since a child may fork while it is being killed; its orphans come to the reaper, and the next
// round meets them.
class Reaper {
 public:
  explicit Reaper(const ReaperPlan& plan) : plan_(plan) {}

  [[noreturn]] void run() {
    prepare();
    start_children();
    close_everything_else();
    for (;;) {
      reap();
      if (killing_) signal_children(SIGKILL);
      wait_for_news();
    }
  }

 private:
  void prepare() {
    ::close(plan_.owner_socket);
    // Out of the owner's process group: what kills that group must not kill the reaper.
    ::setsid();
    ::prctl(PR_SET_NAME, "lockstep-reaper");
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    struct sigaction normal {};
    normal.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &normal, nullptr);
    sigset_t set;
    ::sigemptyset(&set);
    ::sigaddset(&set, SIGCHLD);
    signals_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    owner_ = static_cast<int>(::syscall(SYS_pidfd_open, plan_.owner, 0));
    children_ = map_pids();
    groups_ = map_pids();
    // If the owner has already died, its pid may have been reused by another process.
    if (::getppid() != plan_.owner || signals_ < 0 || children_.empty() || groups_.empty()) ::_exit(1);
  }

  // Room for every child and orphan there can be: the kernel gives pages only to what is used. Not from the
  // heap, whose locks a thread of the owner may have held at the fork.
  static std::span<pid_t> map_pids() {
    void* memory = ::mmap(nullptr, kMaxPids * sizeof(pid_t), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return {};
    return {static_cast<pid_t*>(memory), kMaxPids};
  }

  void start_children() {
    const pid_t self = ::getpid();
    for (std::size_t i = 0; i < plan_.children.size(); ++i) {
      const int index = static_cast<int>(i);
      const pid_t pid = ::fork();
      if (pid == 0) {
        const int code = become(plan_.children[i], self);
        send_message(plan_.socket,
                     {.kind = ReaperMessage::Kind::kStartFailed, .index = index, .value = code});
        ::_exit(127);
      }
      if (pid < 0) {
        const int code = errno;
        kill_all_and_wait();
        send_message(plan_.socket, {.kind = ReaperMessage::Kind::kForkFailed, .index = index, .value = code});
        ::_exit(1);
      }
      plan_.pids[i] = pid;
      send_message(plan_.socket, {.kind = ReaperMessage::Kind::kStarted, .index = index, .pid = pid});
    }
  }

  // The child's own first steps. Returns errno, and only when it could not become what it should.
  int become(const PreparedChild& child, pid_t reaper) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    // A reaper that died before the line above triggers no signal.
    if (::getppid() != reaper) ::_exit(127);
    ::setsid();
    for (int target = 0; target < 3; ++target) {
      if (!redirect(child.standard[target], target)) return errno;
    }
    ::sigaction(SIGCHLD, &plan_.child_sigchld, nullptr);
    if (plan_.child_open_files != nullptr) ::setrlimit(RLIMIT_NOFILE, plan_.child_open_files);
    if (child.argv == nullptr) {
      ::close(plan_.socket);
      ::close(signals_);
      if (owner_ >= 0) ::close(owner_);
      ::prctl(PR_SET_NAME, plan_.owner_name);
      ::sigprocmask(SIG_SETMASK, &plan_.child_mask, nullptr);
      ::_exit((*child.body)());
    }
    for (const int fd : child.inherited) keep_over_exec(fd);
    ::sigprocmask(SIG_SETMASK, &plan_.child_mask, nullptr);
    ::execvpe(child.program, child.argv, child.environment);
    return errno;
  }

  // The owner's other descriptors are not ours to hold: a pipe end kept here would never see its end of file.
  void close_everything_else() {
    std::array<int, 3> keep = {plan_.socket, signals_, owner_};
    std::sort(keep.begin(), keep.end());
    unsigned first = 3;
    for (const int fd : keep) {
      if (fd < static_cast<int>(first)) continue;
      if (fd > static_cast<int>(first)) ::syscall(SYS_close_range, first, static_cast<unsigned>(fd) - 1, 0u);
      first = static_cast<unsigned>(fd) + 1;
    }
    ::syscall(SYS_close_range, first, ~0u, 0u);
  }

  void wait_for_news() {
    std::array<pollfd, 3> fds = {
        pollfd{.fd = signals_, .events = POLLIN, .revents = 0},
        pollfd{.fd = owner_lost_ ? -1 : plan_.socket, .events = POLLIN, .revents = 0},
        pollfd{.fd = owner_lost_ ? -1 : owner_, .events = POLLIN, .revents = 0}};
    if (::poll(fds.data(), fds.size(), poll_timeout_ms()) < 0) return;
    if (fds[1].revents != 0) read_socket();
    if (fds[2].revents != 0) lose_owner();
    if (owner_lost_ && clock_ns(CLOCK_MONOTONIC) >= kill_at_ns_) killing_ = true;
  }

  int poll_timeout_ms() const {
    if (killing_) return kKillRoundMs;
    if (!owner_lost_) return -1;
    const std::int64_t left_ms = (kill_at_ns_ - clock_ns(CLOCK_MONOTONIC)) / 1'000'000 + 1;
    return static_cast<int>(std::clamp<std::int64_t>(left_ms, 0, plan_.owner_lost_grace_ms));
  }

  void read_socket() {
    ReaperMessage message;
    const ssize_t n = ::recv(plan_.socket, &message, sizeof message, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n != sizeof message) return lose_owner();
    if (message.kind == ReaperMessage::Kind::kSignal) signal_children(message.value);
    if (message.kind == ReaperMessage::Kind::kKill) killing_ = true;
  }

  void lose_owner() {
    if (owner_lost_) return;
    owner_lost_ = true;
    kill_at_ns_ = clock_ns(CLOCK_MONOTONIC) + plan_.owner_lost_grace_ms * 1'000'000LL;
    signal_children(SIGTERM);
  }

  // Takes every child that has ended; ends the process when none is left. SIGCHLD is not queued, so a pending
  // one names the child that ended first: that one is reported first, since the first failure is the one that
  // counts.
  void reap() {
    signalfd_siginfo info{};
    while (::read(signals_, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
      reap_one(P_PID, static_cast<id_t>(info.ssi_pid));
    }
    for (;;) {
      const Reaped reaped = reap_one(P_ALL, 0);
      if (reaped == Reaped::kNoChildren) ::_exit(0);
      if (reaped == Reaped::kNone) return;
    }
  }

  enum class Reaped { kOne, kNone, kNoChildren };
  Reaped reap_one(idtype_t type, id_t id) {
    siginfo_t ended{};
    if (::waitid(type, id, &ended, WEXITED | WNOHANG) != 0) {
      return errno == ECHILD ? Reaped::kNoChildren : Reaped::kNone;
    }
    if (ended.si_pid == 0) return Reaped::kNone;
    tell(ended);
    return Reaped::kOne;
  }

  void tell(const siginfo_t& ended) {
    const auto found = std::find(plan_.pids.begin(), plan_.pids.end(), ended.si_pid);
    if (found == plan_.pids.end()) return;  // an orphan that came to us
    const int status = ended.si_code == CLD_EXITED   ? ended.si_status << 8
                       : ended.si_code == CLD_DUMPED ? ended.si_status | 0x80
                                                     : ended.si_status;
    send_message(plan_.socket, {.kind = ReaperMessage::Kind::kExited,
                                .index = static_cast<int>(found - plan_.pids.begin()),
                                .pid = ended.si_pid,
                                .value = status});
    *found = -1;  // the number may soon be another process's
  }

  // Every direct child is unreaped, so neither its number nor its group's can be anyone else's.
  void signal_children(int signal) {
    int n = list_children(children_);
    if (n < 0) {
      n = 0;
      for (const pid_t pid : plan_.pids) {
        if (pid > 0) children_[static_cast<std::size_t>(n++)] = pid;
      }
    }
    const std::span<pid_t> groups = groups_;
    int n_groups = 0;
    const pid_t own = ::getpgrp();
    for (int i = 0; i < n; ++i) {
      const pid_t child = children_[static_cast<std::size_t>(i)];
      const pid_t group = ::getpgid(child);
      if (group <= 0 || group == own) {
        ::kill(child, signal);  // has not yet reached setsid
        continue;
      }
      if (std::find(groups.begin(), groups.begin() + n_groups, group) != groups.begin() + n_groups) continue;
      groups[static_cast<std::size_t>(n_groups++)] = group;
      ::kill(-group, signal);
      if (asks_to_end(signal)) ::kill(-group, SIGCONT);  // one that is stopped could not act on it
    }
  }

  void kill_all_and_wait() {
    for (;;) {
      signal_children(SIGKILL);
      while (::waitpid(-1, nullptr, WNOHANG) > 0) {
      }
      if (errno == ECHILD) return;
      ::poll(nullptr, 0, kKillRoundMs);
    }
  }

  const ReaperPlan& plan_;
  int signals_ = -1;
  int owner_ = -1;                      // pidfd
  std::span<pid_t> children_, groups_;  // scratch of signal_children
  bool owner_lost_ = false;
  bool killing_ = false;
  std::int64_t kill_at_ns_ = 0;
};

}  // namespace

int list_children(std::span<pid_t> out) {
  const int fd = ::open("/proc/thread-self/children", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  std::size_t n = 0;
  pid_t number = 0;
  std::array<char, 4096> text;
  for (;;) {
    const ssize_t got = ::read(fd, text.data(), text.size());
    if (got <= 0) break;
    for (ssize_t i = 0; i < got; ++i) {
      const char c = text[static_cast<std::size_t>(i)];
      if (c >= '0' && c <= '9') {
        number = number * 10 + (c - '0');
      } else if (number > 0) {
        if (n < out.size()) out[n++] = number;
        number = 0;
      }
    }
  }
  ::close(fd);
  return static_cast<int>(n);
}

void reaper_main(const ReaperPlan& plan) {
  Reaper reaper(plan);
  reaper.run();
}

}  // namespace lockstep::internal
