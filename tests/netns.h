// Two hosts for tests, on one machine: network namespaces joined by a cable (a veth pair). Needs root and the
// ip tool. Each namespace lives as long as a small process that holds it, which ends with the test, however
// that ends: nothing is left behind. Make one before any thread starts.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::testing {

class TwoHosts {
 public:
  // Null where it cannot be; `why` says why.
  static std::unique_ptr<TwoHosts> make(std::string& why) {
    if (::geteuid() != 0) return why = "network namespaces need root", nullptr;
    if (std::system("command -v ip >/dev/null") != 0)
      return why = "there is no ip tool (package iproute2)", nullptr;
    auto hosts = std::unique_ptr<TwoHosts>(new TwoHosts);
    for (int host = 0; host < 2; ++host) {
      if ((hosts->holders_[host] = hold()) < 0) return why = "the kernel gives no network namespace", nullptr;
    }
    const std::string cable =
        base::cat("ip link add eth0 type veth peer name eth0 netns ", hosts->holders_[1]);
    if (!hosts->run(0, cable)) return why = "the kernel gives no veth pair", nullptr;
    for (int host = 0; host < 2; ++host) {
      const std::string up = base::cat("ip addr add ", hosts->address(host),
                                       "/24 dev eth0 && ip link set eth0 up && ip link set lo up");
      if (!hosts->run(host, up)) return why = "the interfaces cannot be set up", nullptr;
    }
    return hosts;
  }
  ~TwoHosts() {
    for (const pid_t holder : holders_) {
      if (holder <= 0) continue;
      ::kill(holder, SIGKILL);
      ::waitpid(holder, nullptr, 0);
    }
  }
  TwoHosts(const TwoHosts&) = delete;

  std::string address(int host) const { return base::cat("10.77.0.", host + 1); }
  // Moves the calling process, which must have one thread, to that host.
  void enter(int host) const {
    const int fd = ::open(base::cat("/proc/", holders_[host], "/ns/net").c_str(), O_RDONLY | O_CLOEXEC);
    const bool moved = fd >= 0 && ::setns(fd, CLONE_NEWNET) == 0;
    if (fd >= 0) ::close(fd);
    if (!moved) base::raise(ErrorKind::kSystem, base::cat("cannot enter host ", host));
  }
  // Runs a shell command there; true when it succeeds.
  bool run(int host, const std::string& command) const {
    const pid_t pid = ::fork();
    if (pid == 0) {
      enter(host);
      ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      ::_exit(127);
    }
    int status = 0;
    return ::waitpid(pid, &status, 0) == pid && status == 0;
  }

 private:
  TwoHosts() = default;

  // A process that holds a new namespace until it is killed or its parent ends; -1 when there is none to be
  // had.
  static pid_t hold() {
    int ready[2];
    if (::pipe2(ready, O_CLOEXEC) != 0) return -1;
    const pid_t parent = ::getpid(), pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const bool made = ::unshare(CLONE_NEWNET) == 0 && ::getppid() == parent;
      if (made && ::write(ready[1], "", 1) == 1) {
        for (;;) ::pause();
      }
      ::_exit(1);
    }
    ::close(ready[1]);
    char byte = 0;
    const bool made = pid > 0 && ::read(ready[0], &byte, 1) == 1;
    ::close(ready[0]);
    if (!made && pid > 0) ::waitpid(pid, nullptr, 0);
    return made ? pid : -1;
  }

  pid_t holders_[2] = {-1, -1};
};

// One pair for the whole test program, made by the first call; null, and told once, where there can be none.
inline TwoHosts* two_hosts() {
  static std::string why;
  static const auto two = TwoHosts::make(why);
  static const bool told = two == nullptr && std::printf("no second host: %s\n", why.c_str()) > 0;
  return told ? nullptr : two.get();
}

// Moves a rank's process to its host: the first half of the ranks is on one, the rest on the other.
inline void enter_half(int rank, int size) {
  two_hosts()->enter(rank < (size + 1) / 2 ? 0 : 1);
  ::setenv("MASTER_ADDR", two_hosts()->address(0).c_str(), 1);
}

}  // namespace lockstep::testing
