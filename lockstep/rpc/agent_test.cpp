// What an agent does when things go wrong or last: callbacks that block, promises that are dropped, answers
// that cannot be sent, messages that never end, answers of strangers.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "lockstep/base/detail/raise.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/internal/shutdown_barrier.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using testing::caught;
using testing::Gate;
using testing::run_workers;
using testing::says;
using testing::ShortTransport;
using testing::TransportWrapper;
using testing::until;
using testing::Workers;

int add(int a, int b) {
  return a + b;
}
LOCKSTEP_RPC_FUNCTION(add);

// Of the test that runs.
std::atomic<Gate*> gate{nullptr};
int pass_gate(int value) {
  gate.load()->pass();
  return value;
}
LOCKSTEP_RPC_FUNCTION(pass_gate);

struct GateHere {
  GateHere() { gate = &here; }
  Gate here;
};

TEST(Agent, IsNotHeldUpByACallbackOfATimeoutThatBlocks) {
  GateHere function;
  Gate callback;
  std::atomic<bool> both_done{false};
  run_workers(2, [&](int rank, Workers&) {
    if (rank == 0) {
      const auto first = rpc_async(1, pass_gate, {1}, {.timeout = 20ms});
      first.on_done([&](const auto&) { callback.pass(); });
      until([&] { return callback.n_came() == 1; });
      // Its other calls end at their time, too.
      const auto second = rpc_async(1, pass_gate, {2}, {.timeout = 20ms});
      until([&] { return second.done(); });
      both_done = true;
    } else {
      until([&] { return both_done.load(); });
      EXPECT_EQ(rpc_sync(0, add, {1, 2}, {.timeout = 30s}), 3) << "it still serves others";
      callback.open();
      function.here.open();
    }
  });
}

// True when tasks are not taken any more.
bool is_stopping(Agent& agent) {
  auto token = std::make_shared<int>(0);
  const std::weak_ptr<int> kept = token;
  agent.run([held = std::move(token)] { (void)held; });
  return kept.expired();
}

TEST(Agent, RunsEveryCallbackWhenItCloses) {
  GateHere function;
  std::atomic<int> n_called{0};
  run_workers(2,
              [&](int rank, Workers& workers) {
                if (rank != 0) return;
                auto& agent = *workers.agents[0];
                // Its only thread is busy until tasks are dropped, so nothing that is queued is run.
                std::atomic<bool> busy{false};
                agent.run([&] {
                  busy = true;
                  until([&] { return is_stopping(agent); });
                });
                until([&] { return busy.load(); });
                std::vector<Future<int>> after;
                for (int i = 0; i < 20; ++i) {
                  after.push_back(rpc_async(1, pass_gate, {i}).then([&](const Future<int>& call) {
                    ++n_called;
                    return call.result();
                  }));
                }
                agent.close(Milliseconds(0));
                EXPECT_EQ(n_called, 20);
                for (const auto& future : after) {
                  ASSERT_TRUE(future.done());
                  EXPECT_EQ(caught([&] { future.result(); }).kind, ErrorKind::kAborted);
                }
                function.here.open();
              },
              {.num_worker_threads = 1});
}

Future<int> forget() {
  return Promise<int>().future();
}
LOCKSTEP_RPC_FUNCTION(forget);
// The future lives on, and with it whoever waits for it.
Future<int> forget_and_keep() {
  static Future<int> kept;
  kept = Promise<int>().future();
  return kept;
}
LOCKSTEP_RPC_FUNCTION(forget_and_keep);

// Blocks where a peer is added: before it can be reached, and after.
class GatedTransport final : public TransportWrapper {
 public:
  GatedTransport(std::unique_ptr<transport::Transport> inner, Gate& adding, Gate& added)
      : TransportWrapper(std::move(inner)), adding_(adding), added_(added) {}
  void add_peer(WorkerId id, const std::string& name, const Bytes& address) override {
    adding_.pass();
    TransportWrapper::add_peer(id, name, address);
    added_.pass();
  }

 private:
  Gate& adding_;
  Gate& added_;
};

TEST(Agent, ListsANewcomerOnlyWhenCallsReachIt) {
  const auto exchange = transport::InProcessExchange::create({});
  Gate adding, added;
  const auto newcomer = Agent::start({.self = {.id = 1, .name = "new"}}, exchange->join(1));
  const auto agent = Agent::start({.self = {.id = 0, .name = "old"}},
                                  std::make_unique<GatedTransport>(exchange->join(0), adding, added));
  newcomer->add_worker({.id = 0, .name = "old"}, agent->address());
  {
    const base::Thread joins("joins",
                             [&] { agent->add_worker({.id = 1, .name = "new"}, newcomer->address()); });
    until([&] { return adding.n_came() == 1; });
    EXPECT_EQ(agent->workers().size(), 1u) << "a call to it would be an error";
    EXPECT_TRUE(says(caught([&] { agent->find("new"); }), "there is no worker named"));
    EXPECT_TRUE(says(caught([&] { agent->find(1); }), "there is no worker with number 1; there are old (0)"));
    adding.open();
    until([&] { return added.n_came() == 1; });
    EXPECT_EQ(agent->workers().size(), 1u);
    internal::ping(*newcomer, 0, 10s).wait();
    EXPECT_EQ(agent->workers().size(), 2u) << "what it asks for may call it back";
    added.open();
  }
  EXPECT_EQ(agent->workers().size(), 2u);
  EXPECT_NO_THROW(internal::ping(*agent, agent->find("new").id, 10s).wait());
  agent->remove_worker(1);
  newcomer->remove_worker(0);
  agent->close();
  newcomer->close();
}

TEST(Promise, ThatIsDroppedFailsItsFuture) {
  Future<int> future;
  std::atomic<int> n_called{0};
  {
    const Promise<int> promise;
    future = promise.future();
    future.on_done([&](const auto&) { ++n_called; });
    const Promise<int> copy = promise;
  }
  ASSERT_TRUE(future.done());
  EXPECT_EQ(n_called, 1);
  const auto failure = caught([&] { future.result(); });
  EXPECT_EQ(failure.kind, ErrorKind::kAborted);
  EXPECT_TRUE(says(failure, "promise of this value was dropped")) << failure.message;
}

TEST(Promise, ThatAFunctionDropsIsAnErrorAtItsCaller) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    for (const auto& call : {rpc_async(1, forget), rpc_async(1, forget_and_keep)}) {
      const auto failure = caught([&] { call.wait(); });
      EXPECT_EQ(failure.kind, ErrorKind::kAborted) << failure.message;
      EXPECT_TRUE(says(failure, "On WorkerInfo(id=1, name=worker1)")) << failure.message;
      EXPECT_TRUE(says(failure, "promise of this value was dropped")) << failure.message;
    }
  });
}

// No codec knows it.
struct Handle {
  int number = 0;
};
Handle make_handle() {
  return {};
}
LOCKSTEP_RPC_FUNCTION(make_handle);

std::vector<double> many(int n) {
  return std::vector<double>(static_cast<std::size_t>(n), 1.0);
}
LOCKSTEP_RPC_FUNCTION(many);

}  // namespace
}  // namespace lockstep::rpc

namespace {
// Encoding it fails half way.
struct Fragile {
  int number = 0;
};
}  // namespace
namespace lockstep::object {
template <>
struct Codec<Fragile> {
  static std::string name() { return "fragile"; }
  static void write(Encoder&, const Fragile&) { base::raise(ErrorKind::kUnsupported, "it broke"); }
  static void read(Decoder&, Fragile&) {}
};
}  // namespace lockstep::object

namespace lockstep::rpc {
namespace {

Fragile make_fragile() {
  return {};
}
LOCKSTEP_RPC_FUNCTION(make_fragile);

TEST(Answer, ThatCannotBeEncodedIsAnErrorAtTheCaller) {
  run_workers(2, [](int rank, Workers&) {
    if (rank != 0) return;
    const auto handle = caught([] { rpc_sync(1, function<int()>("make_handle"), {}); });
    EXPECT_EQ(handle.kind, ErrorKind::kUsage);
    EXPECT_TRUE(says(handle, "Handle cannot be sent; use remote()")) << handle.message;
    const auto fragile = caught([] { rpc_sync(1, make_fragile); });
    EXPECT_EQ(fragile.kind, ErrorKind::kUnsupported);
    EXPECT_TRUE(says(fragile, "it broke")) << fragile.message;
    EXPECT_EQ(rpc_sync(1, add, {1, 1}), 2) << "the agent goes on";
  });
}

TEST(Answer, ThatIsTooLongIsAnErrorAtTheCaller) {
  run_workers(2,
              [](int rank, Workers&) {
                if (rank != 0) return;
                const auto failure = caught([] { rpc_sync(1, many, {100'000}); });
                EXPECT_EQ(failure.kind, ErrorKind::kUsage);
                EXPECT_TRUE(says(failure, "On WorkerInfo(id=1, name=worker1)")) << failure.message;
                EXPECT_TRUE(says(failure, "beyond the limit")) << failure.message;
                EXPECT_EQ(rpc_sync(1, many, {10}).size(), 10u);
              },
              {.wrap = [](WorkerId, auto inner) {
                return std::make_unique<ShortTransport>(std::move(inner), 10'000);
              }});
}

// There is always one more message: an answer to nobody.
class EndlessTransport final : public TransportWrapper {
 public:
  EndlessTransport(std::unique_ptr<transport::Transport> inner, const std::atomic<bool>& endless)
      : TransportWrapper(std::move(inner)), endless_(endless) {}
  std::optional<transport::Event> poll() override {
    auto event = TransportWrapper::poll();
    if (event || !endless_) return event;
    return transport::Event{.from = 1,
                            .message = {.kind = static_cast<std::uint8_t>(MessageKind::kGather) | kAnswer}};
  }

 private:
  const std::atomic<bool>& endless_;
};

TEST(Failure, OfALostPeerCarriesItsRankWhereItIsKnown) {
  const auto sent = [](LostPeer peer) {
    const Bytes bytes = encode_failure({.failure = {.kind = ErrorKind::kPeerLost, .peer = std::move(peer)}});
    return decode_failure({.id = 1, .name = "worker1"}, bytes).failure.peer;
  };
  EXPECT_EQ(sent({.rank = 0, .cause = "gone"}).value().rank, 0);
  EXPECT_EQ(sent({.cause = "gone"}).value().rank, std::nullopt);
  EXPECT_EQ(sent({.cause = "gone"}).value().cause, "gone");
}

TEST(Agent, LooksAtTheClockWhileMessagesArriveWithoutPause) {
  GateHere function;
  std::atomic<bool> endless{false};
  run_workers(2,
              [&](int rank, Workers&) {
                if (rank != 0) return;
                endless = true;
                const auto call = rpc_async(1, pass_gate, {1}, {.timeout = 20ms});
                until([&] { return call.done(); });
                endless = false;
                ASSERT_TRUE(call.done());
                EXPECT_EQ(caught([&] { call.result(); }).kind, ErrorKind::kTimeout);
                function.here.open();
              },
              {.wrap = [&](WorkerId id, auto inner) -> std::unique_ptr<transport::Transport> {
                if (id != 0) return inner;
                return std::make_unique<EndlessTransport>(std::move(inner), endless);
              }});
}

TEST(Agent, DiscardsAnAnswerOfAnotherWorkerThanTheOneThatWasAsked) {
  GateHere function;
  std::atomic<std::uint64_t> id{0};
  run_workers(2,
              [&](int rank, Workers& workers) {
                if (rank != 0) return;
                const auto call = rpc_async(1, pass_gate, {7});
                until([&] { return id != 0; });
                const auto stranger = workers.exchange->join(9);
                const auto forge = [&](std::uint8_t kind, Bytes body) {
                  return stranger->send(
                      0, {.kind = kind, .id = id, .body = transport::owned_blob(std::move(body))},
                      Deadline::after(1s));
                };
                const auto value = internal::encode_value(
                    *workers.agents[0], 0, 0, [](object::Encoder& encoder) { object::write(encoder, 666); });
                EXPECT_FALSE(forge(static_cast<std::uint8_t>(MessageKind::kCall) | kAnswer, value.body));
                EXPECT_FALSE(forge(kException, encode_failure({.failure = {.message = "made up"}})));
                // What is answered came after them.
                EXPECT_FALSE(forge(60, {}));
                until([&] { return stranger->poll().has_value(); });
                EXPECT_FALSE(call.done());
                function.here.open();
                EXPECT_EQ(call.wait(), 7);
              },
              {.exchange = {.lose = [&](WorkerId from, WorkerId, const transport::Message& message) {
                 if (from == 0 && message.kind == static_cast<std::uint8_t>(MessageKind::kCall))
                   id = message.id;
                 return false;
               }}});
}

// Runs out of memory while it looks for messages, `n` times.
class ExhaustedTransport final : public TransportWrapper {
 public:
  ExhaustedTransport(std::unique_ptr<transport::Transport> inner, std::atomic<int>& n)
      : TransportWrapper(std::move(inner)), n_(n) {}
  std::optional<transport::Event> poll() override {
    if (n_ > 0 && n_.fetch_sub(1) > 0) throw std::bad_alloc();
    return TransportWrapper::poll();
  }
  void wait(Deadline deadline) override {
    if (n_ > 0 && n_.fetch_sub(1) > 0) throw std::bad_alloc();
    TransportWrapper::wait(deadline);
  }

 private:
  std::atomic<int>& n_;
};

TEST(Agent, OutlivesALackOfMemoryWhereMessagesAreTaken) {
  std::atomic<int> n{0};
  run_workers(2,
              [&](int rank, Workers&) {
                if (rank != 0) return;
                for (int i = 0; i < 20; ++i) {
                  n = 3;
                  EXPECT_EQ(rpc_sync(1, add, {i, 1}, {.timeout = 30s}), i + 1);
                }
              },
              {.wrap = [&](WorkerId, auto inner) {
                return std::make_unique<ExhaustedTransport>(std::move(inner), n);
              }});
}

// Of a service that has no memory for what it is asked.
void exhaust(Agent& agent) {
  agent.handle(
      static_cast<MessageKind>(60), [](Request) { throw std::bad_alloc(); }, Agent::Runs::kQuick);
}
class ExhaustedService final : public Service {
 public:
  explicit ExhaustedService(Agent& agent) { exhaust(agent); }
  void on_lost(WorkerId, const std::string&) override {}
  void debug_info(std::map<std::string, std::string>&) override {}
};
std::unique_ptr<Service> make_exhausted(Agent& agent) {
  return std::make_unique<ExhaustedService>(agent);
}

TEST(Agent, OutlivesALackOfMemoryInTasksCallbacksAndHandlers) {
  run_workers(2,
              [](int rank, Workers&) {
                if (rank != 0) return;
                const auto agent = current_agent("test");
                for (int i = 0; i < 20; ++i) {
                  std::atomic<int> n_ran{0};
                  agent->run([&] {
                    ++n_ran;
                    throw std::bad_alloc();
                  });
                  // What takes the answer, on the thread that found it.
                  agent->request(1, static_cast<MessageKind>(61), {}, 30s, "a question",
                                 [&](Agent::Answer*, const CallFailure*) {
                                   ++n_ran;
                                   throw std::bad_alloc();
                                 });
                  until([&] { return n_ran == 2; });
                  const auto refused = caught(
                      [&] { agent->request(1, static_cast<MessageKind>(60), {}, 30s, "a request").wait(); });
                  EXPECT_TRUE(says(refused, "without an answer")) << refused.message;
                }
                EXPECT_EQ(rpc_sync(1, add, {1, 1}), 2);
                EXPECT_EQ(agent->n_waiting(), 0u);
                until([&] { return agent->n_running() == 0; });
              },
              {.extensions = {make_exhausted}});
}

}  // namespace
}  // namespace lockstep::rpc
