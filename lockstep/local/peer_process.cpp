#include "lockstep/local/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::local {
namespace {

// Readable or hung up; poll skips -1.
bool tells(int fd, int timeout_ms) {
  pollfd ask{.fd = fd, .events = POLLIN, .revents = 0};
  return ::poll(&ask, 1, timeout_ms) == 1;
}

struct OwnDescriptors {
  base::Mutex mutex;
  std::string token LOCKSTEP_GUARDED_BY(mutex);
  base::Fd pidfd LOCKSTEP_GUARDED_BY(mutex);
  base::Fd lifeline LOCKSTEP_GUARDED_BY(mutex);
  base::Fd other_end LOCKSTEP_GUARDED_BY(mutex);
};

// Never destroyed: its end is what the others wait for.
OwnDescriptors& own() {
  static auto* const descriptors = new OwnDescriptors;
  return *descriptors;
}

}  // namespace

PeerProcess PeerProcess::behind(const net::UnixSocket& socket) {
  // The credentials are those at the time of the connection. If that process has ended since and its number
  // is in use again, the pidfd is another process's: links therefore also end with their sockets.
  const pid_t pid = socket.peer().pid;
  return pid <= 0 || pid == ::getpid() ? PeerProcess() : PeerProcess(base::open_pidfd(pid), base::Fd());
}

bool PeerProcess::ended() const {
  return pidfd_ && tells(pidfd_.get(), 0);
}

bool PeerProcess::lost() const {
  return ended() || (lifeline_ && tells(lifeline_.get(), 0));
}

std::optional<std::string> PeerProcess::cause(Deadline deadline) const {
  if (!pidfd_ || !tells(pidfd_.get(), deadline.poll_timeout_ms())) return std::nullopt;
  return exit_cause().value_or("its process ended");
}

std::optional<std::string> PeerProcess::exit_cause() const {
  return lockstep::base::exit_cause(pidfd_.get());
}

// The kernel's view through the descriptor. A number that the peer itself reported would be one of its own
// pid namespace, and a false pid would direct copies between processes to a third one.
std::optional<std::int64_t> PeerProcess::pid() const {
  if (!pidfd_) return std::nullopt;
  std::ifstream in(base::cat("/proc/self/fdinfo/", pidfd_.get()));
  for (std::string word; in >> word;) {
    std::int64_t pid = 0;
    // 0: in another pid namespace; -1: it has ended.
    if (word == "Pid:" && in >> pid) return pid > 0 ? std::optional(pid) : std::nullopt;
  }
  return std::nullopt;
}

// The random part is the same after a fork, and in another pid namespace the pid may be.
std::string OwnProcess::token() {
  // All three parts are needed.
  static const std::string random = base::random_hex(16);
  struct stat ns {};
  if (::stat("/proc/self/ns/pid", &ns) != 0)
    base::raise(base::system_failure(errno, "stat of /proc/self/ns/pid"));
  return base::cat(random, ".", ns.st_ino, ".", ::getpid());
}

// After a fork the token differs, and new descriptors replace the inherited ones. Closing the inherited write
// end is the point: it is what would keep the parent's lifeline open.
OwnProcess OwnProcess::descriptors() {
  OwnDescriptors& mine = own();
  const base::MutexLock lock(mine.mutex);
  if (const std::string now = token(); now != mine.token) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) base::raise(base::system_failure(errno, "pipe"));
    mine.lifeline = base::Fd(ends[0]);
    mine.other_end = base::Fd(ends[1]);
    mine.pidfd = base::open_pidfd(::getpid());
    mine.token = now;
  }
  return {.pidfd = mine.pidfd.get(), .lifeline = mine.lifeline.get()};
}

}  // namespace lockstep::local
