#include "lockstep/process/handled_signal.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "lockstep/base/detail/process.h"

namespace lockstep::process {
namespace {

// From /proc/<pid>/stat; -1 when the process no longer exists. The name before it may hold anything but ends
// with the last ')'.
pid_t session_of(const std::filesystem::path& process) {
  std::ifstream file(process / "stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto name_end = text.rfind(')');
  if (name_end == std::string::npos) return -1;
  std::istringstream rest(text.substr(name_end + 1));
  char state = 0;
  pid_t parent = 0, group = 0, session = -1;
  rest >> state >> parent >> group >> session;
  return session;
}

bool handles(const std::filesystem::path& process, int signal) {
  std::ifstream file(process / "status");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("SigCgt:")) continue;
    std::uint64_t mask = 0;
    std::istringstream(line.substr(7)) >> std::hex >> mask;
    return (mask >> (signal - 1) & 1) != 0;
  }
  return false;
}

// Closed by the bare system call, as it was opened by one: TSan would see close() alone and take the
// descriptor for the socket of another thread that had its number before.
struct PidFd {
  const int fd;
  ~PidFd() {
    if (fd >= 0) ::syscall(SYS_close, fd);
  }
};

}  // namespace

int send_handled_signal(std::span<const pid_t> sessions, int signal) noexcept try {
  int n_sent = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    pid_t pid = -1;
    if (std::from_chars(name.data(), name.data() + name.size(), pid).ec != std::errc() || pid <= 0) continue;
    // Opened before it is looked at: what is signalled is what was looked at, even if the number is given
    // away.
    const PidFd pidfd{base::open_pidfd(pid).release()};
    if (pidfd.fd < 0 || std::ranges::find(sessions, session_of(entry.path())) == sessions.end()) continue;
    if (!handles(entry.path(), signal)) continue;
    n_sent += ::syscall(SYS_pidfd_send_signal, pidfd.fd, signal, nullptr, 0) == 0;
  }
  return n_sent;
} catch (...) {
  return 0;
}

}  // namespace lockstep::process
