// RPC groups that workers join and leave while they run, workers as threads over a store.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <thread>

#include "lockstep/base/detail/process.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/rpc_ranks_testing.h"
#include "lockstep/rpc/rpc_testing.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using testing::as_ranks;
using testing::caught;
using testing::name_of;
using testing::says;
using testing::until;

int doubled(int a) {
  return 2 * a;
}
LOCKSTEP_RPC_FUNCTION(doubled);

TEST(Rpc, DynamicGroupsGrowAndShrink) {
  std::atomic<int> stage{0};
  const auto reach = [&](int n) {
    ++stage;
    while (stage < n) std::this_thread::sleep_for(1ms);
  };
  as_ranks(3, [&](int rank, const auto& store) {
    const auto join = [&] {
      start(name_of(rank), {.membership = Membership::kDynamic, .store = store, .init_timeout = 60s});
    };
    if (rank != 2) join();
    reach(3);
    if (rank != 2) {
      EXPECT_EQ(get_worker_infos().size(), 2u);
    }
    reach(6);
    if (rank == 2) join();
    reach(9);
    EXPECT_EQ(get_worker_infos().size(), 3u);
    for (int to = 0; to < 3; ++to) EXPECT_EQ(rpc_sync(name_of(to), doubled, {to}), 2 * to);
    reach(12);
    if (rank == 0) shutdown();
    reach(15);
    if (rank != 0) {
      EXPECT_EQ(get_worker_infos().size(), 2u);
      EXPECT_EQ(caught([] { rpc_sync("worker0", doubled, {1}); }).kind, ErrorKind::kPeerLost);
    }
    reach(18);
    if (rank == 0) {
      join();
      EXPECT_EQ(rpc_sync("worker1", doubled, {3}), 6) << "back under another number";
      EXPECT_GE(get_worker_info().id, 3);
    }
    reach(21);
    shutdown();
  });
}

// References that outlive what they refer to.
RRef<int>& kept() {
  static RRef<int> reference;
  return reference;
}
void keep(const RRef<int>& reference) {
  kept() = reference;
}
LOCKSTEP_RPC_FUNCTION(keep);

TEST(Rpc, AStrictWorkerDoesNotLeaveSilentlyWhatOthersReferTo) {
  for (const bool strict : {true, false}) {
    std::atomic<bool> there{false}, over{false};
    as_ranks(2, [&](int rank, const auto& store) {
      if (rank == 1) testing::until([&] { return there.load(); });
      start(name_of(rank), {.membership = Membership::kDynamic,
                            .store = store,
                            .init_timeout = 60s,
                            .strict_rref_check = strict});
      if (rank == 0) {
        there = true;
        testing::until([] { return get_worker_infos().size() == 2; });
        rpc_sync("worker1", keep, {RRef<int>(7)});
        if (strict) {
          EXPECT_TRUE(says(caught([] { shutdown(); }), "refer"));
        } else {
          EXPECT_NO_THROW(shutdown());
        }
        EXPECT_FALSE(is_initialized()) << "left all the same";
        over = true;
      } else {
        testing::until([&] { return over.load(); });
        kept() = {};
        shutdown();
      }
    });
  }
}

TEST(Rpc, DynamicGroupsMeetByUrl) {
  const auto file = std::filesystem::temp_directory_path() / ("lockstep-rpc-" + base::random_hex(8));
  const auto port = TcpStore::open("127.0.0.1", {.port = 0, .is_master = true})->port();
  for (const auto& url : {"file://" + file.string(), "tcp://127.0.0.1:" + std::to_string(port)}) {
    std::atomic<int> n_left{2};
    as_ranks(3, [&](int rank, const auto&) {
      RpcOptions options{.init_method = url, .membership = Membership::kDynamic, .init_timeout = 60s};
      if (rank == 0) options.rank = 0;
      start(name_of(rank), options);
      EXPECT_EQ(get_worker_info().id == 0, rank == 0);
      testing::until([] { return get_worker_infos().size() == 3; });
      for (int to = 0; to < 3; ++to) EXPECT_EQ(rpc_sync(name_of(to), doubled, {to}), 2 * to);
      barrier({"worker0", "worker1", "worker2"});
      if (rank == 0) testing::until([&] { return n_left == 0; });
      shutdown();
      --n_left;
    });
  }
  std::filesystem::remove(file);
}

TEST(Rpc, ANameThatIsTakenInADynamicGroupIsRefused) {
  std::atomic<bool> there{false}, tried{false};
  as_ranks(2, [&](int rank, const auto& store) {
    const RpcOptions options{.membership = Membership::kDynamic, .store = store, .init_timeout = 60s};
    if (rank == 0) {
      start("same", options);
      there = true;
      while (!tried) std::this_thread::sleep_for(1ms);
      EXPECT_EQ(get_worker_infos().size(), 1u);
      shutdown();
    } else {
      while (!there) std::this_thread::sleep_for(1ms);
      EXPECT_TRUE(says(caught([&] { start("same", options); }), "is taken"));
      tried = true;
    }
  });
}

TEST(Rpc, NumbersInADynamicGroupAreAskedForOrGiven) {
  std::atomic<int> n_there{0}, n_called{0};
  as_ranks(3, [&](int rank, const auto& store) {
    until([&] { return n_there == rank; });
    start(name_of(rank), {.membership = Membership::kDynamic,
                          .rank = rank == 0 ? std::optional<int>(0) : std::nullopt,
                          .store = store,
                          .init_timeout = 60s});
    EXPECT_EQ(get_worker_info().id, rank) << "0 is asked for, the next ones are free";
    ++n_there;
    until([&] { return n_there == 3; });
    EXPECT_EQ(rpc_sync("worker0", doubled, {rank}), 2 * rank);
    ++n_called;
    if (rank == 0) until([&] { return n_called == 3; });  // a member of a dynamic group may leave at any time
    shutdown();
  });
}

}  // namespace
}  // namespace lockstep::rpc
