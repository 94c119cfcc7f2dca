// The launcher's limit of open files: it needs several per worker, and a connection from each worker to the
// store. The usual soft limit of 1,024 exists for programs that use select, so it is raised to the hard
// limit; workers start with the old one. Thread safety: the limit is per process; call it once.
#pragma once

#include <sys/resource.h>

#include <optional>

namespace lockstep::launch {

// Raises the soft limit of this process. Returns the previous limits; nothing when they were not changed.
inline std::optional<rlimit> raise_open_files() {
  rlimit before{};
  if (::getrlimit(RLIMIT_NOFILE, &before) != 0 || before.rlim_cur == before.rlim_max) return std::nullopt;
  rlimit raised = before;
  raised.rlim_cur = raised.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &raised) != 0) return std::nullopt;
  return before;
}

}  // namespace lockstep::launch
