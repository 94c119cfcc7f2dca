// Completion calls: that they come, once, and what they may do.
#include <array>
#include <thread>

#include "lockstep/engine/engine_contract_case.h"

namespace lockstep::comm {
namespace {

struct Count {
  std::atomic<int> calls{0};
  static void call(void* self) { static_cast<Count*>(self)->calls.fetch_add(1); }
  // Gives a call that is on its way time to come.
  int settle(int at_least) {
    const Deadline patience = Deadline::after(testing::kPatience);
    while (calls < at_least && !patience.expired()) std::this_thread::yield();
    std::this_thread::sleep_for(Milliseconds(1));
    return calls;
  }
};

TEST_P(EngineContract, DoneIsCalledOnceForEveryPostedOperation) {
  if (engine().capabilities().calls_back == 0) GTEST_SKIP() << "this engine does not call back";
  on_all_sizes([&](Rank& rank) {
    Count count;
    for (int kind = 0; kind < LOCKSTEP_SEND; ++kind) {
      if (!engine().offers(static_cast<lockstep_op_kind>(kind))) continue;
      for (const std::uint64_t n : {3u, 40'000u}) {
        PlainOp plain(rank, static_cast<lockstep_op_kind>(kind), n);
        plain.op.done = Count::call;
        plain.op.done_context = &count;
        const int before = count.calls;
        ASSERT_EQ(rank.post_and_wait(plain.op), LOCKSTEP_OK) << "kind " << kind << ": " << rank.error();
        EXPECT_EQ(count.settle(before + 1), before + 1) << "kind " << kind;
        ASSERT_EQ(rank.run(plain.op), LOCKSTEP_OK);
        EXPECT_EQ(count.settle(0), before + (engine().table().run != nullptr ? 1 : 2)) << "run does not call";
        count.calls = before + 1;
      }
    }
  });
}

// Nobody waits: the engine does its work by itself, and done may look at the handle and release it.
struct Releasing {
  const lockstep_engine* table;
  std::atomic<lockstep_handle*> handle{nullptr};
  std::atomic<int> status{-1};
  static void call(void* self) {
    auto* me = static_cast<Releasing*>(self);
    while (me->handle.load() == nullptr) std::this_thread::yield();  // post has not returned yet
    const int status = me->table->test(me->handle);
    me->table->release(me->handle);
    me->status = status;
  }
};

TEST_P(EngineContract, DoneMayReleaseTheHandle) {
  if (engine().capabilities().calls_back == 0) GTEST_SKIP() << "this engine does not call back";
  on_ranks(3, [&](Rank& rank) {
    std::vector<std::unique_ptr<Releasing>> all;
    std::vector<std::unique_ptr<PlainOp>> ops;
    for (int i = 0; i < 50; ++i) {
      ops.push_back(std::make_unique<PlainOp>(rank, LOCKSTEP_ALL_REDUCE, i % 2 == 0 ? 5 : 20'000));
      all.push_back(std::make_unique<Releasing>(&rank.table()));
      ops.back()->op.done = Releasing::call;
      ops.back()->op.done_context = all.back().get();
      all.back()->handle = rank.post(ops.back()->op);
    }
    const Deadline patience = Deadline::after(testing::kPatience);
    for (const auto& one : all) {
      while (one->status == -1 && !patience.expired()) std::this_thread::yield();
      ASSERT_EQ(one->status, LOCKSTEP_OK);
    }
  });
}

TEST_P(EngineContract, DoneIsCalledOnceWhenAnOperationIsAborted) {
  if (engine().capabilities().calls_back == 0) GTEST_SKIP() << "this engine does not call back";
  for (const bool destroys : {false, true}) {
    on_ranks(2, [&](Rank& rank) {
      if (rank.rank() == 1) return rank.await(0, 1);
      Count count;
      std::vector<std::unique_ptr<PlainOp>> ops;
      std::vector<lockstep_handle*> handles;
      for (int kind = 0; kind < LOCKSTEP_OP_KINDS; ++kind) {
        if (!engine().offers(static_cast<lockstep_op_kind>(kind))) continue;
        ops.push_back(std::make_unique<PlainOp>(rank, static_cast<lockstep_op_kind>(kind), 30'000));
        ops.back()->op.root = kind >= LOCKSTEP_SEND ? 1 : 0;
        ops.back()->op.done = Count::call;
        ops.back()->op.done_context = &count;
        handles.push_back(rank.post(ops.back()->op));
      }
      const int want = static_cast<int>(handles.size());
      if (destroys) {  // handles first, as the contract says; the operations are still pending
        for (auto* handle : handles) rank.table().release(handle);
        rank.destroy();
      } else {
        rank.table().comm_abort(rank.comm(), "enough");
        for (auto* handle : handles) EXPECT_EQ(rank.finish(handle), LOCKSTEP_ABORTED) << rank.error();
      }
      EXPECT_EQ(count.settle(want), want);
      rank.word(0) = 1;
    });
  }
}

// Each operation's done posts the next one, and looks at its own handle while this rank's thread may be
// waiting for it.
struct Relay {
  static constexpr std::size_t kLength = 40;
  explicit Relay(ContractRank& of) : rank(of) {
    for (std::size_t i = 0; i < kLength; ++i) {
      ops.push_back(std::make_unique<PlainOp>(rank, LOCKSTEP_ALL_REDUCE, i % 2 == 0 ? 5 : 20'000));
      ops.back()->op.done = call;
      ops.back()->op.done_context = this;
    }
  }
  void post(std::size_t i) {
    lockstep_handle* handle = nullptr;
    if (rank.table().post(rank.comm(), &ops[i]->op, &handle) != LOCKSTEP_OK) ++n_wrong;
    handles[i] = handle;
  }
  static void call(void* self) {
    auto& me = *static_cast<Relay*>(self);
    const std::size_t i = me.n_over;
    while (me.handles[i].load() == nullptr) std::this_thread::yield();  // post has not returned yet
    char text[64] = "";
    if (me.rank.table().test(me.handles[i]) != LOCKSTEP_OK) ++me.n_wrong;
    me.rank.table().last_error(me.handles[i], text, sizeof text);
    if (me.rank.failure().status != LOCKSTEP_OK) ++me.n_wrong;
    me.n_over = i + 1;
    if (i + 1 < kLength) me.post(i + 1);
  }
  ContractRank& rank;
  std::vector<std::unique_ptr<PlainOp>> ops;
  std::array<std::atomic<lockstep_handle*>, kLength> handles{};
  std::atomic<std::size_t> n_over{0};
  std::atomic<int> n_wrong{0};
};

TEST_P(EngineContract, DoneMayPostTheNextOperationWhileAnotherThreadWaits) {
  if (engine().capabilities().calls_back == 0) GTEST_SKIP() << "this engine does not call back";
  on_all_sizes([&](Rank& rank) {
    Relay relay(rank);
    relay.post(0);
    for (auto& handle : relay.handles) {
      while (handle.load() == nullptr && relay.n_wrong == 0) std::this_thread::yield();
      ASSERT_EQ(relay.n_wrong, 0);
      EXPECT_EQ(rank.table().wait(handle, LOCKSTEP_NEVER), LOCKSTEP_OK);
    }
    while (relay.n_over < Relay::kLength) std::this_thread::yield();
    EXPECT_EQ(relay.n_wrong, 0);
    for (auto& handle : relay.handles) rank.table().release(handle);
  });
}

// Of an operation that failed: asks why, and passes it on.
struct Asking {
  ContractRank& rank;
  std::atomic<lockstep_handle*> handle{nullptr};
  lockstep_status status = LOCKSTEP_PENDING, failure = LOCKSTEP_OK;
  char text[512] = "";
  std::atomic<bool> over{false};
  static void call(void* self) {
    auto& me = *static_cast<Asking*>(self);
    while (me.handle.load() == nullptr) std::this_thread::yield();  // post has not returned yet
    me.status = me.rank.table().test(me.handle);
    me.rank.table().last_error(me.handle, me.text, sizeof me.text);
    me.failure = me.rank.failure().status;
    me.rank.table().comm_abort(me.rank.comm(), "a second thought");
    me.over = true;
  }
};

TEST_P(EngineContract, DoneMayAskWhyAndAbortWhileAnotherThreadWaits) {
  if (engine().capabilities().calls_back == 0) GTEST_SKIP() << "this engine does not call back";
  on_ranks(2, [&](Rank& rank) {
    if (rank.rank() == 1) return rank.await(0, 1);
    Asking asking{.rank = rank};
    PlainOp plain(rank, LOCKSTEP_ALL_REDUCE, 20'000);
    plain.op.done = Asking::call;
    plain.op.done_context = &asking;
    asking.handle = rank.post(plain.op);
    std::thread waiter(
        [&] { EXPECT_EQ(rank.table().wait(asking.handle, LOCKSTEP_NEVER), LOCKSTEP_ABORTED); });
    rank.table().comm_abort(rank.comm(), "enough");
    waiter.join();
    while (!asking.over) std::this_thread::yield();
    rank.table().release(asking.handle);
    EXPECT_EQ(asking.status, LOCKSTEP_ABORTED);
    EXPECT_EQ(asking.failure, LOCKSTEP_ABORTED);
    EXPECT_NE(std::string(asking.text).find("enough"), std::string::npos) << asking.text;
    rank.word(0) = 1;
  });
}

}  // namespace
}  // namespace lockstep::comm
