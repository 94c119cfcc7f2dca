// Futures of calls: empty ones, how one ended, several at once, and callbacks.
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <optional>
#include <vector>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/call_functions_testing.h"
#include "lockstep/rpc/future.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using namespace testing;

// Answered once the test sets it: workers are threads of one process.
std::optional<Promise<void>> release;
Future<void> when_released() {
  return release->future();
}
LOCKSTEP_RPC_FUNCTION(when_released);

Future<int> forgotten() {
  return {};
}
LOCKSTEP_RPC_FUNCTION(forgotten);

TEST(Future, ThatIsEmptyIsRefusedHereAndThere) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    EXPECT_TRUE(says(caught([] { rpc_sync(1, forgotten); }), "returned an empty Future"));
    EXPECT_EQ(rpc_sync(1, add, {1, 2}), 3) << "and nobody is harmed";
    const Future<int> empty;
    EXPECT_FALSE(empty.valid());
    for (const auto& use : std::vector<std::function<void()>>{
             [&] { empty.wait(); }, [&] { static_cast<void>(empty.done()); },
             [&] { empty.on_done([](const auto&) {}); }, [&] { empty.then([](const auto&) { return 1; }); },
             [&] { wait_all(std::vector{empty}); }}) {
      EXPECT_TRUE(says(caught(use), "this Future is empty"));
    }
    EXPECT_TRUE(
        says(caught([] { Future<int>::of(1).then([](const auto&) { return Future<int>(); }).wait(); }),
             "this Future is empty"));
  });
}

TEST(Future, ReportsWithoutBlockingWhetherAndHowItEnded) {
  const Promise<int> promise;
  const auto future = promise.future();
  EXPECT_FALSE(future.done());
  EXPECT_EQ(future.error(), nullptr);
  EXPECT_EQ(caught([&] { future.result(); }).kind, ErrorKind::kUsage) << "not done yet";
  EXPECT_EQ(caught([&] { future.wait(10ms); }).kind, ErrorKind::kTimeout);
  EXPECT_EQ(caught([&] { future.wait(0ms); }).kind, ErrorKind::kUsage);
  promise.set(3);
  EXPECT_EQ(future.result(), 3);
  EXPECT_EQ(future.error(), nullptr);
  const Promise<int> broken;
  broken.fail({.failure = {.kind = ErrorKind::kPeerLost, .message = "gone"}});
  const auto failed = broken.future();
  ASSERT_TRUE(failed.done());
  EXPECT_EQ(caught([&] { std::rethrow_exception(failed.error()); }).kind, ErrorKind::kPeerLost);
}

TEST(Callback, ThatBlocksDelaysOnlyThoseOfItsOwnFuture) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    const Promise<void> gate;
    const Promise<void> second_ran;
    release.emplace();
    const auto first = rpc_async(1, when_released);
    first.on_done([&](const auto&) { gate.future().wait(); });
    first.on_done([&](const auto&) { second_ran.set(); });
    release->set();
    // While the first callback blocks, other calls are answered and their callbacks run.
    const Promise<void> other_ran;
    rpc_async(1, sleep_ms, {1}).on_done([&](const auto&) { other_ran.set(); });
    other_ran.future().wait();
    EXPECT_FALSE(second_ran.future().done());
    gate.set();
    second_ran.future().wait();
  });
}

TEST(Future, OfManyIsOverWhenTheLastIs) {
  EXPECT_EQ(collect_all(std::vector<Future<int>>{}).wait().size(), 0u);
  Promise<int> first, second;
  const auto all = collect_all(std::vector{first.future(), second.future()});
  second.fail(Error(Failure{.kind = ErrorKind::kUnsupported, .message = "not today"}));
  EXPECT_FALSE(all.done());
  EXPECT_TRUE(says(caught([&] { all.wait(1ms); }), "Future::wait: not over after 1 milliseconds"));
  first.set(4);
  const auto futures = all.wait();
  EXPECT_EQ(futures.at(0).wait(), 4);
  const auto failure = caught([&] { futures.at(1).wait(); });
  EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
  EXPECT_EQ(failure.message, "not today");
}

}  // namespace
}  // namespace lockstep::rpc
