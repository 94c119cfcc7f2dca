// What is NCCL's alone: when communicators are made and with which settings, streams, groups, graphs, and how it fails. What
// every engine must do is the contract's (nccl_contract_test.cpp).
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

#include "engines/nccl/nccl_api.h"
#include "engines/nccl/nccl_testing.h"
#include "lockstep/base/fork_testing.h"
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/fake_nccl/fake_nccl.h"

namespace lockstep::nccl_plugin {
namespace {

using fork_testing::eventually;
using Floats = std::vector<float>;

// ---- making communicators

TEST(Nccl, ConnectsWithTheFirstOperation) {
  const auto before = fake_nccl_calls("ncclCommInitRankConfig");
  std::atomic<int> created{0};
  on_ranks(2, [&](NcclRank& rank) {
    ++created;
    while (created < 2) std::this_thread::yield();
    EXPECT_EQ(fake_nccl_calls("ncclCommInitRankConfig"), before);
    ++created;
    while (created < 4) std::this_thread::yield();
    const auto x = rank.floats({1, 2});
    ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    EXPECT_EQ(x.get(), (Floats{2, 4}));
  });
  EXPECT_EQ(fake_nccl_calls("ncclCommInitRankConfig"), before + 2);
}

TEST(Nccl, ConnectsAtOnceWhereADeviceIsBound) {
  const auto before = fake_nccl_calls("ncclCommInitRankConfig");
  on_ranks(2, {.bind = true}, [&](NcclRank& rank) {
    ASSERT_EQ(rank.status(), LOCKSTEP_OK) << rank.error();
    EXPECT_TRUE(eventually([&] { return fake_nccl_calls("ncclCommInitRankConfig") == before + 2; }));
  });
}

TEST(Nccl, ABlockingCreationReturnsWhenNcclIsConnected) {
  on_ranks(2, {.bind = true, .options = "blocking=1"}, [&](NcclRank& rank) {
    ASSERT_EQ(rank.status(), LOCKSTEP_OK) << rank.error();
    const auto before = fake_nccl_calls("ncclCommInitRankConfig");
    const auto x = rank.floats({1});
    EXPECT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    EXPECT_EQ(fake_nccl_calls("ncclCommInitRankConfig"), before);
  });
}

TEST(Nccl, FreesItsCommunicators) {
  const int before = fake_nccl_comms();
  on_ranks(2, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    EXPECT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
  });
  EXPECT_EQ(fake_nccl_comms(), before);
}

TEST(Nccl, OptionsReachNccl) {
  const char* const options =
      "min_ctas=2 max_ctas=8 cga_cluster_size=1 split_share=1 traffic_class=3 collnet=1 nvls=4";
  on_ranks(2, {.bind = true, .options = options}, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    EXPECT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
  });
  Config config;
  fake_nccl_last_config(&config, sizeof config);
  EXPECT_EQ(config.blocking, 0);
  EXPECT_EQ(config.min_ctas, 2);
  EXPECT_EQ(config.max_ctas, 8);
  EXPECT_EQ(config.cga_cluster_size, 1);
  EXPECT_EQ(config.split_share, 1);
  EXPECT_EQ(config.traffic_class, 3);
  EXPECT_EQ(config.collnet_enable, 1);
  EXPECT_EQ(config.nvls_ctas, 4);
  EXPECT_EQ(config.cta_policy, kUndefined);
}

TEST(Nccl, WrongOptionsAreRefused) {
  for (const char* const options : {"colour=1", "min_ctas", "min_ctas=many", "blocking=2"}) {
    on_ranks(1, {.options = options}, [&](NcclRank& rank) {
      EXPECT_EQ(rank.status(), LOCKSTEP_USAGE) << options;
      EXPECT_NE(rank.error(), "");
    });
  }
}

TEST(Nccl, TwoRanksOnOneGpuAreRefusedOnBoth) {
  on_ranks(2, {.device = 0}, [&](NcclRank& rank) {
    ASSERT_EQ(rank.status(), LOCKSTEP_OK) << rank.error();
    const auto x = rank.floats({1});
    EXPECT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_UNSUPPORTED) << rank.error();
    for (const char* const part : {"rank 0", "rank 1", "same GPU", "cuda_ipc"})
      EXPECT_NE(rank.failure().error.find(part), std::string::npos) << rank.failure().error;
  });
}

TEST(Nccl, AnotherDeviceThanTheBoundOneIsRefused) {
  on_ranks(2, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    auto op = rank.all_reduce(x);
    op.device = 2;
    EXPECT_EQ(rank.run(op), LOCKSTEP_USAGE) << rank.error();
    EXPECT_EQ(rank.failure().status, LOCKSTEP_OK);
  });
}

// ---- streams

TEST(Nccl, RunIsIssuedInTheCallersStream) {
  on_ranks(1, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    // Not at first: NCCL connects, and the next one follows what ran in another stream. One may find the progress thread busy.
    EXPECT_TRUE(eventually([&] {
      const auto waits = fake_cuda_calls("cuStreamWaitEvent");
      EXPECT_EQ(rank.run(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
      return fake_cuda_calls("cuStreamWaitEvent") == waits;
    }));
    rank.synchronize();
  });
}

// The stream is held until all are posted: the operation must not read before.
TEST(Nccl, APostedOperationReadsAfterWhatItsStreamHolds) {
  on_ranks(2, [&](NcclRank& rank) {
    struct Late {
      const DeviceFloats& x;
      std::atomic<bool> go{false};
      static void write(void* self) {
        auto& late = *static_cast<Late*>(self);
        while (!late.go) std::this_thread::yield();
        *static_cast<float*>(fake_cuda_host(late.x.data())) = 5;
      }
    };
    const auto x = rank.floats({1}), y = rank.floats({0});
    Late late{x};
    const cuda::ContextScope scope(rank.gpu());
    rank.gpu().driver().launch_host_func(rank.stream(), Late::write, &late);
    auto* const handle = rank.post(rank.op(LOCKSTEP_ALL_REDUCE, x.data(), y.data(), 1));
    EXPECT_EQ(plugin().test(handle), LOCKSTEP_PENDING);
    late.go = true;
    auto other = cuda::create_stream(rank.gpu(), cuda::Priority::kLeast);
    EXPECT_EQ(plugin().stream_wait(handle, other.get()), LOCKSTEP_OK);
    rank.gpu().driver().stream_synchronize(other.get());
    EXPECT_EQ(y.get(), Floats{10});
    EXPECT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
  });
}

TEST(Nccl, OperationsOfOneCallAreOneGroup) {
  on_ranks(1, [&](NcclRank& rank) {
    const auto x = rank.floats({1}), y = rank.floats({2});
    ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    const auto groups = fake_nccl_calls("ncclGroupEnd"), calls = fake_nccl_calls("ncclAllReduce");
    auto first = rank.all_reduce(x);
    first.flags = LOCKSTEP_OP_MORE_FOLLOW;
    auto* const one = rank.post(first);
    auto* const two = rank.post(rank.all_reduce(y));
    EXPECT_EQ(rank.finish(one), LOCKSTEP_OK) << rank.error();
    EXPECT_EQ(rank.finish(two), LOCKSTEP_OK) << rank.error();
    EXPECT_EQ(fake_nccl_calls("ncclGroupEnd"), groups + 1);
    EXPECT_EQ(fake_nccl_calls("ncclAllReduce"), calls + 2);
  });
}

TEST(Nccl, ACapturedOperationRunsWithItsGraph) {
  on_ranks(2, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    const cuda::Driver& driver = rank.gpu().driver();
    const cuda::ContextScope scope(rank.gpu());
    ASSERT_EQ(driver.stream_begin_capture(rank.stream(), cuda::kCaptureThreadLocal), cuda::kSuccess);
    EXPECT_EQ(rank.run(rank.all_reduce(x)), LOCKSTEP_USAGE) << "nothing is connected yet";
    cuda::Graph graph = nullptr;
    driver.stream_end_capture(rank.stream(), &graph);
    ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    ASSERT_EQ(driver.stream_begin_capture(rank.stream(), cuda::kCaptureThreadLocal), cuda::kSuccess);
    EXPECT_EQ(rank.run(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    ASSERT_EQ(driver.stream_end_capture(rank.stream(), &graph), cuda::kSuccess);
    cuda::GraphExec exec = nullptr;
    ASSERT_EQ(driver.graph_instantiate(&exec, graph, 0), cuda::kSuccess);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(driver.graph_launch(exec, rank.stream()), cuda::kSuccess);
    rank.synchronize();
    EXPECT_EQ(x.get(), Floats{16});
    driver.graph_exec_destroy(exec);
    driver.graph_destroy(graph);
  });
}

TEST(Nccl, ABarrierOfTheHostWaitsForEveryRank) {
  std::atomic<int> arrived{0};
  on_ranks(3, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    auto op = rank.op(LOCKSTEP_BARRIER, nullptr, nullptr, 0);
    op.device_kind = LOCKSTEP_HOST_MEMORY;
    op.stream = nullptr;
    if (rank.rank() == 1) std::this_thread::sleep_for(Milliseconds(5));
    ++arrived;
    EXPECT_EQ(rank.run(op), LOCKSTEP_OK) << rank.error();
    EXPECT_EQ(arrived, 3);
  });
}

// ---- messages

TEST(Nccl, MessagesMatchByTagWhateverTheirOrder) {
  on_ranks(2, [&](NcclRank& rank) {
    const auto one = rank.floats({rank.rank() == 0 ? 1.f : 0.f}),
               two = rank.floats({rank.rank() == 0 ? 2.f : 0.f});
    const auto kind = rank.rank() == 0 ? LOCKSTEP_SEND : LOCKSTEP_RECV;
    const bool first = rank.rank() == 0;
    auto* const a = rank.post(rank.message(kind, first ? one : two, 1 - rank.rank(), first ? 1 : 2));
    auto* const b = rank.post(rank.message(kind, first ? two : one, 1 - rank.rank(), first ? 2 : 1));
    EXPECT_EQ(rank.finish(a), LOCKSTEP_OK) << rank.error();
    EXPECT_EQ(rank.finish(b), LOCKSTEP_OK) << rank.error();
    EXPECT_EQ(one.get(), Floats{1});
    EXPECT_EQ(two.get(), Floats{2});
  });
}

TEST(Nccl, BothMaySendFirst) {
  on_ranks(2, [&](NcclRank& rank) {
    const auto mine = rank.floats({static_cast<float>(rank.rank())}), theirs = rank.floats({9});
    auto* const sent = rank.post(rank.message(LOCKSTEP_SEND, mine, 1 - rank.rank(), 0));
    auto* const received = rank.post(rank.message(LOCKSTEP_RECV, theirs, -1, 0));
    EXPECT_EQ(rank.finish(sent), LOCKSTEP_OK) << rank.error();
    EXPECT_EQ(rank.finish(received), LOCKSTEP_OK) << rank.error();
    EXPECT_EQ(theirs.get(), Floats{static_cast<float>(1 - rank.rank())});
  });
}

// ---- failures

TEST(Nccl, AnAbortEndsTheStreamOfARankThatWaits) {
  on_ranks(2, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    ASSERT_EQ(rank.run(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    rank.synchronize();
    if (rank.rank() == 0) {
      ASSERT_EQ(rank.run(rank.all_reduce(x)), LOCKSTEP_OK)
          << "it waits for rank 1 on the device: " << rank.error();
      EXPECT_FALSE(rank.stream_is_idle());
      plugin().comm_abort(rank.comm(), "enough");
    }
    EXPECT_TRUE(eventually([&] { return rank.stream_is_idle(); }));
    EXPECT_TRUE(eventually([&] { return rank.failure().status == LOCKSTEP_ABORTED; }));
    EXPECT_NE(rank.failure().error.find("enough"), std::string::npos);
    EXPECT_EQ(rank.run(rank.all_reduce(x)), LOCKSTEP_ABORTED);
  });
}

TEST(Nccl, AFailedCallIsReportedWithNcclsText) {
  on_ranks(1, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    fake_nccl_fail("ncclAllReduce", 1, kSystemError);
    EXPECT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_SYSTEM);
    for (const char* const part : {"unhandled system error", "what the fake says last"})
      EXPECT_NE(rank.failure().error.find(part), std::string::npos) << rank.failure().error;
  });
}

TEST(Nccl, AnAsynchronousErrorEndsWhatIsPending) {
  on_ranks(2, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    if (rank.rank() != 0) return (void)eventually([&] { return rank.failure().status == LOCKSTEP_SYSTEM; });
    auto* const handle = rank.post(rank.all_reduce(x));
    fake_nccl_async_error(0, kSystemError);
    EXPECT_EQ(rank.finish(handle), LOCKSTEP_SYSTEM) << rank.error();
    fake_nccl_async_error(0, kSuccess);
  });
}

TEST(Nccl, ACreationThatFailsBreaksTheGroup) {
  on_ranks(2, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    if (rank.rank() == 0) fake_nccl_fail("ncclGetUniqueId", 1, kInternalError);
    EXPECT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_SYSTEM) << rank.error();
  });
}

TEST(Nccl, ARankThatIsLateIsNamed) {
  on_ranks(3, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    if (rank.rank() == 2) return (void)eventually([&] { return rank.failure().status == LOCKSTEP_TIMEOUT; });
    auto* const handle = rank.post(rank.all_reduce(x, Milliseconds(50)));
    EXPECT_EQ(rank.finish(handle), LOCKSTEP_TIMEOUT) << rank.error();
    EXPECT_NE(rank.failure().error.find("waits for rank 2"), std::string::npos) << rank.failure().error;
  });
}

TEST(Nccl, SurvivorsGoOnInANewCommunicator) {
  comm::testing::MapKv kv;
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      NcclRank rank(kv, r, 3, {});
      const auto x = rank.floats({1});
      ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
      if (r == 2) return rank.destroy("out of coffee");
      EXPECT_TRUE(eventually([&] { return rank.failure().status == LOCKSTEP_PEER_LOST; }));
      EXPECT_EQ(rank.failure().rank, 2);
      EXPECT_EQ(rank.failure().cause, "out of coffee");
      NcclRank next(kv, r, 2, {}, "survivors");
      ASSERT_EQ(next.run_through(next.all_reduce(x)), LOCKSTEP_OK) << next.error();
      EXPECT_EQ(x.get(), Floats{6});
    });
  }
  for (auto& each : threads) each.join();
}

TEST(Nccl, AForkedChildIsRefused) {
  on_ranks(1, [&](NcclRank& rank) {
    const auto x = rank.floats({1});
    ASSERT_EQ(rank.run_through(rank.all_reduce(x)), LOCKSTEP_OK) << rank.error();
    const auto op = rank.all_reduce(x);
    const pid_t child = ::fork();
    if (child == 0) {
      char error[256] = "";
      const auto status = plugin().run(rank.comm(), &op, error, sizeof error);
      rank.destroy();
      ::_exit(status == LOCKSTEP_USAGE && std::string(error).find("fork") != std::string::npos ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  });
}

}  // namespace
}  // namespace lockstep::nccl_plugin
