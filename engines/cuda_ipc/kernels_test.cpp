// The loops of the kernels, compiled for the host, against the host engine's: equal bits, whatever the alignment.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "engines/cuda_ipc/element_loops.h"
#include "lockstep/host/kernels.h"

namespace lockstep::cuda_ipc {
namespace {

void reduce_any(lockstep_dtype dtype, const ReduceTask& task, const Share& share) {
  switch (dtype) {
    case LOCKSTEP_U8:
      return reduce_integers<std::uint8_t>(task, share);
    case LOCKSTEP_I8:
      return reduce_integers<std::int8_t>(task, share);
    case LOCKSTEP_I16:
      return reduce_integers<std::int16_t>(task, share);
    case LOCKSTEP_I32:
      return reduce_integers<std::int32_t>(task, share);
    case LOCKSTEP_I64:
      return reduce_integers<std::int64_t>(task, share);
    case LOCKSTEP_F16:
      return reduce_floats<Half>(task, share);
    case LOCKSTEP_BF16:
      return reduce_floats<BrainHalf>(task, share);
    case LOCKSTEP_F32:
      return reduce_floats<Plain<float>>(task, share);
    case LOCKSTEP_F64:
      return reduce_floats<Plain<double>>(task, share);
    default:
      return reduce_bools(task, share);
  }
}

// Bits of moderate numbers: exponents near that of 1, so that sums and products stay finite.
std::vector<std::uint8_t> random_elements(lockstep_dtype dtype, std::size_t count, std::mt19937_64& random) {
  const std::size_t width = comm::size_of(dtype);
  std::vector<std::uint8_t> bytes(count * width);
  for (std::size_t i = 0; i < count; ++i) {
    const double value = std::uniform_real_distribution<double>(-2, 2)(random);
    const auto single = static_cast<float>(value);
    std::uint64_t bits = random();
    if (dtype == LOCKSTEP_F64) std::memcpy(&bits, &value, 8);
    if (dtype == LOCKSTEP_F32) std::memcpy(&bits, &single, 4);
    if (dtype == LOCKSTEP_F16) bits = Half::store(single);
    if (dtype == LOCKSTEP_BF16) bits = BrainHalf::store(single);
    if (dtype == LOCKSTEP_BOOL) bits &= 1;
    std::memcpy(bytes.data() + i * width, &bits, width);
  }
  return bytes;
}

// Several threads' shares together, one after the other; buffers `shift` elements into aligned memory.
TEST(CudaIpcKernels, ReduceAsTheHostEngineDoesBitByBit) {
  std::mt19937_64 random(7);
  for (int d = 0; d < LOCKSTEP_DTYPES; ++d) {
    const auto dtype = static_cast<lockstep_dtype>(d);
    const std::size_t width = comm::size_of(dtype);
    for (int o = 0; o < LOCKSTEP_REDUCE_OPS; ++o) {
      const auto op = static_cast<lockstep_reduce_op>(o);
      if (!comm::can_reduce(dtype, op)) continue;
      for (const std::size_t shift : {0, 1, 3}) {
        for (const bool alike : {true, false}) {
          constexpr std::size_t kCount = 301;
          std::vector<std::vector<std::uint8_t>> sources;
          ReduceTask task{};
          std::vector<const void*> from;
          std::vector<std::vector<Vector>> memory(3, std::vector<Vector>(kCount));
          for (std::size_t s = 0; s < 3; ++s) {
            sources.push_back(random_elements(dtype, kCount, random));
            auto* const at = reinterpret_cast<std::uint8_t*>(memory[s].data()) +
                             (alike || s != 1 ? shift : shift + 1) * width;
            std::memcpy(at, sources[s].data(), kCount * width);
            task.from[s] = at;
            from.push_back(sources[s].data());
          }
          task.to[0] = const_cast<void*>(task.from[0]);
          task.to[1] = const_cast<void*>(task.from[2]);
          task.n_from = 3;
          task.n_to = 2;
          task.count = kCount;
          task.op = static_cast<std::uint32_t>(op);
          task.scale = op == LOCKSTEP_AVG ? 1.0 / 3 : 1;
          std::vector<std::uint8_t> want(kCount * width);
          void* const target = want.data();
          comm::reduce(dtype, op, from, {&target, 1}, kCount);
          for (std::uint64_t t = 0; t < 5; ++t) reduce_any(dtype, task, {t, 5, 0});
          for (unsigned t = 0; t < task.n_to; ++t)
            EXPECT_EQ(std::memcmp(task.to[t], want.data(), want.size()), 0)
                << "dtype " << d << " op " << o << " shift " << shift << " alike " << alike;
        }
      }
    }
  }
}

TEST(CudaIpcKernels, EveryHalfSurvivesTheWayToFloatAndBack) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if ((bits & 0x7fffu) > 0x7c00u) continue;  // NaN
    EXPECT_EQ(Half::store(Half::load(half)), half) << bits;
  }
}

TEST(CudaIpcKernels, CopiesOfAnyAlignmentAreWholeAndTouchNothingElse) {
  std::mt19937_64 random(3);
  for (std::size_t from = 0; from < 17; ++from) {
    for (std::size_t to = 0; to < 17; ++to) {
      for (const std::size_t n : {1u, 15u, 16u, 17u, 200u}) {
        std::vector<Vector> source(32), target(32);
        auto* const source_bytes = reinterpret_cast<std::uint8_t*>(source.data());
        auto* const target_bytes = reinterpret_cast<std::uint8_t*>(target.data());
        for (std::size_t i = 0; i < 512; ++i) source_bytes[i] = static_cast<std::uint8_t>(random() | 1);
        CopyTask task{};
        task.pieces[0] = {source_bytes + from, target_bytes + to, n};
        for (std::uint64_t t = 0; t < 3; ++t) copy_piece(task, {t, 3, 0});
        for (std::size_t i = 0; i < 512; ++i)
          ASSERT_EQ(target_bytes[i], i >= to && i < to + n ? source_bytes[from + i - to] : 0)
              << from << " " << to << " " << n;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::cuda_ipc
