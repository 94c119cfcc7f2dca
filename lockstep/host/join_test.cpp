// How ranks that are processes meet: in pid namespaces of their own, beside strangers, with little address space; and
// how they notice that one of them became another program.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "lockstep/base/fork_testing.h"
#include "lockstep/host/internal/arena.h"
#include "lockstep/host/internal/layout.h"
#include "lockstep/host/test_world.h"
#include "lockstep/net/unix_socket.h"

namespace lockstep::comm {
namespace {

using fork_testing::Children;
using testing::FolderKv;
using testing::Kv;
using testing::KvSpace;
using testing::MapKv;
using testing::Rank;

constexpr int kNotAllowed = 42;

// As process 1 of a pid namespace of its own; ends the calling process with the same code as `body`.
void in_own_pid_namespace(const std::function<void()>& body) {
  if (::unshare(CLONE_NEWPID) != 0) ::_exit(kNotAllowed);
  Children inner;
  inner.start(body);
  const int status = inner.status(0);
  ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}

// Both are process 1 of their namespace: a pid that a rank tells about itself names the other's own process.
void sum_across_pid_namespaces() {
  FolderKv folder;
  const KvSpace kv(folder);
  Children ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.start([&] {
      in_own_pid_namespace([&] {
        Rank rank(kv.host(), r, 2);
        std::vector<float> x(200'000, static_cast<float>(rank.rank() + 1));
        CHILD_EXPECT(rank.all_reduce(x) == LOCKSTEP_OK, rank.error());
        for (const float value : x) CHILD_EXPECT(value == 3.f, value);
        CHILD_EXPECT(rank.barrier() == LOCKSTEP_OK, rank.error());
      });
    });
  }
  const std::vector<int> statuses{ranks.status(0), ranks.status(1)};
  if (WIFEXITED(statuses[0]) && WEXITSTATUS(statuses[0]) == kNotAllowed)
    GTEST_SKIP() << "pid namespaces are not allowed here";
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST(HostJoin, RanksInDifferentPidNamespacesSumRight) {
  sum_across_pid_namespaces();
}

// What was random before the fork is the same in both, and so is their pid.
TEST(HostJoin, RanksForkedAfterTheEngineWasUsedAreNotTakenForOneProcess) {
  Children parent;
  parent.start([] {
    {
      MapKv map;
      const KvSpace kv(map);
      Rank alone(kv.host(), 0, 1);
    }
    sum_across_pid_namespaces();
    ::_exit(::testing::Test::HasFailure() ? 1 : ::testing::Test::IsSkipped() ? kNotAllowed : 0);
  });
  const int status = parent.status(0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotAllowed)
    GTEST_SKIP() << "pid namespaces are not allowed here";
  EXPECT_EQ(status, 0);
}

// What a rank publishes of itself, by somebody else.
void publish_forged_card(Kv& kv, int rank, const std::string& socket) {
  ByteWriter card;
  card.put(internal::kLayoutVersion)
      .put(std::int64_t{1})
      .sized(host_identity())
      .sized("a stranger")
      .sized(socket);
  card.sized(random_hex(16));
  const Bytes bytes = card.take();
  kv.set(cat("host/", rank), to_text(bytes));
}

TEST(HostJoin, AnArenaIsNotSentToAProcessOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root to become another user";
  FolderKv folder;
  const KvSpace kv(folder);
  const std::string name = "lockstep-test-" + random_hex(8);
  Children children;
  children.start([&] {
    CHILD_EXPECT(::setresuid(65534, 65534, 65534) == 0, errno);
    auto listener = net::UnixListener::listen(name);
    auto socket = listener.accept(Deadline::after(fork_testing::kPatience));
    std::uint8_t message[1024];
    std::vector<Fd> fds;
    try {
      socket.receive(message, Deadline::after(fork_testing::kPatience), &fds);
    } catch (const Error& error) {
      CHILD_EXPECT(error.kind() == ErrorKind::kPeerLost, error.what());
    }
    CHILD_EXPECT(fds.empty(), "a stranger got the arena");
  });
  publish_forged_card(folder, 0, name);
  children.start([&] {
    try {
      Rank rank(kv.host(), 1, 2);
      CHILD_EXPECT(false, "joined a stranger");
    } catch (const Error& error) {
      CHILD_EXPECT(std::string(error.what()).find("not of this job") != std::string::npos, error.what());
    }
  });
  EXPECT_EQ(children.status(0), 0);
  EXPECT_EQ(children.status(1), 0);
}

TEST(HostJoin, ARankThatBecomesAnotherProgramIsLost) {
  FolderKv folder;
  const KvSpace kv(folder);
  Children ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.start([&] {
      Rank rank(kv.host(), r, 2);
      CHILD_EXPECT(rank.barrier() == LOCKSTEP_OK, rank.error());
      if (r == 1) ::execl("/bin/sleep", "sleep", "100", nullptr);
      CHILD_EXPECT(rank.barrier() == LOCKSTEP_PEER_LOST, rank.error());
      const auto loss = rank.failure();
      CHILD_EXPECT(loss.rank == 1 && loss.cause.find("another program") != std::string::npos, loss.error);
    });
  }
  EXPECT_EQ(ranks.status(0), 0);
  ranks.kill(1);
  EXPECT_EQ(describe_wait_status(ranks.status(1)), "killed by SIGKILL (9)");
}

// Gives everything but one key, for a rank that fails half-way.
class KvWithout final : public Kv {
 public:
  KvWithout(Kv& inner, std::string missing) : inner_(inner), missing_(std::move(missing)) {}
  void set(const std::string& key, std::string value) override { inner_.set(key, std::move(value)); }
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    if (key != missing_) return inner_.get(key, deadline);
    std::this_thread::sleep_for(
        Milliseconds(100));  // the others have seen this rank by then, and count on it
    return std::nullopt;
  }

 private:
  Kv& inner_;
  const std::string missing_;
};

TEST(HostJoin, ARankThreadThatFailsToJoinIsNamedByTheOthers) {
  MapKv map;
  KvWithout part(map, "host/2");
  const KvSpace whole_space(map), part_space(part);
  std::vector<std::string> words(3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank rank((r == 1 ? part_space : whole_space).host(), r, 3, fork_testing::kPatience);
      } catch (const Error& error) {
        words[static_cast<std::size_t>(r)] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_NE(words[1].find("rank 2 did not join"), std::string::npos) << words[1];
  for (const int r : {0, 2}) {
    EXPECT_NE(words[static_cast<std::size_t>(r)].find("rank 1 "), std::string::npos)
        << words[static_cast<std::size_t>(r)];
    EXPECT_NE(words[static_cast<std::size_t>(r)].find("while the group was forming"), std::string::npos);
  }
}

TEST(HostJoin, TheArenasOfAllRanksFitIntoTheAddressSpace) {
  constexpr std::uint64_t kGiB = 1ull << 30, kTiB = 1ull << 40;
  for (const int n_ranks : {1, 2, 64, 128, 256}) {
    for (const std::uint64_t memory : {8 * kGiB, 2 * kTiB, 32 * kTiB}) {
      const auto bytes = internal::default_arena_bytes(memory, internal::kNoLimit, n_ranks);
      EXPECT_LE(bytes * static_cast<std::uint64_t>(n_ranks), 16 * kTiB) << n_ranks << " of " << memory;
      EXPECT_GE(bytes, std::min(memory, 16 * kTiB / static_cast<std::uint64_t>(n_ranks)));
    }
  }
  EXPECT_LE(internal::default_arena_bytes(2 * kTiB, 64 * kGiB, 4), 8 * kGiB);
}

TEST(HostJoin, RanksWithALimitOnTheirAddressSpaceStillMapEachOther) {
  FolderKv folder;
  const KvSpace kv(folder);
  Children ranks;
  for (int r = 0; r < 4; ++r) {
    ranks.start([&] {
      std::uint64_t pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      const rlim_t limit = pages * internal::kPage + (rlim_t{4} << 30);
      const rlimit both{limit, limit};
      CHILD_EXPECT(::setrlimit(RLIMIT_AS, &both) == 0, errno);
      Rank rank(kv.host(), r, 4);
      std::vector<float> x(100'000, 1.f);
      CHILD_EXPECT(rank.all_reduce(x) == LOCKSTEP_OK, rank.error());
      CHILD_EXPECT(x.back() == 4.f, x.back());
    });
  }
  for (int r = 0; r < ranks.size(); ++r) EXPECT_EQ(ranks.status(r), 0) << "rank " << r;
}

}  // namespace
}  // namespace lockstep::comm
