// The ring alone: what goes in comes out, and numbers that cannot be are refused.
#include "lockstep/transport/internal/ring.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "lockstep/base/bytes.h"

namespace lockstep::transport::internal {
namespace {

constexpr std::uint64_t kCapacity = 1024, kLeast = 8, kMost = 400;

struct RingMemory {
  RingControl control{};
  alignas(kLine) std::uint8_t data[kCapacity] = {};
  Ring ring() { return {.control = &control, .data = data, .capacity = kCapacity}; }
};

Bytes record_of(std::uint32_t n_bytes, std::uint8_t value) {
  Bytes record(n_bytes, value);
  std::memcpy(record.data(), &n_bytes, sizeof n_bytes);
  return record;
}

TEST(Ring, RecordsComeOutAsTheyWentInAcrossTheEnd) {
  RingMemory memory;
  RingWriter writer(memory.ring());
  RingReader reader(memory.ring());
  for (std::uint32_t i = 0; i < 500; ++i) {
    const Bytes record = record_of(8 + i * 37 % 393, static_cast<std::uint8_t>(i));
    ASSERT_TRUE(writer.write(record)) << i;
    const std::uint64_t n_bytes = reader.next(kLeast, kMost);
    ASSERT_EQ(n_bytes, record.size());
    Bytes out(n_bytes);
    EXPECT_FALSE(reader.take(out.data(), n_bytes)) << "nobody asked for room";
    EXPECT_EQ(out, record) << i;
    EXPECT_TRUE(reader.empty());
  }
}

TEST(Ring, AFullRingTakesNothingUntilItIsReadAndThenNotifiesTheWriter) {
  RingMemory memory;
  RingWriter writer(memory.ring());
  RingReader reader(memory.ring());
  int written = 0;
  while (writer.write(record_of(64, 1))) ++written;
  EXPECT_EQ(written, 16);
  writer.want_room();
  Bytes out(64);
  int told = 0;
  for (int i = 0; i < written; ++i) {
    ASSERT_EQ(reader.next(kLeast, kMost), 64u);
    told += reader.take(out.data(), 64) ? 1 : 0;
  }
  EXPECT_EQ(told, 1) << "once, when half of it was free";
  EXPECT_TRUE(writer.write(record_of(400, 2)));
}

TEST(Ring, ARecordLargerThanTheRingNeverFits) {
  RingMemory memory;
  RingWriter writer(memory.ring());
  EXPECT_FALSE(writer.write(record_of(kCapacity + 1, 1)));
  EXPECT_TRUE(writer.write(record_of(kCapacity, 1)));
}

TEST(Ring, AReaderRefusesLengthsAndPlacesThatCannotBe) {
  for (const std::uint32_t length : {0u, 7u, 401u, 0xffffffffu}) {
    RingMemory memory;
    RingWriter(memory.ring()).write(record_of(64, 1));
    std::memcpy(memory.data, &length, sizeof length);
    RingReader reader(memory.ring());
    EXPECT_EQ(reader.next(kLeast, kMost), 0u);
    EXPECT_TRUE(reader.broken()) << length;
  }
  for (const std::uint64_t tail : {std::uint64_t{1}, std::uint64_t{63}, kCapacity + 64, ~std::uint64_t{0}}) {
    RingMemory memory;
    memory.control.tail = tail;
    RingReader reader(memory.ring());
    EXPECT_EQ(reader.next(kLeast, kMost), 0u);
    EXPECT_TRUE(reader.broken()) << tail;
  }
  // Longer than what has been published.
  RingMemory memory;
  RingWriter(memory.ring()).write(record_of(64, 1));
  const std::uint32_t longer = 65;
  std::memcpy(memory.data, &longer, sizeof longer);
  RingReader reader(memory.ring());
  EXPECT_EQ(reader.next(kLeast, kMost), 0u);
  EXPECT_TRUE(reader.broken());
}

TEST(Ring, AWriterTakesAHeadThatCannotBeForAFullRing) {
  RingMemory memory;
  RingWriter writer(memory.ring());
  while (writer.write(record_of(64, 1))) continue;
  for (const std::uint64_t head : {~std::uint64_t{0}, std::uint64_t{1} << 40}) {
    memory.control.head = head;
    EXPECT_FALSE(writer.write(record_of(64, 1))) << head;
  }
}

TEST(Ring, AWriterThatDiesBeforeItMovesTheTailHasPublishedNothing) {
  RingMemory memory;
  std::memset(memory.data, 0xee, sizeof memory.data);
  RingReader reader(memory.ring());
  EXPECT_EQ(reader.next(kLeast, kMost), 0u);
  EXPECT_FALSE(reader.broken());
}

TEST(Ring, OneWritesWhileAnotherReads) {
  auto memory = std::make_unique<RingMemory>();
  constexpr std::uint32_t kCount = 50'000;
  std::thread writer([&] {
    RingWriter out(memory->ring());
    for (std::uint32_t i = 0; i < kCount; ++i) {
      const Bytes record = record_of(8 + i % 200, static_cast<std::uint8_t>(i));
      while (!out.write(record)) std::this_thread::yield();
    }
  });
  RingReader in(memory->ring());
  Bytes out(kMost);
  for (std::uint32_t i = 0; i < kCount; ++i) {
    std::uint64_t n_bytes = 0;
    while ((n_bytes = in.next(kLeast, kMost)) == 0 && !in.broken()) std::this_thread::yield();
    ASSERT_EQ(n_bytes, 8 + i % 200);
    in.take(out.data(), n_bytes);
    ASSERT_EQ(out[n_bytes - 1], static_cast<std::uint8_t>(i));
  }
  writer.join();
}

}  // namespace
}  // namespace lockstep::transport::internal
