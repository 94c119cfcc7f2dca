// Records alone: messages through a message heap and back, and records whose numbers point outside.
#include "lockstep/transport/internal/record.h"

#include <gtest/gtest.h>

#include <cstring>

#include "lockstep/base/fork_testing.h"
#include "lockstep/transport/transport_contract.h"

namespace lockstep::transport::internal {
namespace {

class Records : public testing::Test {
 protected:
  Decoded decode(const Bytes& record) {
    const Buffer copy(record.size());
    if (!record.empty()) std::memcpy(copy.data(), record.data(), record.size());
    return decode_record(copy, record.size(), {.heap = heap_.mapping(), .max_message_bytes = kLimit});
  }
  static constexpr std::uint64_t kLimit = 8 << 20;
  MessageHeap heap_{64 << 20};
  const std::shared_ptr<Holder> holder_ = std::make_shared<Holder>();
};

TEST_F(Records, MessagesComeBackAndTheirMemoryWithThem) {
  const std::vector<std::vector<std::size_t>> lists = {
      {}, {0}, {2048, 2049}, {1 << 20, 3}, {4, 4}, {100'000, 10}, std::vector<std::size_t>(2000, 500)};
  std::uint64_t id = 0;
  for (const auto& list : lists) {
    Bytes record;
    ASSERT_TRUE(encode_record(message_of(++id, 100, list), heap_, holder_, record));
    EXPECT_LE(record.size(), kMaxRingRecord);
    auto decoded = decode(record);
    ASSERT_TRUE(decoded.message) << decoded.error;
    EXPECT_TRUE(is_message(*decoded.message, id, 100, list)) << list.size();
    for (const auto& blob : decoded.message->blobs) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blob.bytes.data()) % kLine, 0u);
    }
    decoded.message.reset();
    EXPECT_EQ(heap_.held_bytes(), 0u) << list.size();
  }
}

// Else the sender would write the next message over what its parent still reads.
TEST_F(Records, AForkedChildGivesNothingBack) {
  Bytes record;
  ASSERT_TRUE(encode_record(message_of(1, 10, {100'000}), heap_, holder_, record));
  auto decoded = decode(record);
  ASSERT_TRUE(decoded.message);
  const auto held = heap_.held_bytes();
  fork_testing::Children children;
  children.start([&] { decoded.message.reset(); });
  EXPECT_EQ(children.status(0), 0);
  EXPECT_EQ(heap_.held_bytes(), held);
  decoded.message.reset();
  EXPECT_EQ(heap_.held_bytes(), 0u);
}

TEST_F(Records, UnreadRecordsAreTakenBack) {
  for (const auto& list :
       {std::vector<std::size_t>{5000, 5000}, std::vector<std::size_t>(3000, 2048), {1 << 20, 10}}) {
    Bytes record;
    ASSERT_TRUE(encode_record(message_of(1, 3000, list), heap_, holder_, record));
    EXPECT_GT(heap_.held_bytes(), 0u);
    take_back_record(heap_, record);
    EXPECT_EQ(heap_.held_bytes(), 0u);
  }
}

TEST_F(Records, WithoutMemoryNothingIsHeld) {
  MessageHeap small(1 << 20);
  Bytes record;
  EXPECT_FALSE(encode_record(message_of(1, 10, {200'000, 900'000}), small, holder_, record));
  EXPECT_EQ(small.held_bytes(), 0u);
}

TEST_F(Records, NumbersThatPointOutsideAreRefused) {
  Bytes good;
  ASSERT_TRUE(encode_record(message_of(1, 10, {10, 3000}), heap_, holder_, good));
  const auto with = [&](std::size_t at, auto value) {
    Bytes bad = good;
    std::memcpy(bad.data() + at, &value, sizeof value);
    return decode(bad);
  };
  constexpr std::size_t kParts = offsetof(RecordHead, n_parts);
  for (const std::uint32_t n : {0u, 1000u, 0xffffffffu}) EXPECT_FALSE(with(kParts, n).message) << n;
  for (std::size_t part = 0; part < 3; ++part) {
    const std::size_t at = sizeof(RecordHead) + part * sizeof(RecordPart);
    for (const std::uint64_t offset : {std::uint64_t{1} << 40, kInHeap, kInHeap | 63, kInHeap | 65,
                                       kInHeap | (64 << 20), ~std::uint64_t{0}}) {
      EXPECT_FALSE(with(at, offset).message) << part << " at " << offset;
    }
    for (const std::uint64_t size : {kLimit + 1, ~std::uint64_t{0}, std::uint64_t{1} << 62}) {
      EXPECT_FALSE(with(at + 8, size).message) << part << " of " << size;
    }
  }
  for (const std::uint8_t elsewhere : {1, 2, 255})
    EXPECT_FALSE(with(offsetof(RecordHead, elsewhere), elsewhere).message);
  for (std::size_t n = 0; n < kMinRecord; ++n)
    EXPECT_FALSE(decode(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(n))).message);
}

TEST_F(Records, ARecordInTheHeapMayNotReferToAnother) {
  Bytes record;
  ASSERT_TRUE(encode_record(message_of(1, 10, std::vector<std::size_t>(100, 1000)), heap_, holder_, record));
  RecordPart part;
  std::memcpy(&part, record.data() + sizeof(RecordHead), sizeof part);
  heap_.at(part.offset & ~kInHeap)[offsetof(RecordHead, elsewhere)] = 1;
  // Read as parts, the first of which is what it says.
  const auto decoded = decode(record);
  if (decoded.message) {
    EXPECT_LE(size_of(*decoded.message), kLimit);
  }
}

}  // namespace
}  // namespace lockstep::transport::internal
