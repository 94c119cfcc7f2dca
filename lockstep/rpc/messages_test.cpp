// What calls send: damaged messages, the kinds of message, lost ones, and what a profile records.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/rpc/call.h"
#include "lockstep/rpc/call_functions_testing.h"
#include "lockstep/rpc/gather.h"
#include "lockstep/rpc/message_kind.h"
#include "lockstep/rpc/profile.h"
#include "lockstep/rpc/remote.h"
#include "lockstep/rpc/rpc_testing.h"

namespace lockstep::rpc {
namespace {

using namespace std::chrono_literals;
using namespace testing;

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
                  until([&] {
                    all.merge(sent());
                    return all.contains(0x0B) && all.contains(0x8B) && all.contains(0x09) &&
                           all.contains(0x89);
                  });
                  EXPECT_EQ(all, (std::set{0x01, 0x81, 0x08, 0x88, 0x09, 0x89, 0x0A, 0x8A, 0x0B, 0x8B}));
                }
                if (rank == 0) looked = true;
                until([&] { return looked.load(); });
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
