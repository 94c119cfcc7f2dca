// For tests: a child process that has sent its pidfd and lifeline, and carries out orders.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "lockstep/base/fork_testing.h"
#include "lockstep/local/peer_process.h"

namespace lockstep::local::testing {

class ChildPeer {
 public:
  enum Order : std::uint8_t { kEnd = 'e', kFork = 'f', kExec = 'x' };

  ChildPeer() {
    auto [here, there] = net::UnixSocket::pair();
    children_.start([&here = here, &there = there] {
      here = net::UnixSocket();
      obey(there);
    });
    socket_ = std::move(here);
    std::uint8_t byte = 0;
    std::vector<base::Fd> fds;
    socket_.receive({&byte, 1}, patience(), &fds);
    process_ = PeerProcess(fds.size() == 2 ? std::move(fds[1]) : base::Fd(), std::move(fds[0]));
  }

  const PeerProcess& process() const { return process_; }
  void order(Order what) {
    const std::uint8_t byte = what;
    socket_.send({&byte, 1}, patience());
  }
  // After kFork: waits until the grandchild runs.
  void await_fork() {
    std::uint8_t byte = 0;
    socket_.receive({&byte, 1}, patience());
  }
  void signal(int number) { ::kill(static_cast<pid_t>(process_.pid().value()), number); }
  int status() { return children_.status(0); }

 private:
  static Deadline patience() { return Deadline::after(fork_testing::kPatience); }

  static void obey(net::UnixSocket& parent) {
    const auto own = OwnProcess::descriptors();
    const std::uint8_t hello = 1;
    const int fds[] = {own.lifeline, own.pidfd};
    parent.send({&hello, 1}, patience(), std::span(fds).first(own.pidfd >= 0 ? 2 : 1));
    for (std::uint8_t what = 0;;) {
      try {
        parent.receive({&what, 1}, patience());
      } catch (const std::exception&) {
        return;  // the test is over
      }
      if (what == kExec) ::execl("/bin/sleep", "sleep", "100", nullptr);
      if (what != kFork) return;
      // Has the child's end of the lifeline, and lives until the test ends.
      if (::fork() == 0) {
        parent.send({&hello, 1}, patience());
        fork_testing::eventually([&] { return parent.peer_closed(); });
        ::_exit(0);
      }
    }
  }

  fork_testing::Children children_;
  net::UnixSocket socket_;
  PeerProcess process_;
};

}  // namespace lockstep::local::testing
