// Calls between workers as threads: results, errors, timeouts, losses, nesting.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <set>
#include <stdexcept>
#include <thread>

#include "lockstep/base/detail/raise.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/gather.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using testing::caught;
using testing::run_workers;
using testing::says;
using testing::Workers;

int add(int a, int b) {
  return a + b;
}
LOCKSTEP_RPC_FUNCTION(add);

std::string greet(const std::string& name) {
  return "hello " + name;
}
LOCKSTEP_RPC_FUNCTION(greet, "app.greet");

std::atomic<int> n_pokes{0};
void poke() {
  ++n_pokes;
}
LOCKSTEP_RPC_FUNCTION(poke);

void fail(const std::string& text) {
  throw std::runtime_error(text);
}
LOCKSTEP_RPC_FUNCTION(fail);

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

void sleep_ms(int ms) {
  std::this_thread::sleep_for(Milliseconds(ms));
}
LOCKSTEP_RPC_FUNCTION(sleep_ms);

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

// Answered once the test sets it: workers are threads of one process.
std::optional<Promise<void>> release;
Future<void> when_released() {
  return release->future();
}
LOCKSTEP_RPC_FUNCTION(when_released);

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
                testing::until([] { return n_promised == kCalls; });
                EXPECT_EQ(rpc_sync(1, add, {1, 2}), 3) << "while all of them wait";
                const auto n_threads =
                    std::stoi(workers.agents[1]->debug_info().at("agent.thread_pool_size"));
                EXPECT_LE(n_threads, kThreads + 1);
                kept_promise().set(7);
                for (const auto& call : calls) EXPECT_EQ(call.wait(), 7);
              },
              {.num_worker_threads = kThreads});
}

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

TEST(Call, ThatIsDamagedLeavesTheAgentIntact) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    const auto agent = current_agent("test");
    for (const auto& body : {Bytes{}, Bytes{1, 2, 3}, Bytes(14, 0xFF), Bytes(40, 0)}) {
      const auto failure = caught(
          [&] { agent->request(1, MessageKind::kCall, {.body = body}, 10s, "a damaged call").wait(); });
      EXPECT_TRUE(says(failure, "On WorkerInfo(id=1")) << failure.message;
    }
    const auto failure =
        caught([&] { agent->request(1, static_cast<MessageKind>(61), {}, 10s, "an odd call").wait(); });
    EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
    EXPECT_EQ(rpc_sync(1, add, {1, 1}), 2);
  });
}

// Which kinds of message went out, from any worker.
class KindsTransport final : public testing::TransportWrapper {
 public:
  using Kinds = std::array<std::atomic<int>, 256>;
  KindsTransport(std::unique_ptr<transport::Transport> inner, Kinds& kinds)
      : TransportWrapper(std::move(inner)), kinds_(kinds) {}
  std::optional<Failure> send(WorkerId to, transport::Message message, Deadline deadline) override {
    ++kinds_[message.kind];
    return TransportWrapper::send(to, std::move(message), deadline);
  }

 private:
  Kinds& kinds_;
};

int take_rref(const RRef<int>& value) {
  return value.to_here();
}
LOCKSTEP_RPC_FUNCTION(take_rref);

// The numbers are those of docs/wire.md: they are on the wire, and may not change.
TEST(Messages, OfEachKindAreSentForWhatTheyAreFor) {
  KindsTransport::Kinds kinds{};
  std::atomic<bool> looked{false};
  const auto sent = [&] {
    std::set<int> all;
    for (int kind = 0; kind < 256; ++kind) {
      if (kinds[static_cast<std::size_t>(kind)].exchange(0) != 0) all.insert(kind);
    }
    return all;
  };
  run_workers(3,
              [&](int rank, Workers&) {
                if (rank == 0) {
                  EXPECT_EQ(rpc_sync(1, add, {1, 2}), 3);
                  EXPECT_EQ(sent(), (std::set{0x01, 0x81})) << "a call and its value";
                  caught([] { rpc_sync(1, fail, {"no"}); });
                  EXPECT_EQ(sent(), (std::set{0x01, 0xFF})) << "a call and its exception";
                  auto value = remote(1, add, {1, 2});
                  EXPECT_EQ(value.to_here(), 3);
                  value.get_future().wait();
                  EXPECT_EQ(sent(), (std::set{0x03, 0x83, 0x08, 0x88})) << "a value made there, and fetched";
                  EXPECT_EQ(rpc_sync(2, take_rref, {value}), 3);
                  value = {};
                  // The child at worker 2 asks the owner, tells its parent, and both are deleted.
                  std::set<int> all;
                  testing::until([&] {
                    all.merge(sent());
                    return all.contains(0x0B) && all.contains(0x8B) && all.contains(0x09) &&
                           all.contains(0x89);
                  });
                  EXPECT_EQ(all, (std::set{0x01, 0x81, 0x08, 0x88, 0x09, 0x89, 0x0A, 0x8A, 0x0B, 0x8B}));
                }
                if (rank == 0) looked = true;
                testing::until([&] { return looked.load(); });
                barrier();
                if (rank != 0) return;
                const std::set<int> all = sent();
                EXPECT_TRUE(all.contains(0x20) && all.contains(0xA0)) << "a gathering";
              },
              {.wrap = [&](WorkerId, auto inner) {
                return std::make_unique<KindsTransport>(std::move(inner), kinds);
              }});
}

// Those of distributed autograd too, which this folder does not send.
TEST(Messages, OfEveryKindHaveTheNumbersOfTheProtocol) {
  const std::pair<MessageKind, int> numbers[] = {
      {MessageKind::kCall, 0x01},         {MessageKind::kRemoteCall, 0x03},
      {MessageKind::kRRefFetch, 0x08},    {MessageKind::kRRefDelete, 0x09},
      {MessageKind::kRRefFork, 0x0A},     {MessageKind::kRRefChild, 0x0B},
      {MessageKind::kBackward, 0x10},     {MessageKind::kBackwardPlan, 0x11},
      {MessageKind::kCleanup, 0x12},      {MessageKind::kContextHeld, 0x13},
      {MessageKind::kBackwardDone, 0x14}, {MessageKind::kBackwardAbort, 0x15},
      {MessageKind::kGather, 0x20},       {MessageKind::kLeave, 0x21},
      {MessageKind::kGatherMissing, 0x22}};
  for (const auto& [kind, number] : numbers) EXPECT_EQ(static_cast<int>(kind), number);
  EXPECT_EQ(kAnswer, 0x80);
  EXPECT_EQ(kException, 0xFF);
}

int add_there(int to, int a) {
  const ProfileRange range("thinking");
  return rpc_sync(to, add, {a, 1});
}
LOCKSTEP_RPC_FUNCTION(add_there);

TEST(Profile, RecordsTheCallAndWhatRanThere) {
  run_workers(3, [](int rank, Workers&) {
    if (rank != 0) return;
    rpc_sync(1, add, {1, 2});
    std::vector<std::string> names;
    {
      Profile profile;
      rpc_sync(1, add, {1, 2});
      rpc_async(2, add, {1, 2}).wait();
      EXPECT_EQ(rpc_sync(1, add_there, {2, 5}), 6);
      for (const auto& event : profile.events()) {
        names.push_back(event.worker + " " + event.name);
        EXPECT_GE(event.duration_ns, 0);
      }
    }
    rpc_sync(1, add, {1, 2});
    const std::string outer = "rpc_sync#add_there(worker0 -> worker1)";
    {
      Profile profile;
      remote(1, add, {1, 2}).to_here();
      EXPECT_EQ(profile.events().at(0).name, "rpc_remote#add(worker0 -> worker1)");
    }
    EXPECT_EQ(names, (std::vector<std::string>{
                         "worker0 rpc_sync#add(worker0 -> worker1)",
                         "worker1 rpc_sync#add(worker0 -> worker1)#remote_op: add",
                         "worker0 rpc_async#add(worker0 -> worker2)",
                         "worker2 rpc_async#add(worker0 -> worker2)#remote_op: add",
                         "worker0 " + outer,
                         "worker1 " + outer + "#remote_op: rpc_sync#add(worker1 -> worker2)",
                         "worker2 " + outer + "#remote_op: rpc_sync#add(worker1 -> worker2)#remote_op: add",
                         "worker1 " + outer + "#remote_op: thinking",
                         "worker1 " + outer + "#remote_op: add_there",
                     }));
  });
}

TEST(Profile, OfAServerSeesEveryCaller) {
  ServerProfile profile;
  run_workers(2, [](int rank, Workers&) { rpc_sync(1 - rank, add, {1, 2}); });
  std::set<std::string> names;
  for (const auto& event : profile.events()) names.insert(event.worker + " " + event.name);
  EXPECT_EQ(names, (std::set<std::string>{"worker0 rpc#add(worker1 -> worker0)",
                                          "worker1 rpc#add(worker0 -> worker1)"}));
}

TEST(Control, IsAskedAgainWhenItWasLost) {
  std::atomic<int> n_lost{0};
  run_workers(
      2,
      [&](int rank, Workers&) {
        if (rank != 0) return;
        const auto agent = current_agent("test");
        n_lost = 0;
        const auto answer = agent->request_again(1, static_cast<MessageKind>(61), {}, "a control message");
        EXPECT_EQ(caught([&] { answer.wait(); }).kind, ErrorKind::kUnsupported) << "an answer at last";
        EXPECT_EQ(n_lost, 2) << "sent twice, the first was lost";
      },
      {.exchange = {.lose = [&](WorkerId, WorkerId, const transport::Message& message) {
         return message.kind == 61 && n_lost++ == 0;
       }}});
}

// What it does may not be done twice.
TEST(Call, IsNeverSentTwice) {
  std::atomic<int> n_sent{0};
  run_workers(
      2,
      [&](int rank, Workers&) {
        if (rank != 0) return;
        EXPECT_EQ(caught([] { rpc_sync(1, add, {1, 2}, {.timeout = 2500ms}); }).kind, ErrorKind::kTimeout);
        EXPECT_EQ(n_sent, 1);
      },
      {.exchange = {.lose = [&](WorkerId from, WorkerId to, const transport::Message& message) {
         if (from != 0 || to != 1 || message.kind != static_cast<std::uint8_t>(MessageKind::kCall))
           return false;
         ++n_sent;
         return true;
       }}});
}

}  // namespace
}  // namespace lockstep::rpc
