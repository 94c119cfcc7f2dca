// How ranks that are processes join (local/meeting_test.cpp has strangers and deaths): in pid namespaces of
// their own, with little address space; and how they notice that one of them became another program.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <thread>

#include "lockstep/base/fork_testing.h"
#include "lockstep/host/internal/arena.h"
#include "lockstep/host/internal/layout.h"
#include "lockstep/host/test_world.h"

namespace lockstep::comm {
namespace {

using fork_testing::Children;
using testing::CountingKv;
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
  EXPECT_EQ(base::describe_wait_status(ranks.status(1)), "killed by SIGKILL (9)");
}

TEST(HostJoin, ARankWithAnotherGroupSizeIsNamedByAll) {
  MapKv map;
  const KvSpace kv(map);
  std::vector<std::string> words(3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank rank(kv.host(), r, r == 1 ? 4 : 3, fork_testing::kPatience);
      } catch (const Error& error) {
        words[static_cast<std::size_t>(r)] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& said : words)
    EXPECT_NE(said.find("rank 1 joins a group of 4 ranks, but rank 0 one of 3"), std::string::npos) << said;
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

std::uint64_t address_space() {
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * internal::kPage;
}

void limit_address_space(std::uint64_t more) {
  const rlim_t limit = address_space() + more;
  const rlimit both{limit, limit};
  CHILD_EXPECT(::setrlimit(RLIMIT_AS, &both) == 0, errno);
}

TEST(HostJoin, RanksWithALimitOnTheirAddressSpaceStillMapEachOther) {
  FolderKv folder;
  const KvSpace kv(folder);
  Children ranks;
  for (int r = 0; r < 4; ++r) {
    ranks.start([&] {
      limit_address_space(std::uint64_t{4} << 30);
      Rank rank(kv.host(), r, 4);
      std::vector<float> x(100'000, 1.f);
      CHILD_EXPECT(rank.all_reduce(x) == LOCKSTEP_OK, rank.error());
      CHILD_EXPECT(x.back() == 4.f, x.back());
    });
  }
  for (int r = 0; r < ranks.size(); ++r) EXPECT_EQ(ranks.status(r), 0) << "rank " << r;
}

// Once rank 0 is known and this rank's own arena is made, there is room for one more, and a half.
class KvThatTakesRoom final : public Kv {
 public:
  explicit KvThatTakesRoom(Kv& inner) : inner_(inner), before_(address_space()) {}
  void set(const std::string& key, std::string value) override { inner_.set(key, std::move(value)); }
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    auto value = inner_.get(key, deadline);
    if (key == "host/0" && value) limit_address_space((address_space() - before_) * 3 / 2);
    return value;
  }

 private:
  Kv& inner_;
  const std::uint64_t before_;
};

// All have met; the others are about to join, and it lives on.
TEST(HostJoin, ARankThatFailsAfterAllHaveMetEndsTheWaitOfTheOthers) {
  FolderKv folder;
  Children ranks;
  for (int r = 0; r < 3; ++r) {
    ranks.start([&] {
      KvThatTakesRoom little(folder);
      const KvSpace kv(r == 1 ? static_cast<Kv&>(little) : folder);
      std::string words;
      try {
        Rank rank(kv.host(), r, 3, Milliseconds(10'000));
      } catch (const Error& error) {
        words = error.what();
      }
      if (r != 1) {
        CHILD_EXPECT(words == "rank 1 left while the group was forming", words);
        return folder.set(base::cat("over/", r), "");
      }
      CHILD_EXPECT(words != "" && words.find("forming") == words.npos, words);
      for (const char* key : {"over/0", "over/2"})
        CHILD_EXPECT(folder.get(key, Deadline::after(fork_testing::kPatience)).has_value(), key);
    });
  }
  for (int r = 0; r < ranks.size(); ++r) EXPECT_EQ(ranks.status(r), 0) << "rank " << r;
}

// A communicator of some ranks of the world, by name alone: the store must not be asked.
class Sub : public testing::EngineRank {
 public:
  Sub(Rank& world, const lockstep_host* host, const std::vector<std::int32_t>& members,
      const std::string& key, Milliseconds timeout = fork_testing::kPatience)
      : EngineRank(
            Rank::engine(), host, place_in(members, world.rank()), static_cast<int>(members.size()),
            {.timeout = timeout, .name = key, .parent = world.comm(), .parent_ranks = members, .key = key}) {}

 private:
  static int place_in(const std::vector<std::int32_t>& members, int rank) {
    return static_cast<int>(std::ranges::find(members, rank) - members.begin());
  }
};

std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(HostSplit, ACommunicatorOfSomeRanksNeedsNoStore) {
  MapKv map;
  CountingKv counting;
  const KvSpace world_space(map), sub_space(counting);
  std::vector<std::thread> threads;
  for (int r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      Rank world(world_space.host(), r, 4);
      for (int round = 0; round < 20; ++round) {
        Sub all(world, sub_space.host(), {0, 1, 2, 3}, base::cat("all", round));
        std::vector<float> x(round % 2 == 0 ? 3 : 30'000, 1.f);
        EXPECT_EQ(all.all_reduce(x), LOCKSTEP_OK) << all.error();
        EXPECT_EQ(x.back(), 4.f);
        if (r == 0) continue;
        Sub three(world, sub_space.host(), {3, 1, 2}, base::cat("three", round));
        EXPECT_EQ(three.all_reduce(x), LOCKSTEP_OK) << three.error();
        EXPECT_EQ(x.back(), 12.f);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(counting.n_calls, 0);
}

TEST(HostSplit, RanksThatNameDifferentMembersAllFail) {
  FolderKv folder;
  const KvSpace kv(folder);
  Children ranks;
  for (int r = 0; r < 3; ++r) {
    ranks.start([&] {
      Rank world(kv.host(), r, 3);
      const std::string words = failure_of([&] {
        Sub sub(world, kv.host(),
                r == 1 ? std::vector<std::int32_t>{0, 1} : std::vector<std::int32_t>{0, 1, 2}, "g");
      });
      CHILD_EXPECT(words.find("rank 0 makes group \"g\" with the ranks 0 1 2, but rank 1 with 0 1;") !=
                       std::string::npos,
                   words);
      CHILD_EXPECT(world.barrier() == LOCKSTEP_OK, "the parent is as well as before");
    });
  }
  for (int r = 0; r < ranks.size(); ++r) EXPECT_EQ(ranks.status(r), 0) << "rank " << r;
}

TEST(HostSplit, ARankThatDoesSomethingElseIsNamedWithItsCall) {
  MapKv map;
  const KvSpace kv(map);
  std::vector<std::string> words(3);
  std::atomic<int> n_heard{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      Rank world(kv.host(), r, 3);
      std::vector<float> x(5, 1.f);
      EXPECT_EQ(world.all_reduce(x), LOCKSTEP_OK) << world.error();
      // Rank 2 does not come; rank 0 is the one to find out, and tells rank 1.
      const Milliseconds patience = r == 0 ? Milliseconds(100) : fork_testing::kPatience;
      if (r != 2)
        words[static_cast<std::size_t>(r)] = failure_of([&] {
          Sub sub(world, kv.host(), {0, 1, 2}, "g", patience);
        });
      ++n_heard;
      EXPECT_TRUE(fork_testing::eventually([&] { return n_heard == 3; }));
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_NE(words[0].find("rank 2 (pid "), std::string::npos) << words[0];
  EXPECT_NE(words[0].find("last entered all_reduce(sum, f32, 5 elements)"), std::string::npos) << words[0];
  EXPECT_EQ(words[1], words[0]);
}

TEST(HostSplit, AMemberThatIsKilledEndsTheWaitOfTheOthers) {
  FolderKv folder;
  for (const int victim : {0, 2}) {
    const fork_testing::Shared<std::atomic<int>> n_heard;
    Children ranks;
    for (int r = 0; r < 3; ++r) {
      ranks.start([&] {
        const KvSpace space(folder, base::cat("victim", victim));
        Rank world(space.host(), r, 3);
        CHILD_EXPECT(world.barrier() == LOCKSTEP_OK, world.error());
        if (r == victim) ::raise(SIGKILL);
        const std::string words = failure_of([&] { Sub sub(world, space.host(), {0, 1, 2}, "g"); });
        CHILD_EXPECT(words.find(base::cat("rank ", victim, " (pid ")) != std::string::npos, words);
        CHILD_EXPECT(words.find("cannot join group \"g\"") != std::string::npos, words);
        // A rank that leaves before the other has noticed the loss is what the other reports.
        ++*n_heard;
        CHILD_EXPECT(fork_testing::eventually([&] { return *n_heard == 2; }),
                     "the other survivor did not hear");
      });
    }
    for (int r = 0; r < ranks.size(); ++r)
      EXPECT_EQ(base::describe_wait_status(ranks.status(r)),
                r == victim ? "killed by SIGKILL (9)" : "exited with code 0");
  }
}

TEST(HostSplit, AMemberThatHasLeftTheParentIsNotWaitedFor) {
  MapKv map;
  const KvSpace kv(map);
  std::string words;
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      Rank world(kv.host(), r, 2);
      if (r == 1) return;
      words = failure_of([&] { Sub sub(world, kv.host(), {0, 1}, "g"); });
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_NE(words.find("rank 1 "), std::string::npos) << words;
  EXPECT_NE(words.find("left the group that this one is built on"), std::string::npos) << words;
}

}  // namespace
}  // namespace lockstep::comm
