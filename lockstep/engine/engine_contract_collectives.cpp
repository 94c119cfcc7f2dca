// What collectives compute: every kind, element type and reduction against plain arithmetic.
#include <cmath>
#include <cstdlib>

#include "lockstep/engine/engine_contract_case.h"

namespace lockstep::comm {
namespace {

constexpr lockstep_op_kind kCollectives[] = {
    LOCKSTEP_BARRIER,        LOCKSTEP_BROADCAST,    LOCKSTEP_ALL_REDUCE,  LOCKSTEP_ALL_GATHER,
    LOCKSTEP_REDUCE_SCATTER, LOCKSTEP_REDUCE,       LOCKSTEP_GATHER,      LOCKSTEP_SCATTER,
    LOCKSTEP_ALL_TO_ALL,     LOCKSTEP_ALL_TO_ALL_V, LOCKSTEP_ALL_GATHER_V};

// Every root of a rooted kind, else once.
void on_each_root(int size, Case one, const std::function<void(const Case&)>& call) {
  for (one.root = 0; one.root < (has_root(one.kind) ? size : 1); ++one.root) call(one);
}

TEST_P(EngineContract, OffersEverythingWhereItPromisesTo) {
  if (!GetParam().everything) GTEST_SKIP() << "this engine offers a part";
  for (int kind = 0; kind < LOCKSTEP_OP_KINDS; ++kind)
    EXPECT_TRUE(engine().offers(static_cast<lockstep_op_kind>(kind))) << "kind " << kind;
  for (int d = 0; d < LOCKSTEP_DTYPES; ++d) {
    const auto dtype = static_cast<lockstep_dtype>(d);
    EXPECT_TRUE(engine().moves(dtype)) << "dtype " << d;
    for (int r = 0; r < LOCKSTEP_REDUCE_OPS; ++r) {
      const auto reduce = static_cast<lockstep_reduce_op>(r);
      EXPECT_EQ(engine().reduces(dtype, reduce), reference::legal(dtype, reduce)) << d << " with " << r;
    }
  }
}

TEST_P(EngineContract, EveryReductionOfEveryTypeIsExact) {
  on_all_sizes([&](Rank& rank) {
    for (const auto kind : {LOCKSTEP_ALL_REDUCE, LOCKSTEP_REDUCE, LOCKSTEP_REDUCE_SCATTER}) {
      if (!engine().offers(kind)) continue;
      for (int d = 0; d < LOCKSTEP_DTYPES; ++d) {
        for (int r = 0; r < LOCKSTEP_REDUCE_OPS; ++r) {
          const auto dtype = static_cast<lockstep_dtype>(d);
          const auto reduce = static_cast<lockstep_reduce_op>(r);
          if (!engine().reduces(dtype, reduce)) continue;
          for (const std::uint64_t count : {1u, 13u, 1037u}) {
            check(rank, {.kind = kind,
                         .dtype = dtype,
                         .reduce = reduce,
                         .count = count,
                         .root = (d + r) % rank.size(),
                         .posted = r % 2 == 1});
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  });
}

std::uint16_t f16_of(std::int64_t value) {
  std::uint8_t bytes[2];
  reference::encode(LOCKSTEP_F16, value, bytes);
  return static_cast<std::uint16_t>(bytes[0] | bytes[1] << 8);
}

// f16 ends at 65504: the sum of the ranks does not fit, their mean does.
TEST_P(EngineContract, AMeanOfHalvesDoesNotOverflowWhereTheirSumWould) {
  if (!engine().reduces(LOCKSTEP_F16, LOCKSTEP_AVG)) GTEST_SKIP() << "this engine does not offer it";
  constexpr std::int64_t kValues[] = {20'000, -40'000, 60'000};
  on_all_sizes([&](Rank& rank) {
    for (const auto kind : {LOCKSTEP_ALL_REDUCE, LOCKSTEP_REDUCE, LOCKSTEP_REDUCE_SCATTER}) {
      if (!engine().offers(kind)) continue;
      for (const std::uint64_t count : {3u, 1500u, 30'000u}) {
        const auto n = static_cast<std::uint64_t>(rank.size());
        const std::uint64_t n_sent = kind == LOCKSTEP_REDUCE_SCATTER ? count * n : count;
        std::vector<std::uint16_t> send(n_sent), recv(count);
        for (std::uint64_t i = 0; i < n_sent; ++i) send[i] = f16_of(kValues[i % 3]);
        auto op = Rank::op(kind, send.data(), recv.data(), count, LOCKSTEP_F16);
        op.reduce = LOCKSTEP_AVG;
        op.root = rank.size() - 1;
        ASSERT_EQ(rank.run(op), LOCKSTEP_OK) << rank.error();
        if (kind == LOCKSTEP_REDUCE && rank.rank() != op.root) continue;
        for (std::uint64_t i = 0; i < count; ++i) {
          const int want = send[i],
                    off = recv[i] - want;  // counts are multiples of three: blocks begin alike
          ASSERT_LE(std::abs(off), 2) << "element " << i << " of " << count << " is " << off
                                      << " steps of f16 beside " << kValues[i % 3] << ", kind " << kind;
        }
      }
    }
  });
}

TEST_P(EngineContract, EveryTypeIsMovedByEveryKind) {
  on_all_sizes([&](Rank& rank) {
    for (const auto kind : kCollectives) {
      if (!engine().offers(kind) || has_reduce(kind)) continue;
      for (int d = 0; d < LOCKSTEP_DTYPES; ++d) {
        const auto dtype = static_cast<lockstep_dtype>(d);
        if (!engine().moves(dtype)) continue;
        for (const std::uint64_t count : {1u, 7u, 801u}) {
          on_each_root(rank.size(), {.kind = kind, .dtype = dtype, .count = count, .posted = d % 2 == 1},
                       [&](const Case& one) { check(rank, one); });
        }
      }
    }
  });
}

// Around the sizes where an engine may change its way: nothing, a cache line, a page, a staging area.
TEST_P(EngineContract, EveryKindIsRightAroundEverySize) {
  constexpr std::uint64_t kBytes[] = {0,
                                      1,
                                      40,
                                      48,
                                      49,
                                      1000,
                                      1024,
                                      1025,
                                      8 << 10,
                                      (8 << 10) + 1,
                                      65 << 10,
                                      256 << 10,
                                      (256 << 10) + 1,
                                      (1 << 20) - 1,
                                      (1 << 20) + 3};
  on_all_sizes([&](Rank& rank) {
    for (const auto kind : kCollectives) {
      if (!engine().offers(kind)) continue;
      for (const std::uint64_t n_bytes : kBytes) {
        const bool large = n_bytes > (kSanitized ? 10'000 : 300'000);
        if (large && rank.size() > kMaxRanksOfLarge) continue;
        for (const auto dtype : {LOCKSTEP_U8, LOCKSTEP_F32, LOCKSTEP_I64}) {
          if (large && (dtype == LOCKSTEP_I64 || (kSanitized && dtype == LOCKSTEP_U8))) continue;
          check(rank, {.kind = kind,
                       .dtype = dtype,
                       .count = n_bytes / reference::bytes_of(dtype),
                       .root = static_cast<int>(n_bytes % static_cast<std::uint64_t>(rank.size())),
                       .posted = dtype == LOCKSTEP_F32});
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST_P(EngineContract, InPlaceAndSharedMemoryGiveTheSame) {
  on_all_sizes([&](Rank& rank) {
    for (const auto kind : kCollectives) {
      if (!engine().offers(kind)) continue;
      for (const std::uint64_t count : {1u, 11u, 13u, 300u, 2049u, 40'001u, 140'003u}) {
        if (count > (kSanitized ? 10'000 : 100'000) && rank.size() > kMaxRanksOfLarge) continue;
        // Places: ordinary everywhere, shared everywhere, one rank ordinary, one rank shared.
        for (int place = 0; place < (has_alloc() ? 4 : 1); ++place) {
          const bool last = rank.rank() == rank.size() - 1;
          const bool shared = place == 1 || (place == 2 && !last) || (place == 3 && last);
          Case one{.kind = kind, .count = count, .shared = shared, .posted = place % 2 == 1};
          one.root = static_cast<int>(count) % rank.size();
          check(rank, one);
          one.in_place = kind == LOCKSTEP_ALL_REDUCE || kind == LOCKSTEP_REDUCE;
          if (one.in_place) check(rank, one);
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST_P(EngineContract, UnevenBlocksAndEmptyOnesArrive) {
  on_all_sizes([&](Rank& rank) {
    for (const auto kind : {LOCKSTEP_ALL_TO_ALL_V, LOCKSTEP_ALL_GATHER_V}) {
      if (!engine().offers(kind)) continue;
      for (const std::uint64_t unevenness : {0u, 1u, 5u, 700u, 30'000u}) {
        if (kSanitized && unevenness > 1000 && rank.size() > kMaxRanksOfLarge) continue;
        for (const std::uint64_t count : {0u, 3u}) {
          for (int shared = 0; shared < (has_alloc() ? 2 : 1); ++shared) {
            check(rank, {.kind = kind,
                         .dtype = LOCKSTEP_I32,
                         .count = count,
                         .shared = shared == 1,
                         .posted = count == 3,
                         .unevenness = unevenness});
          }
        }
      }
    }
  });
}

// What rank `from` sends rank `to` where parts have rows: a multiple of every number of rows that is used.
std::uint64_t part_in_rows(int from, int to, std::uint64_t unit) {
  return 6 * unit * static_cast<std::uint64_t>((from + 2 * to) % 3);
}
std::int32_t value_in_rows(int from, int to, std::uint64_t i) {
  return static_cast<std::int32_t>(from * 1'000'003 + to * 10'007 + static_cast<int>(i % 9973));
}
// The parts as `rows` rows, each with its share of every part.
std::vector<std::int32_t> in_rows(const std::vector<std::vector<std::int32_t>>& parts, std::uint64_t rows) {
  std::vector<std::int32_t> all;
  for (std::uint64_t row = 0; row < rows; ++row) {
    for (const auto& part : parts) {
      const auto run = static_cast<std::ptrdiff_t>(part.size() / rows);
      const auto begin = part.begin() + static_cast<std::ptrdiff_t>(row) * run;
      all.insert(all.end(), begin, begin + run);
    }
  }
  return all;
}

struct RowsCase {
  lockstep_op_kind kind;
  std::uint64_t unit, send_rows, recv_rows;
  bool shared;
};

void check_rows(testing::EngineRank& rank, const RowsCase& one) {
  const int me = rank.rank(), size = rank.size();
  const bool to_all = one.kind != LOCKSTEP_ALL_TO_ALL_V;
  std::vector<std::vector<std::int32_t>> sends, receives;
  std::vector<std::uint64_t> send_counts, recv_counts;
  const auto part = [&](int from, int to) {
    const auto n =
        one.kind == LOCKSTEP_ALL_GATHER ? 6 * one.unit : part_in_rows(from, to_all ? 0 : to, one.unit);
    std::vector<std::int32_t> values;
    for (std::uint64_t i = 0; i < n; ++i) values.push_back(value_in_rows(from, to_all ? 0 : to, i));
    return values;
  };
  for (int r = 0; r < size; ++r) {
    if (!to_all || r == me) sends.push_back(part(me, r));
    receives.push_back(part(r, me));
    send_counts.push_back(to_all ? 0 : sends.back().size());
    recv_counts.push_back(receives.back().size());
  }
  const auto sent = in_rows(sends, one.send_rows), want = in_rows(receives, one.recv_rows);
  GuardedBuffer send(rank, sent.size() * 4, one.shared), recv(rank, want.size() * 4, one.shared);
  if (!sent.empty()) std::memcpy(send.data(), sent.data(), sent.size() * 4);
  auto op = testing::EngineRank::op(one.kind, send.data(), recv.data(), 0, LOCKSTEP_I32);
  if (one.kind == LOCKSTEP_ALL_GATHER) op.count = sent.size();
  op.send_counts = send_counts.data();
  op.recv_counts = recv_counts.data();
  op.send_rows = one.send_rows;
  op.recv_rows = one.recv_rows;
  const auto context = base::cat("rank ", me, " of ", size, ", kind ", one.kind, " unit ", one.unit, " rows ",
                                 one.send_rows, " and ", one.recv_rows, one.shared ? " shared" : "");
  ASSERT_EQ(rank.run(op), LOCKSTEP_OK) << context << ": " << rank.error();
  ASSERT_TRUE(want.empty() || std::memcmp(recv.data(), want.data(), want.size() * 4) == 0) << context;
  ASSERT_TRUE(send.margins_whole() && recv.margins_whole()) << context << ": wrote beyond a buffer";
}

// Ranks have rows of their own number, and memory of their own kind.
TEST_P(EngineContract, PartsThatLieInRowsArriveInRows) {
  if (engine().capabilities().takes_rows == 0) GTEST_SKIP() << "the engine does not take rows";
  on_all_sizes([&](Rank& rank) {
    for (const auto kind : {LOCKSTEP_ALL_TO_ALL_V, LOCKSTEP_ALL_GATHER_V, LOCKSTEP_ALL_GATHER}) {
      for (const std::uint64_t unit : {1u, 7u, 500u, 30'000u}) {
        if (unit > 1000 && rank.size() > kMaxRanksOfLarge) continue;
        for (int place = 0; place < (has_alloc() ? 3 : 1); ++place) {
          for (const std::uint64_t rows : {1u, 2u, 6u}) {
            const bool last = rank.rank() == rank.size() - 1;
            check_rows(rank, {.kind = kind,
                              .unit = unit,
                              .send_rows = kind == LOCKSTEP_ALL_TO_ALL_V ? (last ? 3 : rows) : 1,
                              .recv_rows = rank.rank() == 0 ? 6 / rows : 2,
                              .shared = place == 1 || (place == 2 && !last)});
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  });
}

float rounding_value(int rank, std::size_t i) {
  return 0.1f * static_cast<float>(rank + 1) + static_cast<float>(i % 17) / 3.f;
}

// Sums that need rounding have the same bits on every rank, in every run and, where promised, of a plain
// loop.
TEST_P(EngineContract, RoundedSumsAreTheSameOnEveryRank) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_REDUCE);
  on_all_sizes([&](Rank& rank) {
    for (const std::size_t count : {1u, 12u, 500u, 2049u, 70'001u}) {
      for (int shared = 0; shared < (has_alloc() ? 2 : 1); ++shared) {
        std::uint64_t first_print = 0;
        for (int again = 0; again < 2; ++again) {
          GuardedBuffer buffer(rank, count * sizeof(float), shared == 1);
          auto* const x = reinterpret_cast<float*>(buffer.data());
          for (std::size_t i = 0; i < count; ++i) x[i] = rounding_value(rank.rank(), i);
          ASSERT_EQ(rank.run(Rank::op(LOCKSTEP_ALL_REDUCE, x, x, count)), LOCKSTEP_OK) << rank.error();
          std::uint64_t print = 1469598103934665603ull;
          for (std::size_t i = 0; i < count; ++i) {
            std::uint32_t bits = 0;
            std::memcpy(&bits, &x[i], sizeof bits);
            print = (print ^ bits) * 1099511628211ull;
            float sum = rounding_value(0, i);
            for (int r = 1; r < rank.size(); ++r) sum += rounding_value(r, i);
            if (GetParam().rank_order) {
              ASSERT_EQ(x[i], sum) << "element " << i << " of " << count;
            } else {
              ASSERT_NEAR(x[i], sum, 1e-3) << "element " << i << " of " << count;
            }
          }
          rank.word(rank.rank()) = print;
          rank.meet();
          EXPECT_EQ(print, rank.word(0).load()) << "rank 0 has other bits";
          if (again == 0) first_print = print;
          EXPECT_EQ(print, first_print) << "another run gave other bits";
          rank.meet();
        }
      }
    }
  });
}

// Many operations in flight, of every kind, waited for backwards: they run in the order posted.
TEST_P(EngineContract, OperationsPostedTogetherMayBeWaitedForInAnyOrder) {
  LOCKSTEP_CONTRACT_NEEDS(LOCKSTEP_ALL_REDUCE, LOCKSTEP_BROADCAST);
  on_all_sizes([&](Rank& rank) {
    constexpr std::size_t kOps = 60;
    std::vector<std::vector<std::int32_t>> data;
    std::vector<lockstep_handle*> handles;
    for (std::size_t i = 0; i < kOps; ++i) {
      data.emplace_back(i % 3 == 0 ? 30'000 : 5 + i, rank.rank() + static_cast<int>(i));
      auto op = Rank::op(i % 4 == 3 ? LOCKSTEP_BROADCAST : LOCKSTEP_ALL_REDUCE, data[i].data(),
                         data[i].data(), data[i].size(), LOCKSTEP_I32);
      op.root = op.kind == LOCKSTEP_BROADCAST ? rank.size() - 1 : 0;
      handles.push_back(rank.post(op));
    }
    for (std::size_t k = 0; k < kOps; ++k) {
      const std::size_t i = k % 2 == 0 ? kOps - 1 - k / 2 : k / 2;
      ASSERT_EQ(rank.finish(handles[i]), LOCKSTEP_OK) << rank.error();
      const int n = rank.size(), each = static_cast<int>(i);
      const std::int32_t want = i % 4 == 3 ? n - 1 + each : n * (n - 1) / 2 + n * each;
      EXPECT_EQ(data[i].front(), want) << "operation " << i;
      EXPECT_EQ(data[i].back(), want) << "operation " << i;
    }
  });
}

}  // namespace
}  // namespace lockstep::comm
