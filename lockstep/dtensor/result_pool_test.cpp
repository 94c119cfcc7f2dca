// The memory of results: where it lies, and that nothing that is alive is handed out again.
#include "lockstep/dtensor/internal/result_pool.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "lockstep/dtensor/dtensor_testing.h"

namespace lockstep {
namespace {

using dtensor_internal::ResultPool;
using testing::expect_whole;
using testing::waves;
using testing::world;

// Whether other processes could map these bytes: the system's own list of this process's mappings says
// "rw-s" for them.
bool in_shared_memory(const at::Tensor& tensor) {
  const auto first = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  const auto last = first + tensor.nbytes() - 1;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t from = 0, to = 0;
    char dash = 0;
    std::string access;
    std::istringstream(line) >> std::hex >> from >> dash >> to >> access;
    if (first < from || first >= to) continue;
    return last < to && access == "rw-s";
  }
  return false;
}

constexpr std::int64_t kLarge = 256 * 1024;  // bytes

TEST(ResultPool, LargeResultsLieInSharedMemoryAndSmallOnesDoNot) {
  world(2, [](int) {
    const ResultPool pool;
    const auto group = default_group();
    EXPECT_TRUE(in_shared_memory(pool.empty({kLarge / 4}, at::kFloat, group)));
    EXPECT_TRUE(in_shared_memory(pool.empty({kLarge / 8}, at::kDouble, group)));
    EXPECT_FALSE(in_shared_memory(pool.empty({kLarge / 4 - 1}, at::kFloat, group)));
  });
}

// Every step of a redistribution, and a tensor that was distributed.
TEST(ResultPool, LargePiecesOfADTensorLieInSharedMemory) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = waves({512, 512});
    const auto expect = [&](const at::Tensor& x) {
      EXPECT_TRUE(in_shared_memory(to_local(x))) << describe(x);
      expect_whole(x, whole, describe(x));
    };
    const auto rows = distribute_tensor(whole, mesh, {Shard(0)});
    expect(rows);
    expect(distribute_tensor(whole, mesh));
    expect(redistribute(rows, {Shard(1)}));
    expect(redistribute(rows, {Replicate()}));
    const auto partial = from_local(whole * (rank == 0 ? 0.25 : 0.75), mesh, {Partial()});
    EXPECT_FALSE(in_shared_memory(to_local(partial)));
    expect(redistribute(partial, {Replicate()}));
    expect(redistribute(partial, {Shard(0)}));
    expect(redistribute(redistribute(rows, {Replicate()}), {Shard(1)}));
  });
}

TEST(ResultPool, WhatIsAliveIsNotHandedOutAgain) {
  world(2, [](int) {
    const ResultPool pool;
    const auto group = default_group();
    // A view, a detached copy and another thread keep the memory as the tensor itself does.
    std::vector<at::Tensor> alive;
    for (int i = 0; i < 12; ++i) {
      auto result = pool.empty({kLarge / 4}, at::kFloat, group).fill_(i);
      if (i % 4 == 0) alive.push_back(result);
      if (i % 4 == 1) alive.push_back(result.narrow(0, 5, kLarge / 8));
      if (i % 4 == 2) alive.push_back(result.detach());
      // The fourth is freed, and the next round may have it.
    }
    std::vector<at::Tensor> more(8);
    std::thread other([&] {
      for (auto& result : more) result = pool.empty({kLarge / 4}, at::kFloat, group).fill_(-1);
    });
    other.join();
    for (std::size_t i = 0; i < alive.size(); ++i) {
      const auto value = static_cast<double>(i / 3 * 4 + i % 3);
      EXPECT_TRUE(alive[i].eq(value).all().item<bool>()) << i;
      for (std::size_t k = 0; k < more.size(); ++k)
        EXPECT_NE(alive[i].storage().data(), more[k].storage().data()) << i << " and " << k;
    }
    for (std::size_t i = 0; i < more.size(); ++i) {
      for (std::size_t k = 0; k < i; ++k) EXPECT_NE(more[i].data_ptr(), more[k].data_ptr());
    }
  });
}

// As a program meets it: the pieces of tensors that are alive keep their values while others come and go.
TEST(ResultPool, TensorsKeepTheirValuesWhileOthersComeAndGo) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    std::vector<at::Tensor> kept;
    for (int i = 0; i < 6; ++i) {
      const auto x = distribute_tensor(waves({256, 512}, i), mesh, {Shard(0)});
      kept.push_back(redistribute(x, {Replicate()}));
      redistribute(kept.back() * 2, {Shard(1)});
    }
    for (int i = 0; i < 6; ++i) expect_whole(kept[static_cast<std::size_t>(i)], waves({256, 512}, i), "kept");
  });
}

}  // namespace
}  // namespace lockstep
