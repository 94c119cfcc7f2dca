// Calls between workers as threads: results, errors, timeouts, losses, nesting.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "lockstep/base/detail/raise.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/call_functions_testing.h"
#include "lockstep/rpc/gather.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using namespace testing;

std::string greet(const std::string& name) {
  return "hello " + name;
}
LOCKSTEP_RPC_FUNCTION(greet, "app.greet");

void refuse(const std::string& text) {
  base::raise(ErrorKind::kUnsupported, text);
}
LOCKSTEP_RPC_FUNCTION(refuse);

std::string who() {
  return current_agent("who")->self().name;
}
LOCKSTEP_RPC_FUNCTION(who);

// Calls back and forth until it is 0.
int bounce(int n, int world) {
  if (n == 0) return 0;
  const int next = (current_agent("bounce")->self().id + 1) % world;
  return 1 + rpc_sync(next, bounce, {n - 1, world});
}
LOCKSTEP_RPC_FUNCTION(bounce);

Future<int> add_later(int a, int b) {
  Promise<int> promise;
  current_agent("add_later")->run([=] { promise.set(a + b); });
  return promise.future();
}
LOCKSTEP_RPC_FUNCTION(add_later);

Future<int> add_at(int to, int a, int b) {
  return rpc_async(to, add, {a, b}).then([](const Future<int>& sum) { return sum.result() + 1; });
}
LOCKSTEP_RPC_FUNCTION(add_at);

std::vector<double> doubled(std::vector<double> values) {
  for (auto& value : values) value *= 2;
  return values;
}
LOCKSTEP_RPC_FUNCTION(doubled);

int unregistered(int a) {
  return a;
}

TEST(Call, ReturnsWhatTheFunctionReturned) {
  run_workers(3, [](int rank, Workers&) {
    const int next = (rank + 1) % 3;
    EXPECT_EQ(rpc_sync(next, add, {rank, 40}), rank + 40);
    EXPECT_EQ(rpc_sync("worker" + std::to_string(next), greet, {"you"}), "hello you");
    EXPECT_EQ(rpc_sync(next, who), "worker" + std::to_string(next));
    EXPECT_EQ(rpc_sync(rank, who), "worker" + std::to_string(rank)) << "to itself";
    EXPECT_EQ(rpc_sync(current_agent("test")->find(next), who), "worker" + std::to_string(next));
    EXPECT_EQ(rpc_sync(next, doubled, {{1.5, 2.5}}), (std::vector<double>{3, 5}));
  });
}

TEST(Call, GoesByNameWhereTheFunctionIsNotLinked) {
  run_workers(2, [](int rank, Workers&) {
    EXPECT_EQ(rpc_sync(1 - rank, function<int(int, int)>("add"), {3, 4}), 7);
    EXPECT_EQ(rpc_sync(rank, function<std::string()>("who")), "worker" + std::to_string(rank));
    EXPECT_EQ(rpc_async(rank, function<std::string()>("who")).wait(), "worker" + std::to_string(rank));
  });
}

TEST(Call, WithoutAResultStillWaits) {
  n_pokes = 0;
  run_workers(2, [](int rank, Workers&) {
    if (rank == 0) {
      rpc_sync(1, poke);
      EXPECT_EQ(n_pokes, 1);
    }
  });
}

TEST(Call, MayBeManyAtOnce) {
  run_workers(3, [](int rank, Workers&) {
    std::vector<Future<int>> sums;
    for (int i = 0; i < 500; ++i) sums.push_back(rpc_async(i % 3, add, {i, rank}));
    wait_all(sums);
    for (int i = 0; i < 500; ++i) EXPECT_EQ(sums[static_cast<std::size_t>(i)].result(), i + rank);
  });
}

TEST(Call, ThatCallsBackDoesNotUseUpTheThreads) {
  run_workers(2,
              [](int, Workers&) {
                EXPECT_EQ(rpc_sync(1, bounce, {60, 2}), 60);
              },
              {.num_worker_threads = 2});
}

TEST(Call, ThatSleepsDoesNotHoldUpOthers) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    const auto slow = rpc_async(1, sleep_ms, {2000});
    for (int i = 0; i < 100; ++i) EXPECT_EQ(rpc_sync(1, add, {i, 1}), i + 1);
    EXPECT_FALSE(slow.done());
    slow.wait();
  });
}

TEST(Call, BringsBackTheCalleesException) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    try {
      rpc_sync(1, fail, {"no such file"});
      ADD_FAILURE() << "nothing was raised";
    } catch (const RemoteError& error) {
      EXPECT_EQ(error.worker(), (WorkerInfo{.id = 1, .name = "worker1"}));
      EXPECT_EQ(error.remote_type(), "std::runtime_error");
      EXPECT_EQ(error.remote_text(), "no such file");
      EXPECT_EQ(std::string(error.what()).rfind("On WorkerInfo(id=1, name=worker1)", 0), 0u) << error.what();
    }
    EXPECT_EQ(caught([] { rpc_sync(1, refuse, {"not here"}); }).kind, ErrorKind::kUnsupported);
    EXPECT_EQ(rpc_sync(1, add, {1, 1}), 2) << "the agent goes on";
  });
}

TEST(Call, BringsBackTheCalleesStackWhereThatIsAskedFor) {
  const auto trace_of_a_failure = [] {
    std::string trace;
    run_workers(2, [&](int rank, Workers&) {
      if (rank != 0) return;
      try {
        rpc_sync(1, fail, {"no such file"});
      } catch (const RemoteError& error) {
        trace = error.trace();
        EXPECT_NE(std::string(error.what()).find(trace), std::string::npos) << error.what();
      }
    });
    return trace;
  };
  EXPECT_EQ(trace_of_a_failure(), "");
  ::setenv("TORCH_SHOW_CPP_STACKTRACES", "1", 1);
  EXPECT_NE(trace_of_a_failure(), "");
  ::unsetenv("TORCH_SHOW_CPP_STACKTRACES");
}

TEST(Call, OfAnUnknownFunctionOrWorkerIsRejected) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    EXPECT_TRUE(says(caught([] { rpc_sync("worker7", add, {1, 2}); }), "no worker named \"worker7\""));
    EXPECT_TRUE(says(caught([] { rpc_sync(9, add, {1, 2}); }), "no worker with number 9"));
    EXPECT_TRUE(says(caught([] { rpc_sync(1, unregistered, {1}); }),
                     "a int (*)(int), is not registered for RPC: write LOCKSTEP_RPC_FUNCTION"));
    const auto unknown = caught([] { rpc_sync(1, function<int(int)>("nothing_of_that_name"), {1}); });
    EXPECT_TRUE(says(unknown, "no function is registered")) << unknown.message;
    EXPECT_TRUE(says(unknown, "On WorkerInfo(id=1, name=worker1)")) << unknown.message;
  });
}

TEST(Call, WithOtherTypesIsRefusedOnBothSides) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    const auto argument = caught([] { rpc_sync(1, function<int(int, std::string)>("add"), {1, "two"}); });
    EXPECT_TRUE(says(argument, "at <1>: expected i32, got text")) << argument.message;
    EXPECT_TRUE(says(argument, "i32(i32, i32)")) << argument.message;
    const auto fewer = caught([] { rpc_sync(1, function<int(int)>("add"), {1}); });
    EXPECT_EQ(fewer.kind, ErrorKind::kUsage) << fewer.message;
    const auto result = caught([] { rpc_sync(1, function<std::string(int, int)>("add"), {1, 2}); });
    EXPECT_TRUE(says(result, "the answer of worker1: at the top: expected text, got i32")) << result.message;
  });
}

TEST(Call, EndsAtItsTimeout) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    const auto failure = caught([] { rpc_sync(1, sleep_ms, {1500}, {.timeout = 50ms}); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout);
    EXPECT_TRUE(says(failure, "RPCErr:1")) << failure.message;
    EXPECT_TRUE(says(failure, "50 milliseconds")) << failure.message;
    const auto later = rpc_async(1, sleep_ms, {1500}, {.timeout = 60ms});
    std::atomic<bool> told{false};
    later.on_done([&](const auto& future) { told = future.error() != nullptr; });
    while (!told) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(current_agent("test")->n_waiting(), 0u);
  });
}

TEST(Call, WithATimeoutThatIsNotPositiveIsRefusedAndNotSent) {
  n_pokes = 0;
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    for (const auto timeout : {0ms, -1ms}) {
      EXPECT_EQ(caught([&] { rpc_sync(1, poke, {}, {.timeout = timeout}); }).kind, ErrorKind::kUsage);
      EXPECT_EQ(caught([&] { remote(1, poke, {}, {.timeout = timeout}); }).kind, ErrorKind::kUsage);
      EXPECT_EQ(caught([&] { barrier({"worker0"}, {.timeout = timeout}); }).kind, ErrorKind::kUsage);
      EXPECT_EQ(caught([&] { RRef<int>(3).to_here(timeout); }).kind, ErrorKind::kUsage);
    }
    EXPECT_EQ(n_pokes, 0);
    rpc_sync(1, poke, {}, {.timeout = kNoTimeout});
    EXPECT_EQ(n_pokes, 1);
  });
}

TEST(Call, FailsWhenTheWorkerIsGone) {
  run_workers(3, [](int rank, Workers& workers) {
    if (rank != 0) return;
    const auto waiting = rpc_async(2, sleep_ms, {2000});
    workers.exchange->kill(2, "killed by SIGKILL (9)");
    const auto failure = caught([&] { waiting.wait(); });
    EXPECT_EQ(failure.kind, ErrorKind::kPeerLost);
    EXPECT_TRUE(says(failure, "worker2")) << failure.message;
    EXPECT_TRUE(says(failure, "SIGKILL")) << failure.message;
    ASSERT_TRUE(failure.peer);
    EXPECT_EQ(failure.peer->rank, 2);
    EXPECT_EQ(caught([] { rpc_sync(2, add, {1, 2}); }).kind, ErrorKind::kPeerLost);
    EXPECT_EQ(rpc_sync(1, add, {1, 2}), 3) << "others are not harmed";
  });
}

TEST(Call, MayAnswerLaterWithoutAThread) {
  run_workers(3, [](int rank, Workers&) {
    EXPECT_EQ(rpc_sync((rank + 1) % 3, add_later, {rank, 5}), rank + 5);
    EXPECT_EQ(rpc_sync((rank + 1) % 3, add_at, {(rank + 2) % 3, rank, 5}), rank + 6);
  });
}

Promise<int>& kept_promise() {
  static Promise<int> promise;
  return promise;
}
std::atomic<int> n_promised{0};
Future<int> promised() {
  ++n_promised;
  return kept_promise().future();
}
LOCKSTEP_RPC_FUNCTION(promised);

TEST(Call, ThatWillAnswerLaterHoldsNoThread) {
  constexpr int kCalls = 200, kThreads = 2;
  n_promised = 0;
  run_workers(2,
              [](int rank, Workers& workers) {
                if (rank != 0) return;
                std::vector<Future<int>> calls;
                for (int i = 0; i < kCalls; ++i) calls.push_back(rpc_async(1, promised));
                until([] { return n_promised == kCalls; });
                EXPECT_EQ(rpc_sync(1, add, {1, 2}), 3) << "while all of them wait";
                const auto n_threads =
                    std::stoi(workers.agents[1]->debug_info().at("agent.thread_pool_size"));
                EXPECT_LE(n_threads, kThreads + 1);
                kept_promise().set(7);
                for (const auto& call : calls) EXPECT_EQ(call.wait(), 7);
              },
              {.num_worker_threads = kThreads});
}

TEST(Call, IsCollectedByWaitAll) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    {
      WaitAll all;
      n_pokes = 0;
      for (int i = 0; i < 20; ++i) rpc_async(1, poke);
      all.wait();
      EXPECT_EQ(n_pokes, 20);
    }
    WaitAll all;
    rpc_async(1, fail, {"first"});
    rpc_async(1, poke);
    EXPECT_TRUE(says(caught([&] { all.wait(); }), "first"));
    EXPECT_THROW(WaitAll nested, Error);
  });
}

TEST(Call, AfterTheEndIsRefused) {
  std::shared_ptr<Agent> kept;
  run_workers(1, [&](int, Workers& workers) { kept = workers.agents[0]; });
  EXPECT_TRUE(says(caught([] { rpc_sync(0, add, {1, 2}); }), "not initialised"));
  EXPECT_TRUE(kept->closed());
}

}  // namespace
}  // namespace lockstep::rpc
