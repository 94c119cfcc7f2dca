#include "lockstep/host/internal/watch.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <vector>

#include "lockstep/base/base.h"

namespace lockstep::comm::internal {

Watch::Watch(Fabric& fabric, OnLost on_lost) : fabric_(fabric), on_lost_(std::move(on_lost)) {
  bool others = false;
  for (int r = 0; r < fabric.size(); ++r) others = others || static_cast<bool>(fabric.peer(r).socket);
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

void Watch::watch() {
  std::vector<pollfd> fds{{.fd = stop_.get(), .events = POLLIN, .revents = 0}};
  std::vector<int> ranks{-1};
  for (int r = 0; r < fabric_.size(); ++r) {
    const Peer& peer = fabric_.peer(r);
    if (!peer.socket) continue;
    fds.push_back({.fd = peer.pidfd ? peer.pidfd.get() : peer.socket.fd(), .events = POLLIN, .revents = 0});
    ranks.push_back(r);
  }
  for (;;) {
    if (::poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) return;
    if (fds[0].revents != 0) return;
    for (std::size_t i = 1; i < fds.size(); ++i) {
      if (fds[i].revents == 0) continue;
      fds[i].revents = 0;
      fds[i].fd = -1;  // poll skips it from now on
      on_lost_(ranks[i]);
    }
  }
}

}  // namespace lockstep::comm::internal
