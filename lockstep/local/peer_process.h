// Whether a process at the other end still runs this program, and how it ended, in the kernel's words.
//
// Two signs, since one alone does not do. A pidfd becomes readable when the process ends, but lives through exec. A lifeline,
// a pipe of which only that process has the other end, hangs up when it ends or becomes another program, but a
// child that it forked keeps it open. Who has only a socket to the process gets the pidfd from its credentials, and
// hears of exec by the socket's end.
//
// Thread safety: constant once made; every method from any thread. Nothing blocks but what takes a deadline.
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
  // Of this process itself (its rank threads), or one that cannot be told.
  PeerProcess() = default;
  // As its OwnProcess handed them out. `pidfd` may be empty: the kernel has none.
  PeerProcess(base::Fd pidfd, base::Fd lifeline) : pidfd_(std::move(pidfd)), lifeline_(std::move(lifeline)) {}
  // Who connected or accepted; empty when that is this process, or it is not seen from here.
  static PeerProcess behind(const net::UnixSocket& socket);

  // Its end can be told.
  explicit operator bool() const { return pidfd_ || lifeline_; }
  // The process has ended, by its pidfd. One that became another program has not.
  bool ended() const;
  // The same, or it became another program: this program will not answer any more.
  bool lost() const;
  // How it ended: "killed by SIGKILL (9)" where the kernel tells, else "its process ended". Waits for its end until the
  // deadline, since sockets of a dying process close before it has ended. Nothing while it runs or cannot be told.
  std::optional<std::string> cause(Deadline deadline) const;
  // The same words without waiting, only where the kernel tells (PIDFD_GET_INFO).
  std::optional<std::string> exit_cause() const;
  // In this process's pid namespace, by the kernel's word; -1 when it does not tell, or the process is not seen from here.
  std::int64_t pid() const;

  // For poll(2); stay owned. -1: none.
  int pidfd() const { return pidfd_.get(); }
  int lifeline() const { return lifeline_.get(); }

 private:
  base::Fd pidfd_;
  base::Fd lifeline_;
};

// What this process hands to others so that they see its end: the same for all of its ranks, and open as long as it runs
// this program. A forked child gets its own: to keep its parent's would make the parent immortal.
struct OwnProcess {
  // Stay owned by the process. pidfd is -1 where the kernel has none.
  int pidfd = -1;
  int lifeline = -1;
  // Raises kResource when there are no descriptors left.
  static OwnProcess descriptors();
  // Tells this process from all others of the host, also after a fork and in another pid namespace. At most 63 characters.
  static std::string token();
};

}  // namespace lockstep::local
