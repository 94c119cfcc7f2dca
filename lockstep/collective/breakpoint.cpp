#include "lockstep/collective/breakpoint.h"

#include <csignal>
#include <fstream>
#include <string>
#include <thread>

#include <unistd.h>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/log.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/group/detail/group_base.h"

namespace lockstep {
namespace {

constexpr Milliseconds kLook{50};

// Of this thread: a debugger attaches to all of a process.
bool is_traced() {
  std::ifstream status("/proc/thread-self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("TracerPid:")) return std::stol(line.substr(10)) != 0;
  }
  return false;
}

void stop_for_debugger(int rank, const char* where, Milliseconds timeout) {
  if (!is_traced()) {
    base::log(LogLevel::kError, base::cat("breakpoint at ", where, ": rank ", rank, " waits ",
                                          timeout.count() / 1000, " s for a debugger: gdb -p ", ::getpid()));
    const auto deadline = Deadline::after(timeout);
    while (!is_traced() && !deadline.expired()) std::this_thread::sleep_for(kLook);
  }
  if (is_traced()) {
    ::raise(SIGTRAP);  // the debugger stops here; "up" leads to the caller
  } else {
    base::log(LogLevel::kWarn,
              base::cat("breakpoint at ", where, ": no debugger attached; rank ", rank, " continues"));
  }
}

}  // namespace

void breakpoint(BreakpointOptions options) {
  const auto group = internal::resolve({});
  char where[internal::kWhereCapacity];
  internal::write_where(options.where, where);
  const auto refuse = [&](const std::string& why) {
    base::raise(ErrorKind::kUsage, base::cat("breakpoint (called at ", where, "): ", why));
  };
  if (options.rank < 0 || options.rank >= group->size())
    refuse(base::cat("rank is ", options.rank, "; ranks of the world are 0 to ", group->size() - 1));
  if (options.skip < 0) refuse(base::cat("skip is ", options.skip, "; it must not be negative"));
  if (options.timeout <= Milliseconds::zero())
    refuse(base::cat("timeout is ", options.timeout.count(), " ms; it must be positive"));
  // All ranks count alike: a collective over all of them.
  if (group->count_hit(where) <= options.skip) return;
  internal::raise_world_timeouts(options.timeout);
  if (group->rank() == options.rank) stop_for_debugger(options.rank, where, options.timeout);
  // Under the debugger the rank may stop for longer than it waited for the debugger; the others wait for it.
  const bool bounded = group->timeout() < kNoTimeout - options.timeout;
  barrier({.timeout = bounded ? options.timeout + group->timeout() : kNoTimeout, .where = options.where});
}

}  // namespace lockstep
