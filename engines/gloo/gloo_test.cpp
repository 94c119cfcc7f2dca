// What is Gloo's own: which addresses it uses, and what is said of ranks that are lost or missing. What every
// engine does is in the contract suite.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <set>
#include <string_view>
#include <thread>

#include "engines/gloo/gloo_testing.h"
#include "lockstep/base/path_testing.h"
#include "lockstep/engine/loader.h"
#include "lockstep/engine/test_world.h"
#include "tests/netns.h"

namespace lockstep::comm {
namespace {

using namespace gloo_testing;

using lockstep::testing::two_hosts;

// Rank 1 ends without a word, once rank 0 is here.
void lose_rank_1(int rank, const lockstep_host* host) {
  if (rank == 0) {
    EXPECT_EQ(host->kv_set(host->context, "here", "", 0), LOCKSTEP_OK);
  } else {
    await(host, "here");
    ::_exit(0);
  }
}

std::string joining_outcome(int rank, int size, const lockstep_host* host) {
  try {
    EngineRank end(gloo_engine(), host, rank, size, {.timeout = Milliseconds(5000)});
    return "joined";
  } catch (const std::exception& error) {
    return error.what();
  }
}

TEST(Gloo, RefusesTransportsThisLibraryDoesNotHave) {
  on_processes(1, [](int, const lockstep_host* host) {
    ::setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS", 1);
    EXPECT_NE(joining_outcome(0, 1, host).find("GLOO_DEVICE_TRANSPORT"), std::string::npos);
    ::setenv("GLOO_DEVICE_TRANSPORT", "PIGEON", 1);
    EXPECT_NE(joining_outcome(0, 1, host).find("PIGEON"), std::string::npos);
    ::setenv("GLOO_DEVICE_TRANSPORT", "TCP", 1);
    EXPECT_EQ(joining_outcome(0, 1, host), "joined");
  });
}

TEST(Gloo, NamesAnInterfaceThatIsNotThere) {
  on_processes(1, [](int, const lockstep_host* host) {
    ::setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0", 1);
    EXPECT_NE(joining_outcome(0, 1, host).find("nowhere0"), std::string::npos);
  });
}

TEST(Gloo, StaysOnLoopbackWhenAllRanksShareAHost) {
  on_processes(2, [](int rank, const lockstep_host* host) {
    EngineRank end(gloo_engine(), host, rank, 2, {});
    expect_sums(end);
    for (const bool connected : {true, false}) {
      for (const auto& address : local_addresses(connected)) EXPECT_EQ(address, "127.0.0.1");
    }
    EXPECT_FALSE(local_addresses(true).empty());
    EXPECT_EQ(end.barrier(), LOCKSTEP_OK);
  });
}

TEST(Gloo, BindsToTheAddressTheRouteToTheMasterGoesFrom) {
  if (two_hosts() == nullptr) GTEST_SKIP() << "needs root and the ip tool";
  on_processes(3, [](int rank, const lockstep_host* host) {
    const int mine = rank == 0 ? 0 : 1;
    two_hosts()->enter(mine);
    ::setenv("MASTER_ADDR", two_hosts()->address(0).c_str(), 1);
    EngineRank end(gloo_engine(), host, rank, 3, {});
    expect_sums(end);
    EXPECT_FALSE(local_addresses(true).empty());
    for (const auto& address : local_addresses(true)) EXPECT_EQ(address, two_hosts()->address(mine));
    EXPECT_TRUE(local_addresses(false).empty()) << "nobody listens once all are connected";
    EXPECT_EQ(end.barrier(), LOCKSTEP_OK);
  });
}

TEST(Gloo, WithoutAMasterAndANameTheFirstInterfaceIsUsed) {
  if (two_hosts() == nullptr) GTEST_SKIP() << "needs root and the ip tool";
  on_processes(2, [](int rank, const lockstep_host* host) {
    two_hosts()->enter(rank);
    ::unsetenv("MASTER_ADDR");
    EngineRank end(gloo_engine(), host, rank, 2, {});
    expect_sums(end);
    for (const auto& address : local_addresses(true)) EXPECT_EQ(address, two_hosts()->address(rank));
    EXPECT_EQ(end.barrier(), LOCKSTEP_OK);
  });
}

TEST(Gloo, SeveralInterfacesTakeTurns) {
  if (two_hosts() == nullptr) GTEST_SKIP() << "needs root and the ip tool";
  on_processes(2, [](int rank, const lockstep_host* host) {
    two_hosts()->enter(0);
    ::setenv("GLOO_SOCKET_IFNAME", "eth0,lo", 1);
    EngineRank end(gloo_engine(), host, rank, 2, {});
    expect_sums(end);
    for (int tag = 0; tag < 4; ++tag) {
      std::vector<float> x(30'000, static_cast<float>(tag));
      auto op = EngineRank::op(rank == 0 ? LOCKSTEP_SEND : LOCKSTEP_RECV, x.data(), x.data(), x.size());
      op.root = 1 - rank;
      op.tag = tag;
      EXPECT_EQ(end.run(op), LOCKSTEP_OK) << end.error();
      EXPECT_EQ(x.back(), static_cast<float>(tag));
    }
    const auto addresses = local_addresses(true);
    EXPECT_EQ(std::set<std::string>(addresses.begin(), addresses.end()),
              (std::set<std::string>{"127.0.0.1", two_hosts()->address(0)}));
    EXPECT_EQ(end.barrier(), LOCKSTEP_OK);
  });
}

TEST(Gloo, RanksWithDifferentNumbersOfInterfacesFailWithTheReason) {
  if (two_hosts() == nullptr) GTEST_SKIP() << "needs root and the ip tool";
  on_processes(2, [](int rank, const lockstep_host* host) {
    two_hosts()->enter(0);
    ::setenv("GLOO_SOCKET_IFNAME", rank == 0 ? "lo" : "lo,eth0", 1);
    EXPECT_NE(joining_outcome(rank, 2, host).find("GLOO_SOCKET_IFNAME"), std::string::npos);
  });
}

// A process's rank in the job says nothing about its rank here: the key-value space knows.
TEST(Gloo, TheExitOfALostRankIsLookedUpUnderItsRankInTheGroup) {
  on_processes(2, [](int rank, const lockstep_host* host) {
    ::setenv("RANK", rank == 0 ? "1" : "0", 1);
    const auto publish = [&](const char* key, std::string_view words) {
      ASSERT_EQ(host->kv_set(host->context, key, words.data(), words.size()), LOCKSTEP_OK);
    };
    publish("/lockstep/exit/0", "the end of another");
    publish("/lockstep/exit/1", "walked out");
    EngineRank end(gloo_engine(), host, rank, 2, {});
    lose_rank_1(rank, host);
    EXPECT_EQ(end.barrier(), LOCKSTEP_PEER_LOST);
    EXPECT_EQ(end.failure().cause, "walked out") << end.failure().error;
  });
}

// A key-value space that records which thread asked how a rank ended.
struct WatchedSpace {
  explicit WatchedSpace(const lockstep_host* of) : base(of), host(*of) {
    host.context = this;
    host.kv_set = [](void* self, const char* key, const void* value, std::size_t length) {
      const auto* to = static_cast<WatchedSpace*>(self)->base;
      return to->kv_set(to->context, key, value, length);
    };
    host.kv_get = [](void* self, const char* key, void* value, std::size_t capacity, std::size_t* length,
                     std::int64_t deadline_ns) {
      auto* me = static_cast<WatchedSpace*>(self);
      if (std::string_view(key).starts_with("/lockstep/exit/"))
        ++(std::this_thread::get_id() == me->owner ? me->by_owner : me->by_others);
      return me->base->kv_get(me->base->context, key, value, capacity, length, deadline_ns);
    };
  }
  const lockstep_host* base;
  lockstep_host host;
  const std::thread::id owner = std::this_thread::get_id();
  std::atomic<int> by_owner{0}, by_others{0};
};

// post() does not wait until the launcher has published an exit.
TEST(Gloo, PostDoesNotLookForTheCauseOfALossItself) {
  on_processes(2, [](int rank, const lockstep_host* host) {
    WatchedSpace space(host);
    EngineRank end(gloo_engine(), &space.host, rank, 2, {});
    lose_rank_1(rank, host);
    float x = 1;
    auto op = EngineRank::op(LOCKSTEP_SEND, &x, nullptr, 1);
    op.root = 1;
    std::vector<lockstep_handle*> handles;
    while (end.failure().status == LOCKSTEP_OK) {
      handles.push_back(end.post(op));
      std::this_thread::sleep_for(Milliseconds(1));
    }
    EXPECT_EQ(end.failure().status, LOCKSTEP_PEER_LOST) << end.failure().error;
    EXPECT_EQ(end.finish(handles.back()), LOCKSTEP_PEER_LOST) << end.error();
    handles.pop_back();
    for (auto* handle : handles) end.finish(handle);
    EXPECT_EQ(space.by_owner, 0);
    EXPECT_GT(space.by_others, 0);
  });
}

TEST(Gloo, AConnectionThatTheSystemRefusesFailsTheOperationsThatWaitForIt) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to hide /proc";
  for (const auto kind : {LOCKSTEP_SEND, LOCKSTEP_BARRIER}) {
    on_processes(2, [kind](int rank, const lockstep_host* host) {
      ::setenv("TORCH_GLOO_LAZY_INIT", "1", 1);
      EngineRank end(gloo_engine(), host, rank, 2, {});
      float x = 1;
      auto op = EngineRank::op(rank == 1 && kind == LOCKSTEP_SEND ? LOCKSTEP_RECV : kind, &x, &x, 1);
      op.root = 1 - rank;
      if (rank == 1) {
        EXPECT_NE(end.run(op), LOCKSTEP_OK);
        return;
      }
      // Threads that start from here on see it too.
      if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
          ::mount("none", "/proc", "tmpfs", 0, nullptr) != 0) {
        std::printf("/proc cannot be hidden here\n");
        return;
      }
      EXPECT_EQ(end.post_and_wait(op), LOCKSTEP_RESOURCE) << end.error();
      EXPECT_NE(end.error().find("/proc/self/fd"), std::string::npos) << end.error();
      EXPECT_EQ(end.failure().status, LOCKSTEP_RESOURCE);
    });
  }
}

// By rank 0, and by one that waits for rank 0, which waits.
TEST(Gloo, AMissingRankIsNamedWhenJoiningRunsOutOfTime) {
  on_processes(2, [](int rank, const lockstep_host* host) {
    try {
      EngineRank end(gloo_engine(), host, rank, 3, {.timeout = Milliseconds(300)});
      ADD_FAILURE() << "joined without rank 2";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("rank 2 has not joined"), std::string::npos) << error.what();
    }
  });
}

// How the lines of waits that last begin, in the order in which they are caused.
const char* const kSlowLines[] = {
    "slow: rank 0 joins group \"test\": it waits for rank 1; waiting continues until ",
    "slow: group \"test\": rank 0 is in barrier() #1 at test.cpp:1: it waits for rank 1 (pid ",
    "slow: group \"test\": rank 0 is in barrier() #2 at test.cpp:1: it waits for rank 1 (pid ",
    "slow: group \"test\": rank 0 is in recv(f32, 1 elements) at test.cpp:1: it waits for rank 1 (pid "};

// A host that counts these lines, and notifies the other rank of each.
class Listening {
 public:
  explicit Listening(const lockstep_host* host) : host_(*host) {
    ::setenv("LOCKSTEP_SLOW_WAIT", "0.2", 1);
    here = this;
    host_.log = [](void*, int, const char* text) { here->keep(text); };
  }
  const lockstep_host* host() const { return &host_; }
  int n_said(std::size_t line) const { return n_said_[line]; }
  // On the other rank.
  void await(std::size_t line) {
    std::size_t length = 0;
    const auto patience = Deadline::after(Milliseconds(20'000)).monotonic_ns();
    EXPECT_EQ(host_.kv_get(host_.context, base::cat("said", line).c_str(), nullptr, 0, &length, patience),
              LOCKSTEP_OK)
        << "not said: " << kSlowLines[line];
  }

 private:
  void keep(std::string_view text) {
    for (std::size_t line = 0; line < std::size(kSlowLines); ++line) {
      if (!text.starts_with(kSlowLines[line])) continue;
      EXPECT_NE(text.find("; waiting continues until "), std::string_view::npos) << text;
      ++n_said_[line];
      host_.kv_set(host_.context, base::cat("said", line).c_str(), "", 0);
    }
  }
  static inline Listening* here = nullptr;

  lockstep_host host_;
  std::atomic<int> n_said_[std::size(kSlowLines)] = {};
};

// Rank 1 comes late to everything: when rank 0 has said that it waits.
TEST(Gloo, AWaitThatLastsSaysOnceWhoWaitsForWhomAndUntilWhen) {
  on_processes(2, [](int rank, const lockstep_host* host) {
    Listening listening(host);
    std::size_t line = 0;
    const auto be_late = [&] {
      if (rank == 1) listening.await(line);
      ++line;
    };
    be_late();
    EngineRank end(gloo_engine(), listening.host(), rank, 2, {});
    be_late();
    EXPECT_EQ(end.barrier(), LOCKSTEP_OK) << end.error();
    be_late();
    EXPECT_EQ(end.post_and_wait(end.op(LOCKSTEP_BARRIER, nullptr, nullptr, 0)), LOCKSTEP_OK) << end.error();
    be_late();
    float x = 3;
    auto op = end.op(rank == 0 ? LOCKSTEP_RECV : LOCKSTEP_SEND, &x, &x, 1);
    op.root = 1 - rank;
    EXPECT_EQ(end.run(op), LOCKSTEP_OK) << end.error();
    if (rank == 1) return;
    EXPECT_GE(listening.n_said(0), 1);  // joining waits for it more than once
    for (std::size_t i = 1; i < std::size(kSlowLines); ++i)
      EXPECT_EQ(listening.n_said(i), 1) << kSlowLines[i];
  });
}

TEST(Gloo, JoiningTakesAFewRequestsPerRankNotOnePerPair) {
  const auto requests_of = [](int size) {
    testing::CountingKv kv;
    KvSpace space(kv, "gloo");
    std::atomic<int> n_requests{0};
    // Ranks that leave one by one look into the store for each other: not what is counted here.
    std::barrier joined(size, [&]() noexcept { n_requests = kv.n_calls - kv.n_in_vain; });
    std::vector<std::thread> ranks;
    for (int r = 0; r < size; ++r) {
      ranks.emplace_back([&, r] {
        EngineRank end(gloo_engine(), space.host(), r, size, {});
        EXPECT_EQ(end.barrier(), LOCKSTEP_OK) << end.error();
        joined.arrive_and_wait();
      });
    }
    for (auto& rank : ranks) rank.join();
    return n_requests.load();
  };
  EXPECT_LE(requests_of(4), 4 * 8);
  EXPECT_LE(requests_of(12), 12 * 8);
}

}  // namespace
}  // namespace lockstep::comm
