#include "lockstep/net/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstring>

#include "lockstep/base/call_testing.h"
#include "lockstep/base/error.h"

namespace lockstep::net {
namespace {

using call_testing::kind_of;

constexpr std::size_t kPage = 4096;

std::uint64_t bytes_in_memory(const Segment& segment) {
  struct stat info {};
  ::fstat(segment.fd(), &info);
  return static_cast<std::uint64_t>(info.st_blocks) * 512;
}

base::Fd copy(const Segment& segment) {
  return base::Fd(::fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0));
}

TEST(Segment, BeginsAsZeroAndIsRoundedToPages) {
  const Segment segment = Segment::create("test", kPage + 1);
  EXPECT_EQ(segment.size() % kPage, 0u);
  EXPECT_GE(segment.size(), kPage + 1);
  EXPECT_EQ(segment.data()[segment.size() - 1], 0);
}

TEST(Segment, AnotherProcessSeesTheSameMemory) {
  Segment segment = Segment::create("test", kPage);
  segment.commit(0, kPage);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::memcpy(segment.data(), "child", 5);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(std::memcmp(segment.data(), "child", 5), 0);
}

TEST(Segment, AMappingOfTheDescriptorSeesTheSameMemory) {
  Segment segment = Segment::create("test", kPage);
  segment.commit(0, kPage);
  const Segment other = Segment::from_fd(copy(segment), kPage);
  std::memcpy(segment.data(), "hello", 5);
  EXPECT_EQ(std::memcmp(other.data(), "hello", 5), 0);
}

TEST(Segment, MayBeFarLargerThanMemoryAndTakesOnlyWhatIsCommitted) {
  Segment segment = Segment::create("test", std::size_t{1} << 38);
  EXPECT_EQ(bytes_in_memory(segment), 0u);
  const std::size_t far = std::size_t{1} << 37;
  segment.commit(far, 16 * kPage);
  EXPECT_EQ(bytes_in_memory(segment), 16 * kPage);
  segment.data()[far + 16 * kPage - 1] = 7;
  segment.discard(far + kPage / 2, 2 * kPage);
  EXPECT_EQ(bytes_in_memory(segment), 15 * kPage) << "only whole pages go";
  segment.discard(0, segment.size());
  EXPECT_EQ(bytes_in_memory(segment), 0u);
  EXPECT_EQ(segment.data()[far + 16 * kPage - 1], 0);
}

TEST(Segment, MoreThanThereIsMemoryIsAResourceErrorAndNotACrash) {
  Segment segment = Segment::create("test", 2 * (available_memory() + (1 << 30)));
  EXPECT_EQ(kind_of([&] { segment.commit(0, segment.size()); }), ErrorKind::kResource);
  segment.commit(0, kPage);
  segment.data()[0] = 1;
  EXPECT_GT(available_memory(), 0u);
}

TEST(Segment, ARangeOutsideIsAUsageError) {
  Segment segment = Segment::create("test", kPage);
  EXPECT_EQ(kind_of([&] { segment.commit(0, segment.size() + 1); }), ErrorKind::kUsage);
  EXPECT_EQ(kind_of([&] { segment.commit(segment.size() + 1, 0); }), ErrorKind::kUsage);
  EXPECT_EQ(kind_of([&] { segment.commit(kPage, ~std::size_t{0}); }), ErrorKind::kUsage);
  EXPECT_EQ(kind_of([&] { segment.discard(1, segment.size()); }), ErrorKind::kUsage);
  EXPECT_EQ(kind_of([&] { Segment::create("test", 0); }), ErrorKind::kUsage);
  EXPECT_EQ(kind_of([&] { Segment::create("test", ~std::size_t{0}); }), ErrorKind::kUsage);
}

TEST(Segment, CannotBeResizedOnceMade) {
  const Segment segment = Segment::create("test", kPage);
  EXPECT_NE(::ftruncate(segment.fd(), 0), 0);
  EXPECT_NE(::ftruncate(segment.fd(), 2 * kPage), 0);
}

TEST(Segment, APeersDescriptorIsCheckedBeforeItIsMapped) {
  const Segment segment = Segment::create("test", kPage);
  EXPECT_EQ(kind_of([&] { Segment::from_fd(copy(segment), 2 * kPage); }), ErrorKind::kUsage) << "wrong size";
  EXPECT_EQ(kind_of([&] { Segment::from_fd(copy(segment), 0); }), ErrorKind::kUsage);
  base::Fd loose(::memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(loose.get(), kPage), 0);
  EXPECT_EQ(kind_of([&] { Segment::from_fd(base::Fd(::dup(loose.get())), kPage); }), ErrorKind::kUsage)
      << "may shrink";
  ASSERT_EQ(::fcntl(loose.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE), 0);
  EXPECT_EQ(kind_of([&] { Segment::from_fd(std::move(loose), kPage); }), ErrorKind::kUsage) << "read only";
  EXPECT_EQ(kind_of([] { Segment::from_fd(base::Fd(::open("/dev/null", O_RDWR | O_CLOEXEC)), kPage); }),
            ErrorKind::kUsage);
  EXPECT_EQ(kind_of([] { Segment::from_fd(base::Fd(), kPage); }), ErrorKind::kUsage);
}

TEST(Segment, PrivatePagesKeepTheirContentAndPartFromTheOthers) {
  Segment mine = Segment::create("test", 4 * kPage);
  const Segment theirs = Segment::from_fd(copy(mine), 4 * kPage);
  for (std::size_t page = 0; page < 4; ++page)
    mine.data()[page * kPage] = static_cast<std::uint8_t>(page + 1);
  mine.make_private(kPage + 10, kPage);  // touches the second and the third page
  for (std::size_t page = 0; page < 4; ++page) theirs.data()[page * kPage] = 99;
  EXPECT_EQ(mine.data()[0], 99);
  EXPECT_EQ(mine.data()[kPage], 2);
  EXPECT_EQ(mine.data()[2 * kPage], 3);
  EXPECT_EQ(mine.data()[3 * kPage], 99);
  mine.data()[kPage] = 7;
  EXPECT_EQ(theirs.data()[kPage], 99);
}

TEST(Segment, MovesAndLeavesNothingBehind) {
  Segment a = Segment::create("test", kPage);
  std::uint8_t* data = a.data();
  Segment b = std::move(a);
  EXPECT_FALSE(a);
  EXPECT_EQ(b.data(), data);
  a = std::move(b);
  EXPECT_EQ(a.data(), data);
}

}  // namespace
}  // namespace lockstep::net
