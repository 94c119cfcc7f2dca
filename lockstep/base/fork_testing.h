// For tests: children forked by a test that has one thread, words that they share with it, and how they end.
// Every wait is bounded.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/fd.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::fork_testing {

inline constexpr Milliseconds kPatience{60'000};

// True as soon as `condition` holds; false when patience ran out.
inline bool eventually(const std::function<bool()>& condition) {
  const Deadline deadline = Deadline::after(kPatience);
  while (!condition()) {
    if (deadline.expired()) return false;
    ::poll(nullptr, 0, 1);
  }
  return true;
}

// In a child, where nobody would see a failed EXPECT: ends it with code 1, the reason on stderr.
#define CHILD_EXPECT(condition, why)                                                           \
  do {                                                                                         \
    if (!(condition))                                                                          \
      ::lockstep::fork_testing::end_child(::lockstep::base::cat(#condition, ": ", why, "\n")); \
  } while (false)
[[noreturn]] inline void end_child(const std::string& reason) {
  [[maybe_unused]] const auto written = ::write(2, reason.data(), reason.size());
  ::_exit(1);
}

// One T that the test and its children see. For atomics and what they guard.
template <class T>
class Shared {
 public:
  Shared() {
    void* memory = ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    value_ = new (memory) T();
  }
  ~Shared() { ::munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }

 private:
  T* value_;
};

// As waitpid tells it, or -1 for a child that did not end in time, which is killed then. Twice the patience:
// a child that waits in vain should say so itself.
inline int status_of(pid_t pid) {
  const base::Fd pidfd = base::open_pidfd(pid);
  pollfd ask{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
  const bool ended = ::poll(&ask, 1, 2 * static_cast<int>(kPatience.count())) == 1;
  if (!ended) ::kill(pid, SIGKILL);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return ended ? status : -1;
}

// Those that were not asked for their status are killed in the end.
class Children {
 public:
  Children() = default;
  ~Children() {
    for (const pid_t pid : pids_) {
      if (pid > 0 && ::kill(pid, SIGKILL) == 0) ::waitpid(pid, nullptr, 0);
    }
  }
  Children(Children&&) noexcept = default;
  Children& operator=(Children&&) = delete;

  // Child number size(): ends with 0 when body returns, with 1 and the reason on stderr when it throws.
  void start(const std::function<void()>& body) {
    const pid_t pid = ::fork();
    if (pid != 0) {
      if (pid < 0) std::abort();
      pids_.push_back(pid);
      return;
    }
    try {
      body();
    } catch (const std::exception& error) {
      end_child(base::cat("child ", pids_.size(), ": ", error.what(), "\n"));
    }
    ::_exit(0);
  }
  int size() const { return static_cast<int>(pids_.size()); }
  void kill(int i) { ::kill(pids_.at(static_cast<std::size_t>(i)), SIGKILL); }
  // Once for each child.
  int status(int i) { return status_of(std::exchange(pids_.at(static_cast<std::size_t>(i)), -1)); }

 private:
  std::vector<pid_t> pids_;
};

}  // namespace lockstep::fork_testing
