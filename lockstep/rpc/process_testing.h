// For tests: workers that are real processes, some of which are killed. The parent forks before it has
// threads; children find each other through a file.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/store/file_store.h"

namespace lockstep::rpc::testing {

// What parent and children share.
struct Board {
  std::atomic<int> n_ready{0};
  std::atomic<std::int64_t> killed_at_ns{0};
  std::atomic<std::int64_t> noticed_at_ns[64];
  std::atomic<std::uint64_t> counters[64];
};

inline std::int64_t now_ns() {
  return Deadline::now().monotonic_ns();
}

// A failed check in a child must end it: GoogleTest's own would stay there unseen.
inline void require(bool condition, const std::string& what) {
  if (!condition) base::raise(ErrorKind::kInternal, "not so: " + what);
}

// In a child: waits for an event; raises when it does not come.
inline void await(const std::function<bool()>& holds) {
  const Deadline deadline = Deadline::after(Milliseconds(60'000));
  while (!holds()) {
    require(!deadline.expired(), "what was waited for");
    std::this_thread::sleep_for(Milliseconds(1));
  }
}

[[noreturn]] inline void wait_for_death() {
  for (;;) std::this_thread::sleep_for(Milliseconds(1000));
}

inline void expect_gone(const std::function<void()>& use) {
  try {
    use();
    require(false, "what a dead worker had is lost");
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kPeerLost, error.what());
  }
}

struct ChildrenOptions {
  bool tcp_only = false;
  bool strict = true;
  std::function<void(RpcOptions&)> change{};
};

class Children {
 public:
  // Forks n workers "worker0".. that init_rpc and run body(rank, board); a body shuts RPC down itself, or is
  // killed.
  Children(int n, const std::function<void(int, Board&)>& body, ChildrenOptions options = {})
      : n_(n), options_(std::move(options)) {
    path_ = (std::filesystem::temp_directory_path() / ("lockstep-rpc-" + base::random_hex(8))).string();
    void* memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    board_ = new (memory) Board;
    for (int rank = 0; rank < n; ++rank) {
      const pid_t pid = ::fork();
      if (pid == 0) ::_exit(run(rank, body));
      pids_.push_back(pid);
    }
  }
  ~Children() {
    for (std::size_t i = 0; i < pids_.size(); ++i) {
      if (!waited_[i]) {
        ::kill(pids_[i], SIGKILL);
        ::waitpid(pids_[i], nullptr, 0);
      }
    }
    ::munmap(board_, sizeof(Board));
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  Board& board() { return *board_; }
  void await_ready() {
    const Deadline deadline = Deadline::after(Milliseconds(60'000));
    while (board_->n_ready < n_ && !deadline.expired()) ::usleep(500);
    ASSERT_EQ(board_->n_ready, n_) << "not all workers came";
  }
  void kill(int rank) {
    board_->killed_at_ns = now_ns();
    ::kill(pids_[static_cast<std::size_t>(rank)], SIGKILL);
  }
  // Another process in the place of one that was killed, under its name.
  void start_again(int rank, const std::function<void(int, Board&)>& body) {
    auto& pid = pids_[static_cast<std::size_t>(rank)];
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status)) << "worker " << rank << " " << base::describe_wait_status(status);
    pid = ::fork();
    if (pid == 0) ::_exit(run(rank, body));
  }
  // Waits until a child has raised the counter on the board.
  void await(const std::atomic<std::uint64_t>& counter, std::uint64_t value) {
    const Deadline deadline = Deadline::after(Milliseconds(60'000));
    while (counter < value && !deadline.expired()) ::usleep(500);
    ASSERT_GE(counter, value) << "a worker did not get so far";
  }
  void stop(int rank) { ::kill(pids_[static_cast<std::size_t>(rank)], SIGSTOP); }
  void go_on(int rank) { ::kill(pids_[static_cast<std::size_t>(rank)], SIGCONT); }
  // Those in `killed` end by SIGKILL, all others exit with status 0, in bounded time.
  void expect_end(const std::vector<int>& killed = {}) {
    const Deadline deadline = Deadline::after(Milliseconds(60'000));
    for (int rank = 0; rank < n_; ++rank) {
      int status = 0;
      pid_t got = 0;
      while ((got = ::waitpid(pids_[static_cast<std::size_t>(rank)], &status, WNOHANG)) == 0 &&
             !deadline.expired()) {
        ::usleep(500);
      }
      if (got == 0) {
        ADD_FAILURE() << "worker " << rank << " does not end";
        continue;
      }
      waited_[static_cast<std::size_t>(rank)] = true;
      const bool was_killed = std::find(killed.begin(), killed.end(), rank) != killed.end();
      if (was_killed) {
        EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "worker " << rank;
      } else {
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
            << "worker " << rank << " " << base::describe_wait_status(status);
      }
    }
  }

 private:
  int run(int rank, const std::function<void(int, Board&)>& body) {
    try {
      RpcOptions rpc{.rank = rank,
                     .world_size = n_,
                     .store = FileStore::open(path_, {.n_users = n_}),
                     .init_timeout = Milliseconds(60'000),
                     .tcp_only = options_.tcp_only,
                     .strict_rref_check = options_.strict};
      if (options_.change) options_.change(rpc);
      start("worker" + std::to_string(rank), rpc);
      ++board_->n_ready;
      body(rank, *board_);
      return 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "worker %d: %s\n", rank, error.what());
      return 1;
    }
  }

  const int n_;
  const ChildrenOptions options_;
  std::string path_;
  Board* board_ = nullptr;
  std::vector<pid_t> pids_;
  std::vector<bool> waited_ = std::vector<bool>(64, false);
};

}  // namespace lockstep::rpc::testing
