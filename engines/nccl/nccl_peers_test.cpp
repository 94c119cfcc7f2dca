// Ranks on different hosts, beside NCCL: what they tell each other goes through the store. Each rank is a process in a network
// namespace of its own, which is what makes another host.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>

#include <functional>

#include "engines/nccl/peers.h"
#include "lockstep/base/detail/process.h"
#include "lockstep/base/fork_testing.h"
#include "lockstep/engine/test_world.h"

namespace lockstep::nccl_plugin {
namespace {

using fork_testing::eventually;

// False where this user may not make namespaces.
bool on_two_hosts(comm::testing::Kv& kv, const std::function<void(Peers&)>& body) {
  constexpr int kNoNamespace = 77;
  std::vector<pid_t> pids;
  for (int r = 0; r < 2; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      if (::unshare(CLONE_NEWNET) != 0) ::_exit(kNoNamespace);
      const comm::testing::KvSpace space(kv, "group");
      const lockstep_comm_config config{.struct_size = sizeof config,
                                        .host = space.host(),
                                        .rank = r,
                                        .size = 2,
                                        .name = "test",
                                        .deadline_ns = Deadline::after(Milliseconds(60'000)).monotonic_ns()};
      try {
        Peers peers(config);
        CHILD_EXPECT(!peers.is_local(1 - r) && peers.is_local(r), r);
        body(peers);
      } catch (const std::exception& error) {
        fork_testing::end_child(error.what());
      }
      ::_exit(0);
    }
    pids.push_back(pid);
  }
  bool possible = true;
  for (const pid_t pid : pids) {
    int status = -1;
    ::waitpid(pid, &status, 0);
    possible = possible && !(WIFEXITED(status) && WEXITSTATUS(status) == kNoNamespace);
    if (possible) {
      EXPECT_EQ(base::describe_wait_status(status), "exited with code 0");
    }
  }
  return possible;
}

#define ON_TWO_HOSTS(kv, ...) \
  if (!on_two_hosts(kv, __VA_ARGS__)) GTEST_SKIP() << "network namespaces need root"

TEST(NcclPeers, RecordsReachAnotherHostInOrder) {
  comm::testing::FolderKv kv;
  constexpr std::uint64_t kRecords = 100;  // more than have room at a time
  ON_TWO_HOSTS(kv, [](Peers& peers) {
    const int other = 1 - peers.rank();
    for (std::uint64_t i = 1; i <= kRecords; ++i)
      peers.send(other, {.kind = Record::kAnnounce, .tag = 5, .dtype = 7, .count = i * 10, .sequence = i});
    std::uint64_t n = 0;
    // Until the other one has all, too: it acknowledges what is flushed here.
    const std::string done = base::cat("done/", peers.rank());
    bool told = false;
    CHILD_EXPECT(eventually([&] {
                   peers.flush();
                   for (const Record& record : peers.receive(other)) {
                     ++n;
                     CHILD_EXPECT(record.sequence == n && record.count == n * 10 && record.tag == 5, n);
                   }
                   if (n == kRecords && !told) peers.store().set(done, "");
                   told = n == kRecords;
                   return told && peers.store().look(base::cat("done/", other));
                 }),
                 n);
  });
}

TEST(NcclPeers, AFailureIsToldToOtherHosts) {
  comm::testing::FolderKv kv;
  ON_TWO_HOSTS(kv, [](Peers& peers) {
    if (peers.rank() == 0) {
      peers.tell_broken({.kind = ErrorKind::kTimeout, .message = "ran out of time", .peer = {}});
      return peers.publish();
    }
    std::optional<Failure> news;
    CHILD_EXPECT(eventually([&] { return (news = peers.news(true)).has_value(); }), "no news");
    CHILD_EXPECT(news->kind == ErrorKind::kTimeout && news->message == "ran out of time" && !news->peer,
                 news->message);
  });
}

TEST(NcclPeers, ARankThatLeftIsNotLost) {
  comm::testing::FolderKv kv;
  ON_TWO_HOSTS(kv, [](Peers& peers) {
    if (peers.rank() == 0) {
      peers.tell_left(7);
      return peers.publish();
    }
    CHILD_EXPECT(eventually([&] {
                   CHILD_EXPECT(!peers.news(true), "it is no failure");
                   return peers.left(0).has_value();
                 }),
                 "not seen");
    CHILD_EXPECT(peers.left(0) == 7u, *peers.left(0));
  });
}

TEST(NcclPeers, WhatALauncherSaysOfARankIsItsLoss) {
  comm::testing::FolderKv kv;
  ON_TWO_HOSTS(kv, [](Peers& peers) {
    if (peers.rank() == 0) return peers.store().set("/lockstep/exit/0", "killed by SIGKILL (9)");
    std::optional<Failure> news;
    CHILD_EXPECT(eventually([&] { return (news = peers.news(true)).has_value(); }), "no news");
    CHILD_EXPECT(news->kind == ErrorKind::kPeerLost && news->peer && news->peer->rank == 0, news->message);
    CHILD_EXPECT(news->peer->cause == "killed by SIGKILL (9)", news->peer->cause);
  });
}

}  // namespace
}  // namespace lockstep::nccl_plugin
