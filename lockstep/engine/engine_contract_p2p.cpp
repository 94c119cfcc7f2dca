// Send and receive: matching, order, sizes, and that they stand beside the order of collectives.
#include "lockstep/engine/engine_contract_case.h"

namespace lockstep::comm {
namespace {

using Ints = std::vector<std::int32_t>;

lockstep_op send_op(const Ints& data, int to, int tag) {
  auto op = testing::EngineRank::op(LOCKSTEP_SEND, data.data(), nullptr, data.size(), LOCKSTEP_I32);
  op.root = to;
  op.tag = tag;
  return op;
}

lockstep_op recv_op(Ints& data, int from, int tag, std::int32_t* source = nullptr) {
  auto op = testing::EngineRank::op(LOCKSTEP_RECV, nullptr, data.data(), data.size(), LOCKSTEP_I32);
  op.root = from;
  op.tag = tag;
  op.source = source;
  return op;
}

Ints numbers(std::size_t n, int seed) {
  Ints data(n);
  for (std::size_t i = 0; i < n; ++i) data[i] = seed * 1000 + static_cast<int>(i % 997);
  return data;
}

#define NEEDS_P2P LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_SEND, LOCKSTEP_RECV)

TEST_P(EngineContract, MessagesOfAnySizeArriveWhole) {
  NEEDS_P2P;
  constexpr std::size_t kCounts[] = {0,    1,    11,     12,     13,      255,    257,
                                     2047, 2049, 65'000, 65'537, 262'145, 1 << 20};
  on_ranks(2, [&](Rank& rank) {
    for (const std::size_t count : kCounts) {
      for (int posted = 0; posted < 2; ++posted) {
        const int seed = static_cast<int>(count % 89) + posted;
        if (rank.rank() == 0) {
          const Ints data = numbers(count, seed);
          ASSERT_EQ(rank.call(send_op(data, 1, 3), posted == 1), LOCKSTEP_OK) << rank.error();
        } else {
          GuardedBuffer buffer(rank, count * 4, false);
          auto op = Rank::op(LOCKSTEP_RECV, nullptr, buffer.data(), count, LOCKSTEP_I32);
          op.tag = 3;
          ASSERT_EQ(rank.call(op, posted == 1), LOCKSTEP_OK) << rank.error();
          const Ints want = numbers(count, seed);
          EXPECT_TRUE(count == 0 || std::memcmp(buffer.data(), want.data(), count * 4) == 0) << count;
          EXPECT_TRUE(buffer.margins_whole()) << count;
        }
      }
    }
  });
}

TEST_P(EngineContract, EveryRankSendsToEveryOtherInOppositeOrder) {
  NEEDS_P2P;
  on_all_sizes([&](Rank& rank) {
    for (const std::size_t count : {3u, 50'000u}) {
      const Ints mine = numbers(count, rank.rank());
      std::vector<Ints> theirs(static_cast<std::size_t>(rank.size()), Ints(count));
      std::vector<lockstep_handle*> handles;
      for (int r = 0; r < rank.size(); ++r) handles.push_back(rank.post(send_op(mine, r, 5)));
      for (int r = rank.size() - 1; r >= 0; --r)
        handles.push_back(rank.post(recv_op(theirs[static_cast<std::size_t>(r)], r, 5)));
      for (auto* handle : handles) ASSERT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
      for (int r = 0; r < rank.size(); ++r)
        EXPECT_EQ(theirs[static_cast<std::size_t>(r)], numbers(count, r)) << "from rank " << r;
    }
  });
}

TEST_P(EngineContract, MessagesOfOneTagKeepTheirOrderAndTagsKeepApart) {
  NEEDS_P2P;
  on_ranks(2, [&](Rank& rank) {
    constexpr int kEach = 40;
    constexpr std::size_t kSizes[] = {1, 3000, 20, 100'000};
    std::vector<Ints> data;
    std::vector<lockstep_handle*> handles;
    if (rank.rank() == 0) {
      for (int i = 0; i < 2 * kEach; ++i)
        data.push_back(numbers(kSizes[static_cast<std::size_t>(i / 2) % 4], i));
      for (int i = 0; i < 2 * kEach; ++i)
        handles.push_back(rank.post(send_op(data[static_cast<std::size_t>(i)], 1, i % 2)));
    } else {
      for (int i = 0; i < 2 * kEach; ++i) data.emplace_back(kSizes[static_cast<std::size_t>(i % kEach) % 4]);
      for (int i = 0; i < 2 * kEach; ++i)  // all of tag 1 before any of tag 0
        handles.push_back(rank.post(recv_op(data[static_cast<std::size_t>(i)], 0, i < kEach ? 1 : 0)));
    }
    for (auto* handle : handles) ASSERT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
    for (int i = 0; rank.rank() == 1 && i < 2 * kEach; ++i) {
      const int sent = i < kEach ? 2 * i + 1 : 2 * (i - kEach);
      EXPECT_EQ(data[static_cast<std::size_t>(i)], numbers(data[static_cast<std::size_t>(i)].size(), sent))
          << "message " << i;
    }
  });
}

// Under the second tag messages already wait, unasked for, when the first tag's reader fetches more of them.
TEST_P(EngineContract, AnUnexpectedMessageIsNotOvertaken) {
  NEEDS_P2P;
  on_ranks(2, [&](Rank& rank) {
    constexpr int kRounds = 200, kEach = 12;
    for (int round = 0; round < kRounds; ++round) {
      std::vector<Ints> data;
      std::vector<lockstep_handle*> handles;
      for (int i = 0; i < 2 * kEach; ++i) data.push_back(rank.rank() == 0 ? numbers(2, round + i) : Ints(2));
      for (int i = 0; i < 2 * kEach; ++i) {
        Ints& one = data[static_cast<std::size_t>(i)];
        if (rank.rank() == 0) {
          handles.push_back(rank.post(send_op(one, 1, i % 2)));
          if (i == round % kEach) rank.word(0) = round + 1;  // the reader comes in the middle of it
        } else {
          if (i == 0) rank.await(0, round + 1);
          handles.push_back(rank.post(recv_op(one, 0, i < kEach ? 1 : 0)));
        }
      }
      for (auto* handle : handles) ASSERT_EQ(rank.finish(handle), LOCKSTEP_OK) << rank.error();
      for (int i = 0; rank.rank() == 1 && i < 2 * kEach; ++i) {
        const int sent = i < kEach ? 2 * i + 1 : 2 * (i - kEach);
        ASSERT_EQ(data[static_cast<std::size_t>(i)], numbers(2, round + sent))
            << "round " << round << ", message " << i;
      }
    }
  });
}

TEST_P(EngineContract, AReceiveFromAnySourceGetsEachMessageAndItsSource) {
  NEEDS_P2P;
  on_all_sizes([&](Rank& rank) {
    for (const std::size_t count : {2u, 70'000u}) {
      const auto tag = static_cast<std::int32_t>(count);  // a sender may be a message ahead of the others
      if (rank.rank() != 0) {
        const Ints mine = numbers(count, rank.rank());
        ASSERT_EQ(rank.run(send_op(mine, 0, tag)), LOCKSTEP_OK) << rank.error();
        continue;
      }
      std::vector<int> heard(static_cast<std::size_t>(rank.size()));
      for (int i = 1; i < rank.size(); ++i) {
        Ints data(count);
        std::int32_t source = -7;
        ASSERT_EQ(rank.call(recv_op(data, -1, tag, &source), i % 2 == 0), LOCKSTEP_OK) << rank.error();
        ASSERT_TRUE(source > 0 && source < rank.size()) << source;
        ++heard[static_cast<std::size_t>(source)];
        EXPECT_EQ(data, numbers(count, source));
      }
      for (int r = 1; r < rank.size(); ++r) EXPECT_EQ(heard[static_cast<std::size_t>(r)], 1) << "rank " << r;
    }
  });
}

TEST_P(EngineContract, ARankMaySendToItself) {
  NEEDS_P2P;
  on_ranks(2, [&](Rank& rank) {
    for (const std::size_t count : {0u, 4u, 300'000u}) {
      const Ints mine = numbers(count, 7 + rank.rank());
      Ints got(count);
      std::int32_t source = -1;
      auto* const sent = rank.post(send_op(mine, rank.rank(), 1));
      auto* const received = rank.post(recv_op(got, rank.rank(), 1, &source));
      ASSERT_EQ(rank.finish(received), LOCKSTEP_OK) << rank.error();
      ASSERT_EQ(rank.finish(sent), LOCKSTEP_OK) << rank.error();
      EXPECT_EQ(got, mine);
      EXPECT_EQ(source, rank.rank());
    }
  });
}

// The receiver gets the error from its call, the sender from its own or, when that was over before anyone
// looked, by the next: the communicator is broken, as it is when ranks call different collectives.
TEST_P(EngineContract, AMessageOfAnotherSizeOrTypeFailsOnBothSidesAndOverrunsNothing) {
  NEEDS_P2P;
  struct Mismatch {
    std::size_t sent, wanted;
    lockstep_dtype dtype;  // of the receive; int32 is sent
  };
  for (const Mismatch& one :
       {Mismatch{10, 4, LOCKSTEP_I32}, Mismatch{4, 10, LOCKSTEP_I32}, Mismatch{200'000, 1000, LOCKSTEP_I32},
        Mismatch{1000, 200'000, LOCKSTEP_I32}, Mismatch{0, 1, LOCKSTEP_I32}, Mismatch{10, 10, LOCKSTEP_F32},
        Mismatch{200'000, 200'000, LOCKSTEP_F32}, Mismatch{10, 20, LOCKSTEP_I16}}) {
    on_ranks(2, [&](Rank& rank) {
      const std::string what = base::cat(one.sent, " into ", one.wanted, " of type ", one.dtype, ": ");
      if (rank.rank() == 0) {
        const Ints data = numbers(one.sent, 1);
        auto* const handle = rank.post(send_op(data, 1, 0));
        rank.await(0, 1);
        const auto status = rank.finish(handle);
        EXPECT_TRUE(status == LOCKSTEP_OK || status == LOCKSTEP_USAGE) << what << status;
      } else {
        GuardedBuffer buffer(rank, one.wanted * 4, false);
        auto op = Rank::op(LOCKSTEP_RECV, nullptr, buffer.data(), one.wanted, one.dtype);
        EXPECT_EQ(rank.run(op), LOCKSTEP_USAGE) << what << rank.error();
        EXPECT_TRUE(buffer.margins_whole());
        rank.word(0) = 1;
      }
      EXPECT_EQ(rank.barrier(), LOCKSTEP_USAGE) << what << rank.error();
      const std::string error = rank.failure().error;
      for (const std::string& part : {base::cat(one.sent, " elements"), base::cat(one.wanted, " elements"),
                                      std::string("send"), std::string("recv")})
        EXPECT_NE(error.find(part), std::string::npos) << what << error;
    });
  }
}

// A message goes through while a collective that was posted before it, or that the other side has not
// entered, waits.
TEST_P(EngineContract, MessagesDoNotWaitForCollectives) {
  NEEDS_P2P;
  for (const std::size_t count : {5u, 400'000u}) {
    on_ranks(2, [&](Rank& rank) {
      PlainOp reduce(rank, LOCKSTEP_ALL_REDUCE, 20'000);
      const Ints mine = numbers(count, rank.rank());
      Ints theirs(count);
      lockstep_handle* early = rank.rank() == 0 ? rank.post(reduce.op) : nullptr;
      auto* const sent = rank.post(send_op(mine, 1 - rank.rank(), 0));
      auto* const received = rank.post(recv_op(theirs, 1 - rank.rank(), 0));
      ASSERT_EQ(rank.finish(received), LOCKSTEP_OK) << rank.error();
      ASSERT_EQ(rank.finish(sent), LOCKSTEP_OK) << rank.error();
      EXPECT_EQ(theirs, numbers(count, 1 - rank.rank()));
      if (early != nullptr) {
        EXPECT_EQ(rank.table().test(early), LOCKSTEP_PENDING);
      }
      rank.meet();
      if (early == nullptr) early = rank.post(reduce.op);
      EXPECT_EQ(rank.finish(early), LOCKSTEP_OK) << rank.error();
    });
  }
}

TEST_P(EngineContract, CollectivesDoNotWaitForMessages) {
  NEEDS_P2P;
  on_ranks(3, [&](Rank& rank) {
    const Ints mine = numbers(300'000, rank.rank());
    Ints theirs(300'000);
    const int next = (rank.rank() + 1) % 3, last = (rank.rank() + 2) % 3;
    auto* const received = rank.post(recv_op(theirs, last, 2));
    for (int i = 0; i < 20; ++i) {
      PlainOp reduce(rank, LOCKSTEP_ALL_REDUCE, i % 2 == 0 ? 10 : 30'000);
      ASSERT_EQ(rank.call(reduce.op, i % 4 < 2), LOCKSTEP_OK) << rank.error();
    }
    EXPECT_EQ(rank.table().test(received), LOCKSTEP_PENDING);
    rank.meet();
    ASSERT_EQ(rank.run(send_op(mine, next, 2)), LOCKSTEP_OK) << rank.error();
    ASSERT_EQ(rank.finish(received), LOCKSTEP_OK) << rank.error();
    EXPECT_EQ(theirs, numbers(300'000, last));
  });
}

TEST_P(EngineContract, ManyMessagesAndCollectivesInFlightAllArrive) {
  NEEDS_P2P;
  on_all_sizes([&](Rank& rank) {
    constexpr int kMessages = 150;
    const int next = (rank.rank() + 1) % rank.size(), last = (rank.rank() + rank.size() - 1) % rank.size();
    std::vector<Ints> sent, got;
    std::vector<lockstep_handle*> handles;
    std::vector<std::unique_ptr<PlainOp>> reduces;
    for (int i = 0; i < kMessages; ++i) {
      const std::size_t count = i % 10 == 0 ? 20'000 : static_cast<std::size_t>(i);
      sent.push_back(numbers(count, rank.rank() + i));
      got.emplace_back(count);
    }
    for (int i = 0; i < kMessages; ++i) {
      handles.push_back(rank.post(send_op(sent[static_cast<std::size_t>(i)], next, i % 3)));
      if (i % 15 == 0) {
        reduces.push_back(std::make_unique<PlainOp>(rank, LOCKSTEP_ALL_REDUCE, 3000));
        handles.push_back(rank.post(reduces.back()->op));
      }
      handles.push_back(rank.post(recv_op(got[static_cast<std::size_t>(i)], last, i % 3)));
    }
    for (auto handle = handles.rbegin(); handle != handles.rend(); ++handle)
      ASSERT_EQ(rank.finish(*handle), LOCKSTEP_OK) << rank.error();
    for (int i = 0; i < kMessages; ++i) {
      EXPECT_EQ(got[static_cast<std::size_t>(i)], numbers(got[static_cast<std::size_t>(i)].size(), last + i));
    }
  });
}

}  // namespace
}  // namespace lockstep::comm
