// The arithmetic against a plain loop: every type and operation, lengths around the vector width, many
// sources.
#include "lockstep/host/kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace lockstep::comm {
namespace {

float from_bf16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Round to nearest even, the long way round: compare the two neighbours.
std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const auto low = static_cast<std::uint16_t>(bits >> 16);
  const std::uint32_t rest = bits & 0xFFFF;
  if (rest > 0x8000 || (rest == 0x8000 && (low & 1) != 0)) return static_cast<std::uint16_t>(low + 1);
  return low;
}

template <class T>
T apply(lockstep_reduce_op op, T a, T b) {
  switch (op) {
    case LOCKSTEP_SUM:
    case LOCKSTEP_AVG:
      return static_cast<T>(a + b);
    case LOCKSTEP_PRODUCT:
      return static_cast<T>(a * b);
    case LOCKSTEP_MIN:
      return b < a ? b : a;
    case LOCKSTEP_MAX:
      return a < b ? b : a;
    default:
      return a;
  }
}

template <class T>
void expect_matches_plain_loop(lockstep_dtype dtype, lockstep_reduce_op op) {
  std::mt19937 random(7);
  for (const std::size_t n_sources : {1u, 2u, 3u, 7u}) {
    for (const std::size_t n_targets : {1u, 2u, 3u}) {
      for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 63u, 64u, 1000u}) {
        std::vector<std::vector<T>> in(n_sources, std::vector<T>(count));
        for (auto& source : in) {
          for (auto& x : source) x = static_cast<T>(random() % 5 + 1);
        }
        std::vector<T> expected = in[0];
        for (std::size_t s = 1; s < n_sources; ++s) {
          for (std::size_t i = 0; i < count; ++i) expected[i] = apply(op, expected[i], in[s][i]);
        }
        if (op == LOCKSTEP_AVG) {
          for (auto& x : expected)
            x = static_cast<T>(x * static_cast<T>(1.0 / static_cast<double>(n_sources)));
        }
        std::vector<std::vector<T>> out(n_targets, std::vector<T>(count, T(99)));
        std::vector<const void*> sources;
        std::vector<void*> targets;
        for (auto& source : in) sources.push_back(source.data());
        for (auto& target : out) targets.push_back(target.data());
        reduce(dtype, op, sources, targets, count);
        for (const auto& target : out) EXPECT_EQ(target, expected) << n_sources << " sources, " << count;
      }
    }
  }
}

TEST(Kernels, EveryOperationMatchesAPlainLoop) {
  for (const auto op : {LOCKSTEP_SUM, LOCKSTEP_AVG, LOCKSTEP_PRODUCT, LOCKSTEP_MIN, LOCKSTEP_MAX}) {
    expect_matches_plain_loop<float>(LOCKSTEP_F32, op);
    expect_matches_plain_loop<double>(LOCKSTEP_F64, op);
    if (op == LOCKSTEP_AVG) continue;
    expect_matches_plain_loop<std::int8_t>(LOCKSTEP_I8, op);
    expect_matches_plain_loop<std::uint8_t>(LOCKSTEP_U8, op);
    expect_matches_plain_loop<std::int16_t>(LOCKSTEP_I16, op);
    expect_matches_plain_loop<std::int32_t>(LOCKSTEP_I32, op);
    expect_matches_plain_loop<std::int64_t>(LOCKSTEP_I64, op);
  }
}

TEST(Kernels, Bf16RoundsToNearestEvenOnce) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(-4, 4);
  for (const std::size_t count : {5u, 16u, 333u}) {
    std::vector<std::vector<std::uint16_t>> in(3, std::vector<std::uint16_t>(count));
    std::vector<std::uint16_t> expected(count);
    for (std::size_t i = 0; i < count; ++i) {
      float sum = 0;
      for (auto& source : in) {
        source[i] = to_bf16(uniform(random));
        sum = &source == &in[0] ? from_bf16(source[i]) : sum + from_bf16(source[i]);
      }
      expected[i] = to_bf16(sum);
    }
    std::vector<std::uint16_t> out(count);
    const void* sources[] = {in[0].data(), in[1].data(), in[2].data()};
    void* targets[] = {out.data()};
    reduce(LOCKSTEP_BF16, LOCKSTEP_SUM, sources, targets, count);
    EXPECT_EQ(out, expected);
  }
}

TEST(Kernels, F16IsAddedInF32) {
  // 2048 + 1 + 1 in f16 is 2050; rounding after each addition would give 2048.
  const std::uint16_t big = 0x6800, one = 0x3C00;
  std::vector<std::uint16_t> a(40, big), b(40, one), c(40, one), out(40);
  const void* sources[] = {a.data(), b.data(), c.data()};
  void* targets[] = {out.data()};
  reduce(LOCKSTEP_F16, LOCKSTEP_SUM, sources, targets, out.size());
  for (const auto x : out) EXPECT_EQ(x, 0x6801);
}

TEST(Kernels, MinAndMaxKeepNaN) {
  const float nan = std::nanf("");
  for (const auto op : {LOCKSTEP_MIN, LOCKSTEP_MAX}) {
    std::vector<float> a(20, 1.f), b(20, 2.f), out(20);
    a[3] = nan;
    b[17] = nan;
    const void* sources[] = {a.data(), b.data()};
    void* targets[] = {out.data()};
    reduce(LOCKSTEP_F32, op, sources, targets, out.size());
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i == 3 || i == 17) << i;
  }
}

TEST(Kernels, TargetsMayBeTheSources) {
  std::vector<float> a(1001), b(1001);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i), b[i] = 1.f;
  const void* sources[] = {a.data(), b.data()};
  void* targets[] = {a.data(), b.data()};
  reduce(LOCKSTEP_F32, LOCKSTEP_SUM, sources, targets, a.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i], static_cast<float>(i) + 1.f);
  EXPECT_EQ(a, b);
}

TEST(Kernels, BitOperationsAndBoolFollowTheirTypes) {
  std::vector<std::uint8_t> a{0, 1, 0, 1}, b{0, 0, 1, 1}, out(4);
  const void* sources[] = {a.data(), b.data()};
  void* targets[] = {out.data()};
  reduce(LOCKSTEP_BOOL, LOCKSTEP_SUM, sources, targets, 4);
  EXPECT_EQ(out, (std::vector<std::uint8_t>{0, 1, 1, 1}));
  reduce(LOCKSTEP_BOOL, LOCKSTEP_PRODUCT, sources, targets, 4);
  EXPECT_EQ(out, (std::vector<std::uint8_t>{0, 0, 0, 1}));
  reduce(LOCKSTEP_U8, LOCKSTEP_BXOR, sources, targets, 4);
  EXPECT_EQ(out, (std::vector<std::uint8_t>{0, 1, 1, 0}));
  EXPECT_FALSE(can_reduce(LOCKSTEP_I32, LOCKSTEP_AVG));
  EXPECT_FALSE(can_reduce(LOCKSTEP_F32, LOCKSTEP_BAND));
}

TEST(Kernels, StreamedCopiesAreExactAtEveryAlignmentAndTouchNothingElse) {
  for (const std::size_t n : {0u, 1u, 63u, 64u, 255u, 256u, 1000u, 70'001u}) {
    for (std::size_t to_at = 0; to_at < 64; to_at += 7) {
      for (const std::size_t from_at : {0u, 1u, 32u}) {
        std::vector<std::uint8_t> from(from_at + n), to(to_at + n + 64, 0xa5);
        for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint8_t>(i * 7 + 3);
        stream_copy(to.data() + to_at, from.data() + from_at, n);
        for (std::size_t i = 0; i < to.size(); ++i) {
          const bool inside = i >= to_at && i < to_at + n;
          ASSERT_EQ(to[i], inside ? from[i - to_at + from_at] : 0xa5) << n << " bytes, byte " << i;
        }
      }
    }
  }
}

TEST(Kernels, RowsAreCopiedAtAnyPitchAndNothingBetweenThem) {
  for (const std::size_t run : {1u, 60u, 257u, 4096u}) {
    for (const std::size_t pitch : {run, run + 3, 2 * run + 64}) {
      constexpr std::size_t kRows = 5;
      std::vector<std::uint8_t> from(kRows * (pitch + 7)), to(kRows * pitch, 0xa5);
      for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint8_t>(i * 7 + 3);
      stream_copy_rows(to.data(), pitch, from.data(), pitch + 7, run, kRows);
      for (std::size_t i = 0; i < to.size(); ++i) {
        const std::size_t row = i / pitch, at = i % pitch;
        ASSERT_EQ(to[i], at < run ? from[row * (pitch + 7) + at] : 0xa5) << "run " << run << ", byte " << i;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::comm
