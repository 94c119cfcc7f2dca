// The contenders' check, held against the operations written out on plain vectors.
#include "benchmarks/collective/check.h"

#include <gtest/gtest.h>

#include <functional>
#include <utility>

namespace bench {
namespace {

using Values = std::vector<float>;

Case case_for(Kind kind, int rank, int size) {
  // More than one period per rank, and no multiple of it.
  return {.kind = kind,
          .n_bytes = 1500 * sizeof(float) * static_cast<std::size_t>(size),
          .rank = rank,
          .size = size};
}

Values sent_by(Case which, int rank) {
  which.rank = rank;
  const Values period = pattern(rank, which.size);
  Values values(which.n_send());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = period[i % kPeriod];
  return values;
}

Values part(const Values& values, std::size_t begin, std::size_t n) {
  const auto from = values.begin() + static_cast<std::ptrdiff_t>(begin);
  return {from, from + static_cast<std::ptrdiff_t>(n)};
}

Values sum(const std::vector<Values>& sent) {
  Values total(sent[0].size());
  for (const Values& one : sent)
    std::transform(one.begin(), one.end(), total.begin(), total.begin(), std::plus<>());
  return total;
}

// What the operation gives to which.rank.
Values carried_out(const Case& which) {
  std::vector<Values> sent;
  for (int rank = 0; rank < which.size; ++rank) sent.push_back(sent_by(which, rank));
  const std::size_t n = which.n_block();
  const std::size_t own = n * static_cast<std::size_t>(which.rank);
  Values received;
  switch (which.kind) {
    case Kind::kBarrier:
      break;
    case Kind::kBroadcast:
      return sent[0];
    case Kind::kAllReduce:
    case Kind::kReduce:
      return sum(sent);
    case Kind::kReduceScatter:
      return part(sum(sent), own, n);
    case Kind::kScatter:
      return part(sent[0], own, n);
    case Kind::kSendRecv:
    case Kind::kExchange:
      return sent[static_cast<std::size_t>(which.partner())];
    case Kind::kAllGather:
    case Kind::kGather:
    case Kind::kAllToAll:
      for (const Values& one : sent) {
        const Values block = part(one, which.kind == Kind::kAllToAll ? own : 0, n);
        received.insert(received.end(), block.begin(), block.end());
      }
      if (which.kind == Kind::kGather && which.rank != 0) received.clear();
  }
  return received;
}

TEST(CollectiveCheck, TakesWhatEveryOperationMustGive) {
  for (std::size_t k = 0; k < kKinds.size(); ++k) {
    for (const int size : {2, 4, 8}) {
      for (int rank = 0; rank < size; ++rank) {
        const Case which = case_for(static_cast<Kind>(k), rank, size);
        const Values received = carried_out(which);
        EXPECT_EQ(received.size(), which.kind == Kind::kBarrier ? 0 : which.n_recv()) << which.row().name;
        EXPECT_TRUE(received_right(which, received))
            << which.row().name << " rank " << rank << " of " << size;
      }
    }
  }
}

TEST(CollectiveCheck, FindsOneWrongElementAnywhere) {
  for (std::size_t k = 1; k < kKinds.size(); ++k) {  // a barrier gives nothing
    const Case which = case_for(static_cast<Kind>(k), 0, 4);
    Values received = carried_out(which);
    for (const std::size_t at : {std::size_t{0}, received.size() / 2, received.size() - 1}) {
      const float right = std::exchange(received[at], received[at] + 1);
      EXPECT_FALSE(received_right(which, received)) << which.row().name << " element " << at;
      received[at] = right;
    }
  }
}

TEST(CollectiveCheck, FindsBlocksInTheWrongOrder) {
  for (const Kind kind : {Kind::kAllGather, Kind::kGather, Kind::kAllToAll}) {
    const Case which = case_for(kind, 0, 4);
    Values received = carried_out(which);
    std::ranges::rotate(received, received.begin() + static_cast<std::ptrdiff_t>(which.n_block()));
    EXPECT_FALSE(received_right(which, received)) << which.row().name;
  }
}

TEST(CollectiveCheck, LeavesAloneWhatReduceLeavesUndefined) {
  const Case which = case_for(Kind::kReduce, 1, 2);
  EXPECT_TRUE(received_right(which, Values(which.n_recv(), -1.0f)));
}

}  // namespace
}  // namespace bench
