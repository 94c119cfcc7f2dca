#include "lockstep/base/detail/process.h"

#include <sched.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::base {
namespace {

// From <linux/pidfd.h>; newer than Debian 12's headers.
struct PidfdInfo {
  std::uint64_t mask;
  std::uint64_t cgroupid;
  std::uint32_t pid, tgid, ppid;
  std::uint32_t ruid, rgid, euid, egid, suid, sgid, fsuid, fsgid;
  std::int32_t exit_code;
};
constexpr std::uint64_t kPidfdInfoExit = 1u << 3;
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

}  // namespace

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? cat("SIG", name) : cat("signal ", signal);
}

std::string describe_wait_status(int status) {
  if (WIFSIGNALED(status))
    return cat("killed by ", signal_name(WTERMSIG(status)), " (", WTERMSIG(status), ")");
  if (WIFEXITED(status)) return cat("exited with code ", WEXITSTATUS(status));
  return cat("ended with wait status ", status);
}

Fd open_pidfd(pid_t pid) {
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

std::optional<std::string> exit_cause(int pidfd) {
  PidfdInfo info{};
  info.mask = kPidfdInfoExit;
  if (pidfd < 0 || ::ioctl(pidfd, kPidfdGetInfo, &info) != 0) return std::nullopt;
  if ((info.mask & kPidfdInfoExit) == 0) return std::nullopt;
  return describe_wait_status(info.exit_code);
}

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat ns {};
  if (boot.empty() || ::stat("/proc/self/ns/net", &ns) != 0) {
    raise(ErrorKind::kSystem, "cannot determine this host's identity: /proc is not readable");
  }
  return cat(boot, ".", ns.st_dev, ".", ns.st_ino);
}

std::string random_hex(int n_bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (int i = 0; i < n_bytes; ++i) {
    unsigned char byte = 0;
    if (::getrandom(&byte, 1, 0) != 1) raise(system_failure(errno, "getrandom"));
    out += kDigits[byte >> 4];
    out += kDigits[byte & 15];
  }
  return out;
}

int available_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace lockstep::base
