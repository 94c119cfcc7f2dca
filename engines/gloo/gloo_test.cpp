// What is Gloo's own: which addresses it uses, and when it connects. What every engine does is in the
// contract suite. Ranks are forked processes; each sets its environment before it joins.
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

#include "lockstep/base/path_testing.h"
#include "lockstep/engine/loader.h"
#include "lockstep/engine/test_world.h"
#include "tests/netns.h"

namespace lockstep::comm {
namespace {

using testing::EngineRank;
using testing::FolderKv;
using testing::KvSpace;

const lockstep_engine& gloo_engine() {
  static const Engine engine = load_engine(path_testing::from_program(GLOO_PLUGIN));
  return engine.table();
}

using lockstep::testing::two_hosts;

// Runs body in a process per rank, each with its own copy of the test's state.
void on_processes(int size, const std::function<void(int rank, const lockstep_host*)>& body) {
  FolderKv kv;
  std::vector<pid_t> pids;
  std::fflush(nullptr);
  for (int r = 0; r < size; ++r) {
    pids.push_back(::fork());
    if (pids.back() != 0) continue;
    try {
      KvSpace space(kv, "gloo");
      body(r, space.host());
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << r << ": " << error.what();
    }
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  for (const pid_t pid : pids) {
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0) << "see the rank's own words above";
  }
}

// Local addresses of this process's IPv4 stream sockets, connected or listening.
std::multiset<std::string> local_addresses(bool connected) {
  std::multiset<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_in name{}, peer{};
    socklen_t length = sizeof name, peer_length = sizeof peer;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0 || name.sin_family != AF_INET)
      continue;
    if ((::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0) != connected) continue;
    char text[INET_ADDRSTRLEN] = "";
    found.insert(::inet_ntop(AF_INET, &name.sin_addr, text, sizeof text));
  }
  return found;
}

// Until another rank has set the key.
void await(const lockstep_host* host, const char* key) {
  std::size_t length = 0;
  const auto patience = Deadline::after(testing::kPatience).monotonic_ns();
  EXPECT_EQ(host->kv_get(host->context, key, nullptr, 0, &length, patience), LOCKSTEP_OK);
}

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

void expect_sums(EngineRank& rank) {
  for (const std::size_t count : {3u, 3000u, 300'000u, 5u}) {
    std::vector<float> x(count, static_cast<float>(rank.rank() + 1));
    ASSERT_EQ(rank.all_reduce(x), LOCKSTEP_OK) << rank.error();
    const int n = rank.size();
    EXPECT_EQ(x, std::vector<float>(count, static_cast<float>(n * (n + 1) / 2)));
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

TEST(Gloo, LazyInitConnectsAtTheFirstOperation) {
  on_processes(3, [](int rank, const lockstep_host* host) {
    ::setenv("TORCH_GLOO_LAZY_INIT", "1", 1);
    EngineRank end(gloo_engine(), host, rank, 3, {});
    EXPECT_TRUE(local_addresses(true).empty());
    // The first operation of one rank connects to the others: none starts before all have looked.
    const auto looked = [](int who) { return base::cat("looked", who); };
    EXPECT_EQ(host->kv_set(host->context, looked(rank).c_str(), "", 0), LOCKSTEP_OK);
    for (int other = 0; other < 3; ++other) await(host, looked(other).c_str());
    expect_sums(end);
    EXPECT_FALSE(local_addresses(true).empty());
    EXPECT_EQ(end.barrier(), LOCKSTEP_OK);
  });
}

TEST(Gloo, MessagesPostedBeforeALazyConnectionKeepTheirOrder) {
  on_processes(2, [](int rank, const lockstep_host* host) {
    ::setenv("TORCH_GLOO_LAZY_INIT", "1", 1);
    EngineRank end(gloo_engine(), host, rank, 2, {});
    std::vector<std::vector<float>> data(20, std::vector<float>(2000));
    std::vector<lockstep_handle*> handles;
    for (std::size_t i = 0; i < data.size(); ++i) {
      if (rank == 0) data[i].assign(2000, static_cast<float>(i));
      auto op =
          EngineRank::op(rank == 0 ? LOCKSTEP_SEND : LOCKSTEP_RECV, data[i].data(), data[i].data(), 2000);
      op.root = 1 - rank;
      handles.push_back(end.post(op));
    }
    for (auto* handle : handles) EXPECT_EQ(end.finish(handle), LOCKSTEP_OK) << end.error();
    for (std::size_t i = 0; i < data.size(); ++i) EXPECT_EQ(data[i].back(), static_cast<float>(i));
  });
}

lockstep_op to_self(lockstep_op_kind kind, std::vector<float>& data,
                    Milliseconds timeout = testing::kPatience) {
  auto op = EngineRank::op(kind, data.data(), data.data(), data.size(), LOCKSTEP_F32, timeout);
  op.root = 0;
  return op;
}

TEST(Gloo, HalfAMessageToOneselfEndsByItsDeadline) {
  testing::MapKv kv;
  const testing::KvSpace space(kv);
  for (const auto kind : {LOCKSTEP_SEND, LOCKSTEP_RECV}) {
    EngineRank end(gloo_engine(), space.host(), 0, 1, {});
    std::vector<float> data(100'000);
    EXPECT_EQ(end.run(to_self(kind, data, Milliseconds(50))), LOCKSTEP_TIMEOUT);
  }
}

TEST(Gloo, HalfAMessageToOneselfEndsWithTheGroup) {
  testing::MapKv kv;
  const testing::KvSpace space(kv);
  EngineRank end(gloo_engine(), space.host(), 0, 1, {});
  std::vector<float> data(100'000);
  lockstep_handle* const handle = end.post(to_self(LOCKSTEP_RECV, data));
  // It takes no thread that another operation would need.
  EXPECT_EQ(end.barrier(), LOCKSTEP_OK) << end.error();
  EXPECT_EQ(end.table().test(handle), LOCKSTEP_PENDING);
  end.table().comm_abort(end.comm(), "enough");
  EXPECT_EQ(end.finish(handle), LOCKSTEP_ABORTED);
}

// The first is long and the second short, so that two threads would be done in the other order.
TEST(Gloo, MessagesToOneselfCompleteInTheOrderPosted) {
  testing::MapKv kv;
  const testing::KvSpace space(kv);
  EngineRank end(gloo_engine(), space.host(), 0, 1, {});
  struct Ended {
    std::atomic<int> n{0};
    std::atomic<bool> second_first{false};
  } ended;
  std::vector<float> sent[2] = {std::vector<float>(8 << 20, 1.0f), std::vector<float>(1, 2.0f)};
  std::vector<float> got[2] = {std::vector<float>(sent[0].size()), std::vector<float>(1)};
  std::vector<lockstep_handle*> handles;
  for (int i = 0; i < 2; ++i) handles.push_back(end.post(to_self(LOCKSTEP_RECV, got[i])));
  for (int i = 0; i < 2; ++i) {
    auto op = to_self(LOCKSTEP_SEND, sent[i]);
    op.done_context = &ended;
    op.done = i == 0 ? [](void* context) { static_cast<Ended*>(context)->n = 1; } : [](void* context) {
      auto* mine = static_cast<Ended*>(context);
      if (mine->n == 0) mine->second_first = true;
    };
    handles.push_back(end.post(op));
  }
  for (auto* handle : handles) EXPECT_EQ(end.finish(handle), LOCKSTEP_OK) << end.error();
  EXPECT_FALSE(ended.second_first);
  EXPECT_EQ(got[0], sent[0]);
  EXPECT_EQ(got[1], sent[1]);
}

TEST(Gloo, ALazyConnectionWithoutAPeerEndsAtTheOperationsDeadline) {
  on_processes(2, [](int rank, const lockstep_host* host) {
    ::setenv("TORCH_GLOO_LAZY_INIT", "1", 1);
    EngineRank end(gloo_engine(), host, rank, 2, {});
    if (rank == 1) {  // stays away until rank 0 has given up
      await(host, "gave up");
      EXPECT_NE(end.run(EngineRank::op(LOCKSTEP_BARRIER, nullptr, nullptr, 0)), LOCKSTEP_OK);
      return;
    }
    const auto op = EngineRank::op(LOCKSTEP_BARRIER, nullptr, nullptr, 0, LOCKSTEP_U8, Milliseconds(50));
    EXPECT_EQ(end.run(op), LOCKSTEP_TIMEOUT);
    EXPECT_NE(end.error().find("rank 1"), std::string::npos) << end.error();
    EXPECT_EQ(host->kv_set(host->context, "gave up", "", 0), LOCKSTEP_OK);
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
