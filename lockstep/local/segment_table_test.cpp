#include "lockstep/local/segment_table.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/base/fork_testing.h"

namespace lockstep::local {
namespace {

using fork_testing::Children;

constexpr std::size_t kBytes = 1 << 20;

base::Fd copy_of(int fd) {
  return base::Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

SegmentTable& table() {
  return SegmentTable::of_process();
}

TEST(SegmentTable, WhatThisProcessMadeIsMappedOnce) {
  const Mapping made = table().create("test", kBytes);
  EXPECT_EQ(table().map(copy_of(made->fd()), kBytes), made);
  EXPECT_EQ(table().find(SegmentTable::id_of(*made)), made);
  const Mapping other = table().create("test", kBytes);
  EXPECT_NE(SegmentTable::id_of(*other), SegmentTable::id_of(*made));
  EXPECT_EQ(table().map(copy_of(other->fd()), kBytes), other);
}

TEST(SegmentTable, DoesNotKeepASegmentAlive) {
  Mapping made = table().create("test", kBytes);
  const SegmentId id = SegmentTable::id_of(*made);
  const base::Fd copy = copy_of(made->fd());
  made.reset();
  EXPECT_EQ(table().find(id), nullptr);
  const Mapping again = table().map(copy_of(copy.get()), kBytes);
  ASSERT_TRUE(again);
  EXPECT_NE(table().map(copy_of(copy.get()), kBytes), again) << "it is nobody's here any more";
}

TEST(SegmentTable, ASizeThatIsNotTheSegmentsIsRefusedAlsoForOnesOwn) {
  const Mapping made = table().create("test", kBytes);
  EXPECT_THROW(table().map(copy_of(made->fd()), 2 * kBytes), Error);
}

TEST(SegmentTable, MemoryThatIsNotSealedIsRejected) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const base::Fd writing(ends[1]);
  EXPECT_THROW(table().map(base::Fd(ends[0]), kBytes), Error);
  EXPECT_THROW(table().map(base::Fd(), kBytes), Error);
}

TEST(SegmentTable, AForkedChildMapsItsParentsSegmentsAgain) {
  const Mapping made = table().create("test", kBytes);
  made->data()[0] = 1;
  const SegmentId id = SegmentTable::id_of(*made);
  Children children;
  children.start([&] {
    CHILD_EXPECT(!table().find(id), "the child did not make it");
    const Mapping mapped = table().map(copy_of(made->fd()), kBytes);
    CHILD_EXPECT(mapped != made, "the parent may have made pages private");
    CHILD_EXPECT(mapped->data()[0] == 1, "it is the same memory");
    mapped->data()[1] = 2;
    const Mapping own = table().create("test", kBytes);
    CHILD_EXPECT(table().map(copy_of(own->fd()), kBytes) == own, "it has a table of its own");
  });
  EXPECT_EQ(children.status(0), 0);
  EXPECT_EQ(made->data()[1], 2);
}

}  // namespace
}  // namespace lockstep::local
