// A worker that forks: its child has a copy of its agent and of its references, which are still the worker's.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/base/detail/process.h"
#include "lockstep/base/error.h"
#include "lockstep/rpc/process_testing.h"
#include "lockstep/store/hash_store.h"

// In a forked child LeakSanitizer takes what only the parent's threads held for lost: it checks the workers,
// not their children.
static bool in_forked_child = false;
extern "C" [[gnu::visibility("default")]] int __lsan_is_turned_off();  // LeakSanitizer looks for it by name
extern "C" int __lsan_is_turned_off() {                                // NOLINT: its name
  return in_forked_child ? 1 : 0;
}

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using namespace testing;

int number_here() {
  return current_agent("test")->self().id;
}
LOCKSTEP_RPC_FUNCTION(number_here, "process_fork_test.number_here");

void sleep_here(int ms) {
  std::this_thread::sleep_for(Milliseconds(ms));
}
LOCKSTEP_RPC_FUNCTION(sleep_here, "process_fork_test.sleep_here");

// A child of a worker has a copy of its agent, and leaves through exit(), which ends what is static. The wait
// status.
int status_of_child_that_exits(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(50);  // so that one that hangs fails the test instead
    in_forked_child = true;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "the child: %s\n", error.what());
      ::_exit(1);
    }
    std::exit(0);
  }
  int status = 0;
  require(::waitpid(pid, &status, 0) == pid, "it is a child");
  return status;
}

// g++ 12's ASan does not hold its allocator's locks across fork(): a child hangs in malloc when another
// thread was inside it. That happens by chance, so a child that hung is forked again; one that hangs for a
// reason of ours hangs every time.
#ifdef __SANITIZE_ADDRESS__
constexpr int kMaxForks = 3;
#else
constexpr int kMaxForks = 1;
#endif

void fork_child_that_exits(const std::function<void()>& body) {
  int status = 0;
  for (int i = 0; i < kMaxForks; ++i) {
    status = status_of_child_that_exits(body);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGALRM) break;
  }
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child " + base::describe_wait_status(status));
}

// Before and after a child of it exits a worker calls, is called, and notices the end of the other.
void outlive_child(ChildrenOptions options) {
  Children workers(
      2,
      [](int rank, Board& board) {
        await([&] { return board.n_ready == 2; });
        require(rpc_sync(1 - rank, number_here) == 1 - rank, "calls work before");
        if (rank == 0) fork_child_that_exits([] {});
        ++board.counters[0];
        await([&] { return board.counters[0] == 2; });
        require(rpc_sync(1 - rank, number_here, {}, {.timeout = 60s}) == 1 - rank, "calls work after");
        ++board.counters[1];
        if (rank == 1) wait_for_death();
        await([&] { return board.killed_at_ns != 0; });
        expect_gone([] { rpc_sync(1, sleep_here, {60'000}, {.timeout = 50s}); });
        shutdown();
      },
      std::move(options));
  workers.await(workers.board().counters[1], 2);
  workers.kill(1);
  workers.expect_end({1});
}

TEST(Processes, OutliveAForkedChildThatExits) {
  outlive_child({});
}
TEST(Processes, OutliveAForkedChildThatExitsOverTcp) {
  outlive_child({.tcp_only = true});
}

// What a child has of its parent's references is a copy: its end is none, and nothing may be said on the
// parent's connections, whose places in rings and whose records' numbers are the parent's.
void keep_reference(const ChildrenOptions& options) {
  Children workers(
      2,
      [](int rank, Board& board) {
        await([&] { return board.n_ready == 2; });
        if (rank == 0) {
          auto reference = remote(1, number_here);
          require(reference.to_here() == 1, "it is made");
          fork_child_that_exits([&] {
            const auto mine = std::move(reference);
            try {
              mine.to_here();
              require(false, "it is its parent's");
            } catch (const Error& error) {
              require(error.kind() == ErrorKind::kUsage &&
                          std::string(error.what()).find("fork") != std::string::npos,
                      error.what());
            }
          });
          for (int i = 0; i < 10; ++i) require(rpc_sync(1, number_here) == 1, "its parent goes on");
          require(reference.to_here() == 1, "it is its parent's still");
        }
        shutdown();
      },
      options);
  workers.expect_end();
}
TEST(Processes, KeepReferencesThatAForkedChildDropped) {
  keep_reference({});
}
TEST(Processes, KeepReferencesThatAForkedChildDroppedOverTcp) {
  keep_reference({.tcp_only = true});
}

TEST(Processes, HaveNoRpcInAForkedChild) {
  Children workers(2, [](int rank, Board& board) {
    await([&] { return board.n_ready == 2; });
    if (rank == 0) {
      fork_child_that_exits([] {
        require(!is_initialized(), "it is its parent's");
        try {
          rpc_sync(1, number_here);
          require(false, "it may not call in its parent's name");
        } catch (const Error& error) {
          require(error.kind() == ErrorKind::kUsage &&
                      std::string(error.what()).find("fork") != std::string::npos,
                  error.what());
        }
#ifndef __SANITIZE_THREAD__  // which lets no thread start after the fork of a process that has some
        start("alone", {.rank = 0, .world_size = 1, .store = std::make_shared<HashStore>()});
        require(rpc_sync(0, number_here) == 0, "it can have one of its own");
        shutdown();
#endif
      });
      require(rpc_sync(1, number_here) == 1, "its parent goes on");
    }
    shutdown();
  });
  workers.expect_end();
}

}  // namespace
}  // namespace lockstep::rpc
