// Gloo's connections that are made when they are first needed, and its messages to oneself.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <vector>

#include "engines/gloo/gloo_testing.h"
#include "lockstep/engine/test_world.h"

namespace lockstep::comm {
namespace {

using namespace gloo_testing;

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

}  // namespace
}  // namespace lockstep::comm
