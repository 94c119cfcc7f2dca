#include "lockstep/local/page_heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::local {
namespace {

constexpr std::uint64_t kPage = kPageBytes;

Mapping segment_of(std::uint64_t n_pages) {
  return SegmentTable::of_process().create("test", n_pages * kPage);
}

bool all_zero(const Mapping& segment, std::uint64_t at, std::uint64_t n_bytes) {
  return std::all_of(segment->data() + at, segment->data() + at + n_bytes, [](auto b) { return b == 0; });
}

TEST(PageHeap, HandsOutWholePagesBehindItsBeginUntilNoneIsLeft) {
  PageHeap heap(segment_of(8), 3 * kPage);
  std::set<std::uint64_t> taken;
  while (const auto at = heap.allocate(1)) EXPECT_TRUE(taken.insert(*at).second);
  EXPECT_EQ(taken, (std::set<std::uint64_t>{3 * kPage, 4 * kPage, 5 * kPage, 6 * kPage, 7 * kPage}));
  EXPECT_FALSE(heap.allocate(0)) << "nothing takes a page too";
}

TEST(PageHeap, WhatIsGivenBackIsZeroWhenItIsTakenAgain) {
  const Mapping segment = segment_of(4);
  PageHeap heap(segment, 0);
  const auto at = heap.allocate(4 * kPage);
  std::memset(segment->data() + *at, 1, 4 * kPage);
  heap.free(*at, 4 * kPage);
  EXPECT_EQ(heap.allocate(4 * kPage), at);
  EXPECT_TRUE(all_zero(segment, *at, 4 * kPage));
}

TEST(PageHeap, ExtentsComeBackInPartsAndJoinWithTheirNeighbours) {
  PageHeap heap(segment_of(6), 0);
  const std::uint64_t at = heap.allocate(6 * kPage).value();
  for (const std::uint64_t page : {1, 4, 0, 5, 3, 2}) {
    EXPECT_FALSE(heap.allocate(6 * kPage)) << "page " << page << " is still out";
    heap.free(at + page * kPage, kPage);
  }
  EXPECT_EQ(heap.allocate(6 * kPage), at);
}

TEST(PageHeap, TheSmallestExtentThatFitsIsTaken) {
  PageHeap heap(segment_of(10), 0);
  const std::uint64_t at = heap.allocate(10 * kPage).value();
  heap.free(at, 4 * kPage);
  heap.free(at + 6 * kPage, 2 * kPage);
  EXPECT_EQ(heap.allocate(2 * kPage), at + 6 * kPage);
  EXPECT_EQ(heap.allocate(2 * kPage), at);
}

TEST(PageHeap, SizesThatCannotBeAreNothing) {
  PageHeap heap(segment_of(4), 0);
  for (const std::uint64_t n_bytes : {~std::uint64_t{0}, std::uint64_t{1} << 60, 4 * kPage + 1})
    EXPECT_FALSE(heap.allocate(n_bytes)) << n_bytes;
  EXPECT_TRUE(heap.allocate(4 * kPage));
}

TEST(PageHeap, MemoryThatCannotBeHadIsAnErrorThatTakesNothing) {
  const std::uint64_t n_pages = 2 * (net::available_memory() / kPage + 1);
  if (n_pages * kPage > std::uint64_t{1} << 46) GTEST_SKIP() << "no limit is known here";
  PageHeap heap(segment_of(n_pages), 0);
  for (int i = 0; i < 2; ++i) {
    try {
      heap.allocate(n_pages * kPage);
      ADD_FAILURE() << "twice the memory of this machine was had";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource) << error.what();
    }
  }
  EXPECT_EQ(heap.allocate(kPage), 0u);
}

TEST(PageHeap, KnowsWhichRangesAreInIt) {
  const PageHeap heap(segment_of(4), kPage);
  EXPECT_TRUE(heap.contains(kPage, 3 * kPage));
  EXPECT_TRUE(heap.contains(4 * kPage, 0));
  EXPECT_FALSE(heap.contains(kPage - 1, 1));
  EXPECT_FALSE(heap.contains(kPage, 3 * kPage + 1));
  EXPECT_FALSE(heap.contains(2 * kPage, ~std::uint64_t{0}));
  EXPECT_FALSE(heap.contains(~std::uint64_t{0} - 5, 1)) << "an address before the segment";
}

TEST(PageHeap, ThreadsNeverGetTheSamePages) {
  const Mapping segment = segment_of(256);
  PageHeap heap(segment, 0);
  std::vector<std::thread> threads;
  for (unsigned t = 1; t <= 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 200; ++i) {
        const std::uint64_t n_bytes = (1 + random() % 16) * kPage;
        const auto at = heap.allocate(n_bytes);
        if (!at) continue;
        EXPECT_TRUE(all_zero(segment, *at, n_bytes));
        std::memset(segment->data() + *at, static_cast<int>(t), n_bytes);
        EXPECT_EQ(std::count(segment->data() + *at, segment->data() + *at + n_bytes, t),
                  static_cast<std::ptrdiff_t>(n_bytes));
        heap.free(*at, n_bytes);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(heap.allocate(256 * kPage), 0u) << "all came back";
}

}  // namespace
}  // namespace lockstep::local
