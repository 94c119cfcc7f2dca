// What the tables of all engines share, by itself.
#include "lockstep/engine/plugin.h"

#include <gtest/gtest.h>

#include <cstring>
#include <new>
#include <string>

namespace lockstep::comm {
namespace {

TEST(Plugin, TextIsTruncatedToTheBufferAndTerminated) {
  char buffer[4] = {'x', 'x', 'x', 'x'};
  put(buffer, sizeof buffer, "abcdef");
  EXPECT_STREQ(buffer, "abc");
  put(buffer, 1, "abc");
  EXPECT_STREQ(buffer, "");
  put(buffer, 0, "abc");
  put(nullptr, 4, "abc");
}

TEST(Plugin, CapabilitiesFitAnOlderCaller) {
  const auto all = all_kinds([](lockstep_dtype dtype, lockstep_reduce_op op) {
    return dtype == LOCKSTEP_F32 && op == LOCKSTEP_MAX;
  });
  EXPECT_EQ(all.op_kinds, (1u << LOCKSTEP_OP_KINDS) - 1);
  EXPECT_EQ(all.reduce[LOCKSTEP_F32], 1u << LOCKSTEP_MAX);
  EXPECT_EQ(all.reduce[LOCKSTEP_I32], 0u);
  lockstep_capabilities old;
  std::memset(&old, 0xEE, sizeof old);
  old.struct_size = offsetof(lockstep_capabilities, dtypes);
  EXPECT_EQ(give_capabilities(all, &old), LOCKSTEP_OK);
  EXPECT_EQ(old.struct_size, offsetof(lockstep_capabilities, dtypes));
  EXPECT_EQ(old.op_kinds, all.op_kinds);
  EXPECT_EQ(old.dtypes, 0xEEEEEEEEu) << "beyond what the caller has";
}

TEST(Plugin, NothingIsThrownAcrossTheTable) {
  const auto explain = [] {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      return LOCKSTEP_RESOURCE;
    } catch (...) {
      return LOCKSTEP_INTERNAL;
    }
  };
  EXPECT_EQ(guarded([]() -> lockstep_status { throw std::bad_alloc(); }, explain), LOCKSTEP_RESOURCE);
  EXPECT_EQ(guarded([]() -> lockstep_status { throw 1; }, explain), LOCKSTEP_INTERNAL);
  EXPECT_EQ(guarded([] { return LOCKSTEP_TIMEOUT; }, explain), LOCKSTEP_TIMEOUT);
}

TEST(Plugin, ACallIsCheckedBeforeTheEngineLooksAtIt) {
  const auto all = all_kinds([](auto, auto) { return true; });
  float buffer[2] = {};
  lockstep_op good{};
  good.struct_size = sizeof good;
  good.kind = LOCKSTEP_ALL_REDUCE;
  good.dtype = LOCKSTEP_F32;
  good.send = good.recv = buffer;
  good.count = 2;
  EXPECT_EQ(wrong_with(good, 0, 2, all), nullptr);
  const auto wrong = [&](auto change, const lockstep_capabilities& capabilities) {
    lockstep_op op = good;
    change(op);
    const char* words = wrong_with(op, 1, 2, capabilities);
    return std::string(words != nullptr ? words : "");
  };
  EXPECT_EQ(wrong([](auto& op) { op.struct_size = 8; }, all), "the operation's struct_size is too small");
  EXPECT_EQ(wrong([](auto& op) { op.kind = static_cast<lockstep_op_kind>(99); }, all), "unknown operation");
  EXPECT_EQ(wrong([](auto& op) { op.count = kMaxElements; }, all), "too many elements");
  EXPECT_EQ(wrong([](auto& op) { op.recv = nullptr; }, all), "a buffer is null");
  EXPECT_EQ(wrong([](auto& op) { op.kind = LOCKSTEP_REDUCE, op.recv = nullptr; }, all), "")
      << "only the root receives";
  EXPECT_EQ(wrong([](auto& op) { op.kind = LOCKSTEP_BROADCAST, op.root = 2; }, all),
            "the root is not a rank of the group");
  EXPECT_EQ(wrong([](auto& op) { op.kind = LOCKSTEP_RECV, op.root = -1; }, all), "") << "from any rank";
  EXPECT_EQ(wrong([](auto& op) { op.kind = LOCKSTEP_SEND, op.root = -1; }, all),
            "the peer is not a rank of the group");
  EXPECT_EQ(wrong([](auto& op) { op.kind = LOCKSTEP_ALL_TO_ALL_V; }, all), "the counts are missing");
  EXPECT_EQ(wrong([](auto& op) { op.device_kind = LOCKSTEP_CUDA; }, all),
            "the engine does not take memory of this device");
  lockstep_capabilities few{};
  EXPECT_EQ(wrong([](auto&) {}, few), "the engine does not offer this operation");
}

TEST(Plugin, AnEngineThatNamesNoKindOfMemoryTakesHostMemoryAlone) {
  lockstep_capabilities capabilities{};
  EXPECT_TRUE(takes_memory(capabilities, LOCKSTEP_HOST_MEMORY));
  EXPECT_FALSE(takes_memory(capabilities, LOCKSTEP_CUDA));
  capabilities.device_kinds = 1u << LOCKSTEP_CUDA;
  EXPECT_FALSE(takes_memory(capabilities, LOCKSTEP_HOST_MEMORY));
  EXPECT_TRUE(takes_memory(capabilities, LOCKSTEP_CUDA));
  EXPECT_FALSE(takes_memory(capabilities, LOCKSTEP_DEVICE_KINDS));
}

TEST(Plugin, SizesOfAllTypesAreKnown) {
  for (int d = 0; d < LOCKSTEP_DTYPES; ++d) EXPECT_NE(size_of(static_cast<lockstep_dtype>(d)), 0u);
  EXPECT_EQ(size_of(LOCKSTEP_DTYPES), 0u);
  EXPECT_EQ(size_of(LOCKSTEP_BF16), 2u);
}

}  // namespace
}  // namespace lockstep::comm
