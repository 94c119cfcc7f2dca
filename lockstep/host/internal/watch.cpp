#include "lockstep/host/internal/watch.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <vector>

#include "lockstep/base/base.h"

namespace lockstep::comm::internal {
namespace {

int poll_timeout(Deadline deadline) {
  if (deadline.is_never()) return -1;
  return static_cast<int>(std::chrono::ceil<Milliseconds>(deadline.remaining()).count());
}

}  // namespace

Watch::Watch(Fabric& fabric, OnLost on_lost) : fabric_(fabric), on_lost_(std::move(on_lost)) {
  bool others = false;
  for (int r = 0; r < fabric.size(); ++r) others = others || static_cast<bool>(fabric.peer(r).lifeline);
  if (!others) return;
  stop_ = Fd(::eventfd(0, EFD_CLOEXEC));
  if (!stop_) raise(system_failure(errno, "eventfd", ErrorFamily::kBackend));
  thread_ = Thread("ls-watch", [this] { watch(); });
}

Watch::~Watch() {
  const std::uint64_t one = 1;
  if (stop_) [[maybe_unused]]
    const auto written = ::write(stop_.get(), &one, sizeof(one));
}

// A lifeline hangs up a moment before the pidfd of the same process tells. Only when that stays silent is it exec.
void Watch::watch() {
  constexpr Milliseconds kExecGrace{200};
  struct Watched {
    int rank;
    Deadline verdict;  // never: nothing was seen yet
  };
  // Slot 0 is stop_; then two per peer, its pidfd and its lifeline. poll skips what is -1.
  std::vector<pollfd> fds{{.fd = stop_.get(), .events = POLLIN, .revents = 0}};
  std::vector<Watched> watched;
  for (int r = 0; r < fabric_.size(); ++r) {
    const Peer& peer = fabric_.peer(r);
    if (!peer.lifeline) continue;
    fds.push_back({.fd = peer.pidfd.get(), .events = POLLIN, .revents = 0});
    fds.push_back({.fd = peer.lifeline.get(), .events = POLLIN, .revents = 0});
    watched.push_back({.rank = r, .verdict = Deadline::never()});
  }
  for (;;) {
    Deadline next = Deadline::never();
    for (const auto& each : watched) next = std::min(next, each.verdict);
    if (::poll(fds.data(), fds.size(), poll_timeout(next)) < 0 && errno != EINTR) return;
    if (fds[0].revents != 0) return;
    for (std::size_t i = 0; i < watched.size(); ++i) {
      pollfd& pidfd = fds[1 + 2 * i];
      pollfd& lifeline = fds[2 + 2 * i];
      const bool hung_up = lifeline.revents != 0;
      if (hung_up) lifeline.fd = -1;
      if (hung_up && pidfd.fd >= 0) watched[i].verdict = Deadline::after(kExecGrace);
      const bool ended = pidfd.revents != 0 || (hung_up && pidfd.fd < 0);
      lifeline.revents = pidfd.revents = 0;
      if (!ended && !watched[i].verdict.expired()) continue;
      lifeline.fd = pidfd.fd = -1;
      watched[i].verdict = Deadline::never();
      on_lost_(watched[i].rank, ended ? Loss::kEnded : Loss::kExec);
    }
  }
}

}  // namespace lockstep::comm::internal
