// Memory taken from a stopped rank. The rank is played by a second mapping of the segment.
#include "lockstep/host/internal/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "lockstep/base/detail/text.h"

namespace lockstep::comm::internal {
namespace {

constexpr std::size_t kPageBytes = 4096;

class SeveredPages : public ::testing::Test {
 protected:
  void SetUp() override {
    memory_ = static_cast<std::uint8_t*>(arena_.allocate(4 * kPageBytes));
    const auto at = arena_.offset_of(memory_);
    theirs_ = static_cast<std::uint8_t*>(::mmap(nullptr, 4 * kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                                                arena_.segment()->fd(), static_cast<off_t>(at)));
    ASSERT_NE(theirs_, MAP_FAILED);
    std::memset(memory_, 1, 4 * kPageBytes);
  }
  void TearDown() override { ::munmap(theirs_, 4 * kPageBytes); }

  Arena arena_{"lockstep-arena-test", 0, 1};
  std::uint8_t* memory_ = nullptr;
  std::uint8_t* theirs_ = nullptr;
};

// Two operations in flight, buffers that meet in the middle of page 1: both are taken back.
TEST_F(SeveredPages, ABufferThatSharesAPageWithASeveredOneIsSeveredWhole) {
  auto* const first = memory_;
  auto* const second = memory_ + kPageBytes + 512;
  arena_.sever(first, kPageBytes + 512);
  EXPECT_FALSE(arena_.contains(second, 2 * kPageBytes));
  EXPECT_TRUE(arena_.in_heap(second, 2 * kPageBytes));
  arena_.sever(second, 2 * kPageBytes);
  std::memset(theirs_, 9, 4 * kPageBytes);  // the stopped rank goes on
  for (const std::size_t page : {0, 1, 2, 3}) EXPECT_EQ(memory_[page * kPageBytes + 600], 1) << page;
}

TEST_F(SeveredPages, WhatWasWrittenAfterTheFirstTimeSurvivesTheSecond) {
  arena_.sever(memory_, 2 * kPageBytes);
  memory_[kPageBytes + 5] = 7;
  arena_.sever(memory_ + kPageBytes, 2 * kPageBytes);
  EXPECT_EQ(memory_[kPageBytes + 5], 7);
  std::memset(theirs_, 9, 4 * kPageBytes);
  EXPECT_EQ(memory_[2 * kPageBytes], 1);
  EXPECT_EQ(memory_[3 * kPageBytes], 9) << "a page of nobody's buffer was severed";
}

}  // namespace
}  // namespace lockstep::comm::internal
