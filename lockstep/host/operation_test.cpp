// One operation, step by step, on ranks that this thread plays in turn: what no schedule of real ranks reaches
// for certain.
#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <thread>

#include "lockstep/host/internal/operation.h"
#include "lockstep/host/test_world.h"

namespace lockstep::comm::internal {
namespace {

// Two ranks that have met.
class Pair {
 public:
  Pair() : space_(kv_) {
    std::array<std::thread, 2> threads;
    for (int r = 0; r < 2; ++r) threads[static_cast<std::size_t>(r)] = std::thread([this, r] { join(r); });
    for (auto& thread : threads) thread.join();
  }
  CommMembers& operator[](std::size_t rank) { return *members_[rank]; }

 private:
  void join(int rank) {
    const lockstep_comm_config config{
        .struct_size = sizeof(config),
        .host = space_.host(),
        .rank = rank,
        .size = 2,
        .name = "pair",
        .deadline_ns = Deadline::after(testing::kPatience).monotonic_ns(),
    };
    const auto at = static_cast<std::size_t>(rank);
    peers_[at] = HostPeers::join(config);
    members_[at] = std::make_unique<CommMembers>(*peers_[at]);
  }

  testing::MapKv kv_;
  testing::KvSpace space_;
  std::array<std::unique_ptr<HostPeers>, 2> peers_;
  std::array<std::unique_ptr<CommMembers>, 2> members_;
};

class SmallOperation : public ::testing::TestWithParam<lockstep_op_kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, SmallOperation,
                         ::testing::Values(LOCKSTEP_ALL_GATHER, LOCKSTEP_GATHER, LOCKSTEP_ALL_TO_ALL));

TEST_P(SmallOperation, ThatIsDoneHasItsResultThoughTheGroupBrokeMeanwhile) {
  const auto kind = GetParam();
  Pair pair;
  const std::array<std::int32_t, 2> sent[2] = {{1, 2}, {3, 4}};
  std::array<std::int32_t, 4> got[2] = {};
  const std::uint64_t count = kind == LOCKSTEP_ALL_TO_ALL ? 1 : 2;
  const auto call = [&](std::size_t r) {
    return Operation(testing::EngineRank::op(kind, sent[r].data(), got[r].data(), count, LOCKSTEP_I32));
  };
  Operation first = call(0), second = call(1);
  first.start(pair[0], 1);
  second.start(pair[1], 1);
  pair[0].own().broken.store(1);
  Workspace work(2);
  ASSERT_EQ(first.advance(pair[0], work), Progress::kDone);
  const std::array<std::int32_t, 4> gathered{1, 2, 3, 4}, exchanged{1, 3, 0, 0};
  EXPECT_EQ(got[0], kind == LOCKSTEP_ALL_TO_ALL ? exchanged : gathered);
}

// 4 MiB of rows in two parts: as often as it looks, it looks before the end.
class Rows : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kRows = 64;
  Rows() : buffer_(1 << 20), parts_{1 << 20, 3 << 20} { std::iota(buffer_.begin(), buffer_.end(), 0); }
  std::vector<std::uint32_t> buffer_;
  const std::vector<std::uint64_t> parts_;
  std::atomic<std::uint32_t> broken_{0};
};

TEST_F(Rows, ThatAreUnpackedAreWhatWasPacked) {
  const auto packed = pack_rows(buffer_.data(), kRows, parts_, broken_, Deadline::never());
  ASSERT_NE(packed, nullptr);
  // The first row of the second part follows the last of the first.
  std::uint32_t word = 0;
  std::memcpy(&word, packed.get() + parts_[0], sizeof word);
  EXPECT_EQ(word, parts_[0] / kRows / sizeof word);
  std::vector<std::uint32_t> back(buffer_.size());
  ASSERT_TRUE(unpack_rows(back.data(), kRows, parts_, packed.get(), broken_));
  EXPECT_EQ(back, buffer_);
}

TEST_F(Rows, AreNotPackedToTheEndInABrokenGroup) {
  const auto packed = pack_rows(buffer_.data(), kRows, parts_, broken_, Deadline::never());
  broken_ = 1;
  EXPECT_EQ(pack_rows(buffer_.data(), kRows, parts_, broken_, Deadline::never()), nullptr);
  EXPECT_FALSE(unpack_rows(buffer_.data(), kRows, parts_, packed.get(), broken_));
}

TEST_F(Rows, AreNotPackedToTheEndWhenTheTimeIsUp) {
  EXPECT_EQ(pack_rows(buffer_.data(), kRows, parts_, broken_, Deadline::now()), nullptr);
}

TEST_F(Rows, ThatAreFewArePackedWithoutALookAtTheClock) {
  const std::vector<std::uint64_t> few{1 << 10, 2 << 10};
  EXPECT_NE(pack_rows(buffer_.data(), kRows, few, broken_, Deadline::now()), nullptr);
}

// Another rank that does not know yet that this one fails would take a part for the whole.
TEST(Operation, DoesNotArriveWithRowsThatItCouldNotPack) {
  pretend_processes = true;  // rows of another process are packed
  Pair pair;
  pretend_processes = false;
  const std::vector<float> sent(1 << 20);
  std::vector<float> got(sent.size());
  const std::uint64_t counts[2] = {sent.size() / 2, sent.size() / 2};
  auto op = testing::EngineRank::op(LOCKSTEP_ALL_TO_ALL_V, sent.data(), got.data(), 0);
  op.send_counts = op.recv_counts = counts;
  op.send_rows = 4;
  op.deadline_ns = 1;  // long ago
  Operation operation(op);
  operation.take_counts(0, 2);
  EXPECT_THROW(operation.start(pair[0], 1), Error);
  EXPECT_EQ(pair[1].block(0).arrivals[1].sequence.load(), 0u);
}

}  // namespace
}  // namespace lockstep::comm::internal
