// What is cuda_ipc's own, beside the contract: its window, its table of messages, refusals, and a device that breaks.
#include <thread>
#include <vector>

#include "engines/cuda_ipc/contract_testing.h"
#include "tests/fake_cuda/fake_cuda.h"

namespace lockstep::comm {
namespace {

using testing::EngineRank;

// Two ranks that are threads, each with its memory.
template <class Body>
void on_two_ranks(const Body& body, testing::Kv& kv) {
  cuda_ipc::plugin_table();  // before the driver starts
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      testing::KvSpace space(kv, "world");
      const auto memory = cuda::test_memory(r, 2);
      EngineRank rank(*cuda_ipc::plugin_table(), space.host(), r, 2,
                      {.name = "world", .memory = memory.get()});
      body(rank);
    });
  }
  for (auto& thread : threads) thread.join();
}

lockstep_op message(lockstep_op_kind kind, float* data, int peer) {
  auto op =
      EngineRank::op(kind, kind == LOCKSTEP_SEND ? data : nullptr, kind == LOCKSTEP_RECV ? data : nullptr, 1);
  op.root = peer;
  return op;
}

TEST(CudaIpc, ARankMayPostFarMoreThanTheWindow) {
  constexpr int kOperations = 300;
  testing::MapKv kv;
  std::atomic<bool> posted{false};
  on_two_ranks(
      [&](EngineRank& rank) {
        while (rank.rank() == 1 && !posted) std::this_thread::yield();
        std::vector<std::vector<float>> data;
        std::vector<lockstep_handle*> handles;
        for (int i = 0; i < kOperations; ++i) data.push_back({static_cast<float>(i)});
        for (auto& one : data)
          handles.push_back(rank.post(EngineRank::op(LOCKSTEP_ALL_REDUCE, one.data(), one.data(), 1)));
        posted = true;
        for (auto* handle : handles) ASSERT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
        for (int i = 0; i < kOperations; ++i)
          EXPECT_EQ(data[static_cast<std::size_t>(i)][0], 2.f * static_cast<float>(i));
      },
      kv);
}

TEST(CudaIpc, MoreSendsThanTheTableHoldsArriveInOrder) {
  constexpr int kSends = 700;
  testing::MapKv kv;
  std::atomic<bool> posted{false};
  on_two_ranks(
      [&](EngineRank& rank) {
        std::vector<float> data(kSends);
        std::vector<lockstep_handle*> handles;
        for (int i = 0; rank.rank() == 0 && i < kSends; ++i) {
          data[static_cast<std::size_t>(i)] = static_cast<float>(i);
          handles.push_back(rank.post(message(LOCKSTEP_SEND, &data[static_cast<std::size_t>(i)], 1)));
        }
        if (rank.rank() == 0) posted = true;
        while (!posted) std::this_thread::yield();
        for (int i = 0; rank.rank() == 1 && i < kSends; ++i)
          handles.push_back(rank.post(message(LOCKSTEP_RECV, &data[static_cast<std::size_t>(i)], 0)));
        for (auto* handle : handles) ASSERT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
        for (int i = 0; i < kSends; ++i) EXPECT_EQ(data[static_cast<std::size_t>(i)], static_cast<float>(i));
      },
      kv);
}

TEST(CudaIpc, ADeviceThatBreaksIsReportedWithWhatToDo) {
  testing::MapKv kv;
  std::atomic<bool> over{false};
  on_two_ranks(
      [&](EngineRank& rank) {
        std::vector<float> data(100, 1.f);
        const auto op = EngineRank::op(LOCKSTEP_ALL_REDUCE, data.data(), data.data(), data.size());
        ASSERT_EQ(rank.post_and_wait(op), LOCKSTEP_OK) << rank.error();
        while (rank.rank() == 1 && !over) std::this_thread::yield();
        if (rank.rank() == 1) return;
        lockstep_handle* const handle = rank.post(op);  // rank 1 never comes
        fake_cuda_break_device(0, 700);
        EXPECT_EQ(rank.table().wait(handle, LOCKSTEP_NEVER), LOCKSTEP_SYSTEM);
        char error[512];
        rank.table().last_error(handle, error, sizeof error);
        fake_cuda_break_device(0, 0);
        over = true;
        rank.table().release(handle);
        EXPECT_NE(std::string(error).find("CUDA_ERROR_ILLEGAL_ADDRESS"), std::string::npos) << error;
        EXPECT_NE(std::string(error).find("restart"), std::string::npos) << error;
      },
      kv);
}

TEST(CudaIpc, AnUnknownOptionIsRefusedByName) {
  testing::MapKv kv;
  testing::KvSpace space(kv);
  lockstep_comm_config config{};
  config.struct_size = sizeof config;
  config.host = space.host();
  config.size = 1;
  config.deadline_ns = LOCKSTEP_NEVER;
  config.options = " speed=11";
  lockstep_comm* comm = nullptr;
  char error[256] = "";
  EXPECT_EQ(cuda_ipc::plugin_table()->comm_create(&config, &comm, error, sizeof error), LOCKSTEP_USAGE);
  EXPECT_EQ(comm, nullptr);
  EXPECT_NE(std::string(error).find("\"speed\""), std::string::npos) << error;
}

}  // namespace
}  // namespace lockstep::comm
