// Whether a peer's process still runs this program, and how it ended, as the kernel reports it.
//
// Two signals are needed, since neither suffices alone. A pidfd becomes readable when the process ends, but
// survives exec. A lifeline, a pipe of which only that process has the other end, hangs up when it ends or
// executes another program, but a child that it forked keeps it open. With only a socket to the process, the
// pidfd comes from its credentials, and exec is noticed when the socket closes.
//
// Thread safety: constant after construction; every method may be called from any thread. Only methods with a
// deadline block.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/net/unix_socket.h"

namespace lockstep::local {

class PeerProcess {
 public:
  // Of this process itself (its rank threads), or one whose end cannot be observed.
  PeerProcess() = default;
  // As its OwnProcess handed them out. `pidfd` may be empty: the kernel has none.
  PeerProcess(base::Fd pidfd, base::Fd lifeline) : pidfd_(std::move(pidfd)), lifeline_(std::move(lifeline)) {}
  // The process at the other end; empty when that is this process, or when it is not visible from here.
  static PeerProcess behind(const net::UnixSocket& socket);

  // Its end can be observed.
  explicit operator bool() const { return pidfd_ || lifeline_; }
  // The process has ended, by its pidfd. One that became another program has not.
  bool ended() const;
  // The same, or it became another program: this program will not answer any more.
  bool lost() const;
  // How it ended: "killed by SIGKILL (9)" where the kernel reports it, else "its process ended". Waits for
  // its end until the deadline, since sockets of a dying process close before it has ended. Nothing while it
  // runs or its end cannot be observed.
  std::optional<std::string> cause(Deadline deadline) const;
  // The same text without waiting, only where the kernel reports the status (PIDFD_GET_INFO).
  std::optional<std::string> exit_cause() const;
  // In this process's pid namespace, as the kernel reports it; nothing when it does not, or the process is
  // not visible from here.
  std::optional<std::int64_t> pid() const;

  // For poll(2), which ignores -1: none. Owned by this object.
  int pidfd() const { return pidfd_.get(); }
  int lifeline() const { return lifeline_.get(); }

 private:
  base::Fd pidfd_;
  base::Fd lifeline_;
};

// What this process gives to others so that they notice its end: the same for all of its ranks, and open for
// as long as it runs this program. A forked child gets its own: if it kept its parent's, the end of the
// parent would never be noticed.
struct OwnProcess {
  // Owned by the process. pidfd is -1 where the kernel has none.
  int pidfd = -1;
  int lifeline = -1;
  // Raises kResource when there are no descriptors left.
  static OwnProcess descriptors();
  // Unique among the processes of the host, also after a fork and across pid namespaces. At most 63
  // characters.
  static std::string token();
};

}  // namespace lockstep::local
