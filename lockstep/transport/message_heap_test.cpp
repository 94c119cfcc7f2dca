// The heap's allocator alone, with receivers that give blocks back, keep them, or die.
#include "lockstep/transport/internal/message_heap.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <set>

#include "lockstep/base/detail/process.h"

namespace lockstep::transport::internal {
namespace {

void give_back(const MessageHeap& heap, std::uint64_t payload) {
  reinterpret_cast<BlockHead*>(heap.at(payload) - sizeof(BlockHead))
      ->held.store(0, std::memory_order_release);
}

TEST(MessageHeap, BlocksAreAlignedAndDoNotOverlap) {
  MessageHeap heap(64 << 20);
  std::mt19937 random(1);
  std::map<std::uint64_t, std::uint64_t> blocks;
  for (int i = 0; i < 300; ++i) {
    const std::uint64_t size = 1 + random() % 100'000;
    const auto at = heap.allocate(size, nullptr);
    ASSERT_TRUE(at);
    EXPECT_EQ(*at % kLine, 0u);
    const auto next = blocks.upper_bound(*at);
    if (next != blocks.end()) {
      EXPECT_LE(*at + size, next->first - sizeof(BlockHead));
    }
    if (next != blocks.begin()) {
      const auto before = std::prev(next);
      EXPECT_LE(before->first + before->second, *at - sizeof(BlockHead));
    }
    blocks[*at] = size;
    std::memset(heap.at(*at), 1, size);
  }
}

TEST(MessageHeap, ABlockThatCameBackIsUsedAgainFirst) {
  MessageHeap heap(256 << 20);
  const auto first = heap.allocate(16 << 20, nullptr);
  const auto second = heap.allocate(16 << 20, nullptr);
  ASSERT_TRUE(first && second);
  EXPECT_NE(*first, *second);
  give_back(heap, *first);
  EXPECT_EQ(heap.allocate(16 << 20, nullptr), first);
  give_back(heap, *second);
  EXPECT_EQ(heap.allocate((16 << 20) - 5000, nullptr), second) << "nearly the same size";
}

TEST(MessageHeap, WhatIsHeldIsNeverHandedOutAgain) {
  MessageHeap heap(16 << 20);
  std::set<std::uint64_t> held;
  while (const auto at = heap.allocate(1 << 20, nullptr)) EXPECT_TRUE(held.insert(*at).second);
  EXPECT_GE(held.size(), 10u);
  EXPECT_EQ(heap.allocate(3000, nullptr).has_value(), true) << "there is a little left";
  give_back(heap, *held.begin());
  EXPECT_EQ(heap.allocate(1 << 20, nullptr), *held.begin());
}

TEST(MessageHeap, MemoryOfOneSizeServesAnotherWhenItIsBack) {
  MessageHeap heap(16 << 20);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::uint64_t> blocks;
    const std::uint64_t size = round % 2 == 0 ? 10'000 : 3 << 20;
    while (const auto at = heap.allocate(size, nullptr)) blocks.push_back(*at);
    EXPECT_GE(blocks.size() * size, 8u << 20) << round;
    for (const std::uint64_t block : blocks) give_back(heap, block);
  }
  EXPECT_EQ(heap.held_bytes(), 0u);
}

TEST(MessageHeap, PagesBeyondTheBoundGoBackToTheSystem) {
  MessageHeap heap(256 << 20, 8 << 20);
  std::vector<std::uint64_t> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(heap.allocate(4 << 20, nullptr).value());
  for (const std::uint64_t block : blocks) give_back(heap, block);
  EXPECT_EQ(heap.held_bytes(), 0u);
  EXPECT_LE(heap.warm_bytes(), 8u << 20);
  EXPECT_GT(heap.warm_bytes(), 0u);
}

TEST(MessageHeap, BlocksOfADeadProcessAreTakenBackThoseOfALivingOneAreNot) {
  MessageHeap heap(64 << 20);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    char byte = 0;
    ::close(pipe[1]);
    [[maybe_unused]] const auto n = ::read(pipe[0], &byte, 1);
    ::_exit(0);
  }
  ::close(pipe[0]);
  const auto holder = std::make_shared<Holder>();
  holder->process = local::PeerProcess(base::open_pidfd(pid), base::Fd());
  ASSERT_TRUE(heap.allocate(1 << 20, holder));
  holder->link_ended = true;
  EXPECT_GT(heap.held_bytes(), 0u) << "its link is over, but it may still read";
  ::close(pipe[1]);
  ::waitpid(pid, nullptr, 0);
  EXPECT_EQ(heap.held_bytes(), 0u);
}

TEST(MessageHeap, WhatCannotBeIsRefused) {
  MessageHeap heap(1 << 20);
  EXPECT_FALSE(heap.allocate(1 << 20, nullptr)) << "no room for its head";
  EXPECT_FALSE(heap.allocate(~std::uint64_t{0}, nullptr));
  EXPECT_FALSE(heap.allocate(std::uint64_t{1} << 60, nullptr));
  heap.take_back(0);
  heap.take_back(12'345);
  EXPECT_TRUE(heap.allocate(500'000, nullptr));
}

}  // namespace
}  // namespace lockstep::transport::internal
