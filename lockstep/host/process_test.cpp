// The engine between real processes: staged and in-place paths, and what survivors see when a rank is killed.
// Ranks are forked from a single-threaded test and report by exit code.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/prctl.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>

#include "lockstep/base/fork_testing.h"
#include "lockstep/base/long_testing.h"
#include "lockstep/host/test_world.h"

namespace lockstep::comm {
namespace {

using fork_testing::Children;
using fork_testing::Shared;
using testing::FolderKv;
using testing::KvSpace;
using testing::Rank;

// Words the children share with the test.
struct Board {
  std::atomic<std::uint64_t> rounds[16];
};

Children start(int size, const KvSpace& kv, const std::function<void(Rank&)>& body) {
  Children ranks;
  for (int r = 0; r < size; ++r) {
    ranks.start([&] {
      Rank rank(kv.host(), r, size);
      body(rank);
    });
  }
  return ranks;
}

TEST(HostProcesses, EveryCollectiveByEveryPath) {
  for (const int size : long_testing::kUnderTsan ? std::vector{3} : std::vector{2, 3, 4}) {
    FolderKv folder;
    const KvSpace kv(folder);
    auto ranks = start(size, kv, [](Rank& rank) {
      const auto n = static_cast<std::size_t>(rank.size()), me = static_cast<std::size_t>(rank.rank());
      for (const std::size_t count : {1u, 13u, 500u, 2048u, 2049u, 50'000u, 700'001u}) {
        if (long_testing::kUnderTsan && count > 100'000) continue;
        void* shared = nullptr;
        CHILD_EXPECT(Rank::engine().alloc(rank.comm(), count * 4, &shared) == LOCKSTEP_OK, "alloc");
        std::vector<std::int32_t> own(count), all(count * n), out(count);
        for (std::int32_t* x : {own.data(), static_cast<std::int32_t*>(shared)}) {
          for (std::size_t i = 0; i < count; ++i) x[i] = static_cast<std::int32_t>(i * 10 + me);
          CHILD_EXPECT(
              rank.run(Rank::op(LOCKSTEP_ALL_GATHER, x, all.data(), count, LOCKSTEP_I32)) == LOCKSTEP_OK,
              rank.error());
          for (std::size_t k = 0; k < count * n; ++k) {
            CHILD_EXPECT(all[k] == static_cast<std::int32_t>(k % count * 10 + k / count),
                         base::cat("all_gather ", k, " of ", count));
          }
          CHILD_EXPECT(rank.run(Rank::op(LOCKSTEP_REDUCE_SCATTER, all.data(), out.data(), count,
                                         LOCKSTEP_I32)) == LOCKSTEP_OK,
                       rank.error());
          for (std::size_t i = 0; i < count; ++i) {
            CHILD_EXPECT(out[i] == static_cast<std::int32_t>((i * 10 + me) * n),
                         base::cat("reduce_scatter ", i, " of ", count));
          }
          CHILD_EXPECT(rank.run(Rank::op(LOCKSTEP_ALL_REDUCE, x, x, count, LOCKSTEP_I32)) == LOCKSTEP_OK,
                       rank.error());
          for (std::size_t i = 0; i < count; ++i) {
            CHILD_EXPECT(x[i] == static_cast<std::int32_t>(i * 10 * n + n * (n - 1) / 2),
                         base::cat("all_reduce ", i, " of ", count));
          }
          x[0] = static_cast<std::int32_t>(me);
          auto op = Rank::op(LOCKSTEP_BROADCAST, x, x, count, LOCKSTEP_I32);
          op.root = rank.size() - 1;
          CHILD_EXPECT(rank.run(op) == LOCKSTEP_OK, rank.error());
          CHILD_EXPECT(x[0] == rank.size() - 1, "broadcast");
        }
        Rank::engine().free(rank.comm(), shared);
      }
    });
    for (int r = 0; r < size; ++r) EXPECT_EQ(ranks.status(r), 0) << size << " processes";
  }
}

// A rank whose buffer is in the arena meets one whose buffer is not: all take the staged way, with the same
// result.
TEST(HostProcesses, MixedPlacesOfMemoryAgreeOnOnePath) {
  FolderKv folder;
  const KvSpace kv(folder);
  auto ranks = start(3, kv, [](Rank& rank) {
    for (const std::size_t count : {10u, 500u, 300'000u}) {
      std::vector<float> plain(count);
      void* shared = nullptr;
      CHILD_EXPECT(Rank::engine().alloc(rank.comm(), count * 4, &shared) == LOCKSTEP_OK, "alloc");
      float* x = rank.rank() == 1 ? plain.data() : static_cast<float*>(shared);
      std::fill(x, x + count, static_cast<float>(rank.rank() + 1));
      CHILD_EXPECT(rank.run(Rank::op(LOCKSTEP_ALL_REDUCE, x, x, count)) == LOCKSTEP_OK, rank.error());
      CHILD_EXPECT(x[0] == 6.f && x[count - 1] == 6.f, x[0]);
    }
  });
  for (int r = 0; r < ranks.size(); ++r) EXPECT_EQ(ranks.status(r), 0);
}

// What this process holds of memory that others can share, open or mapped.
std::size_t shared_memory_held() {
  std::size_t n = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) n += line.find("memfd") != std::string::npos;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    n += std::filesystem::read_symlink(entry, ignored).string().find("memfd") != std::string::npos;
  }
  return n;
}

// A key-value space where nobody writes how a rank ended, and that counts who asks.
struct Untold {
  explicit Untold(const lockstep_host* of) : base(of), host(*of) {
    host.context = this;
    host.kv_set = [](void* self, const char* key, const void* value, std::size_t length) {
      const auto* to = static_cast<Untold*>(self)->base;
      return to->kv_set(to->context, key, value, length);
    };
    host.kv_get = [](void* self, const char* key, void* value, std::size_t capacity, std::size_t* length,
                     std::int64_t deadline_ns) {
      auto* me = static_cast<Untold*>(self);
      if (std::string_view(key).starts_with("/lockstep/exit/")) return ++me->n_asked, LOCKSTEP_UNSUPPORTED;
      return me->base->kv_get(me->base->context, key, value, capacity, length, deadline_ns);
    };
  }
  const lockstep_host* base;
  lockstep_host host;
  std::atomic<int> n_asked{0};
};

TEST(HostProcesses, WithoutAPublishedExitCauseTheLossIsReportedImmediately) {
  FolderKv folder;
  const KvSpace kv(folder);
  Children ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.start([&, r] {
      Untold untold(kv.host());
      Rank rank(&untold.host, r, 2);
      if (r == 1) ::raise(SIGKILL);
      CHILD_EXPECT(rank.barrier() == LOCKSTEP_PEER_LOST, rank.failure().error);
      CHILD_EXPECT(untold.n_asked <= 1, untold.n_asked);
    });
  }
  EXPECT_EQ(ranks.status(0), 0);  // before rank 1 is reaped: the kernel cannot tell either
}

// Jobs of three ranks in an all_reduce loop; in each, one rank in turn is killed at a moment chosen at
// random.
TEST(HostProcesses, AKilledRankIsNamedByEverySurvivorAndLeavesNothingBehind) {
  std::mt19937 random(5);
  const Shared<Board> board;
  const std::size_t held_before = shared_memory_held();
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1),
            0);  // whatever a rank may leave running becomes a child of this process
  constexpr int kSize = 3;
  constexpr int kRounds = long_testing::kUnderTsan ? 12 : 50;
  for (int round = 0; round < kRounds; ++round) {
    const int victim = round % kSize;
    const std::size_t count = round % 2 == 0 ? 100 : 200'000;
    const bool posts = round % 4 >= 2;
    for (auto& rounds : board->rounds) rounds = 0;
    FolderKv folder;
    const KvSpace kv(folder);
    auto ranks = start(kSize, kv, [&](Rank& rank) {
      std::vector<float> x(count, 1.f);
      const auto op = Rank::op(LOCKSTEP_ALL_REDUCE, x.data(), x.data(), count);
      lockstep_status status = LOCKSTEP_OK;
      while (status == LOCKSTEP_OK) {
        if (posts) {
          lockstep_handle* handle = nullptr;
          CHILD_EXPECT(Rank::engine().post(rank.comm(), &op, &handle) == LOCKSTEP_OK, "post");
          status = Rank::engine().wait(handle, LOCKSTEP_NEVER);
          Rank::engine().release(handle);
        } else {
          status = rank.run(op);
        }
        board->rounds[rank.rank()].fetch_add(1);
      }
      CHILD_EXPECT(status == LOCKSTEP_PEER_LOST, base::cat("status ", status, " ", rank.failure().error));
      const auto loss = rank.failure();
      CHILD_EXPECT(loss.rank == victim, base::cat("named rank ", loss.rank, ": ", loss.error));
      CHILD_EXPECT(loss.cause == "killed by SIGKILL (9)" || loss.cause == "gone, cause unknown", loss.cause);
      CHILD_EXPECT(rank.barrier() == LOCKSTEP_PEER_LOST, "later operations say the same");
    });
    const std::uint64_t moment = 1 + random() % 200;
    const Deadline patience = Deadline::after(Milliseconds(30'000));
    while (board->rounds[victim] < moment && !patience.expired()) ::usleep(50);
    ranks.kill(victim);
    for (int turn = 0; turn < kSize; ++turn) {
      // The victim first: a kernel that tells its cause does so once it is reaped.
      const int r = (victim + turn) % kSize;
      EXPECT_EQ(base::describe_wait_status(ranks.status(r)),
                r == victim ? "killed by SIGKILL (9)" : "exited with code 0")
          << "rank " << r << " in round " << round;
    }
    if (HasFailure()) break;
  }
  // An arena has no name: it is gone with the last process that holds it.
  EXPECT_EQ(shared_memory_held(), held_before);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a process is left";
}

TEST(HostProcesses, TheFirstCauseWinsWhenRanksFallInTurn) {
  FolderKv folder;
  const KvSpace kv(folder);
  auto ranks = start(4, kv, [](Rank& rank) {
    CHILD_EXPECT(rank.barrier() == LOCKSTEP_OK, rank.error());
    if (rank.rank() == 2) ::_exit(7);
    CHILD_EXPECT(rank.barrier() == LOCKSTEP_PEER_LOST, rank.error());
    CHILD_EXPECT(rank.failure().rank == 2, rank.failure().error);
    // Survivors end one after the other without leaving in order; the later ones must still name rank 2.
    ::usleep(static_cast<useconds_t>(rank.rank()) * 20'000);
    CHILD_EXPECT(rank.barrier() == LOCKSTEP_PEER_LOST, rank.error());
    CHILD_EXPECT(rank.failure().rank == 2, rank.failure().error);
    ::_exit(0);
  });
  for (int r = 0; r < ranks.size(); ++r)
    EXPECT_EQ(base::describe_wait_status(ranks.status(r)), base::cat("exited with code ", r == 2 ? 7 : 0));
}

TEST(HostProcesses, ARankInAnotherNetworkNamespaceIsRefusedByName) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs to be root to make a network namespace";
  FolderKv folder;
  const KvSpace kv(folder);
  Children ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.start([&] {
      if (r == 1 && ::unshare(CLONE_NEWNET) != 0) ::_exit(42);
      try {
        Rank rank(kv.host(), r, 2);
        CHILD_EXPECT(false, "ranks in different network namespaces joined");
      } catch (const Error& error) {
        CHILD_EXPECT(std::string(error.what()).find(base::cat("rank ", 1 - r, " runs on another host")) !=
                         std::string::npos,
                     error.what());
      }
    });
  }
  const std::vector<int> statuses{ranks.status(0), ranks.status(1)};
  if (WIFEXITED(statuses[1]) && WEXITSTATUS(statuses[1]) == 42)
    GTEST_SKIP() << "network namespaces are not allowed here";
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace lockstep::comm
