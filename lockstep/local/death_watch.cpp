#include "lockstep/local/death_watch.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"

namespace lockstep::local {

DeathWatch::DeathWatch(std::vector<Watched> processes, OnLost on_lost)
    : on_lost_(std::move(on_lost)), processes_(std::move(processes)) {
  std::erase_if(processes_, [](const Watched& each) { return !*each.process; });
  if (processes_.empty()) return;
  stop_ = base::Fd(::eventfd(0, EFD_CLOEXEC));
  if (!stop_) base::raise(base::system_failure(errno, "eventfd", ErrorFamily::kBackend));
  thread_ = base::Thread("ls-peer-watch", [this] { watch(); });
}

// Only wakes the thread; thread_, declared last and so destroyed first, joins it while everything it uses
// still exists.
DeathWatch::~DeathWatch() {
  const std::uint64_t one = 1;
  if (stop_) [[maybe_unused]]
    const auto written = ::write(stop_.get(), &one, sizeof(one));
}

// Of one process:
//
//   runs --pidfd readable, or lifeline hung up and there is no pidfd--> ended
//   runs --lifeline hung up--> in doubt --pidfd readable--> ended
//                                       --grace over------> exec
//
// A lifeline hangs up a moment before the pidfd of the same process becomes readable; only if that does not
// follow was it exec.
void DeathWatch::watch() {
  constexpr Milliseconds kExecGrace{200};
  // Slot 0 is stop_; then two per process, its pidfd and its lifeline. poll skips what is -1.
  std::vector<pollfd> fds{{.fd = stop_.get(), .events = POLLIN, .revents = 0}};
  // When a process in doubt is taken for exec; never: nothing was seen yet, or it was reported.
  std::vector<Deadline> verdicts(processes_.size(), Deadline::never());
  for (const Watched& each : processes_) {
    fds.push_back({.fd = each.process->pidfd(), .events = POLLIN, .revents = 0});
    fds.push_back({.fd = each.process->lifeline(), .events = POLLIN, .revents = 0});
  }
  for (;;) {
    const Deadline next = *std::ranges::min_element(verdicts);
    if (::poll(fds.data(), fds.size(), next.poll_timeout_ms()) < 0 && errno != EINTR) return;
    if (fds[0].revents != 0) return;
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      pollfd& pidfd = fds[1 + 2 * i];
      pollfd& lifeline = fds[2 + 2 * i];
      const bool hung_up = lifeline.revents != 0;
      // A closed pipe stays readable: without this poll would return at once until the verdict.
      if (hung_up) lifeline.fd = -1;
      if (hung_up && pidfd.fd >= 0) verdicts[i] = Deadline::after(kExecGrace);
      const bool ended = pidfd.revents != 0 || (hung_up && pidfd.fd < 0);
      lifeline.revents = pidfd.revents = 0;
      if (!ended && !verdicts[i].expired()) continue;
      // Reported once: without descriptors and without a verdict nothing about this process can happen again.
      lifeline.fd = pidfd.fd = -1;
      verdicts[i] = Deadline::never();
      on_lost_(processes_[i].rank, ended ? Loss::kEnded : Loss::kExec);
    }
  }
}

}  // namespace lockstep::local
