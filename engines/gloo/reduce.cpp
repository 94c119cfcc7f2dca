#include "engines/gloo/reduce.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lockstep::gloo_plugin {
namespace {

// Elements computed at a time: the accumulator stays in the nearest cache.
constexpr std::size_t kBlock = 1024;

// ---- how a type is kept in memory and computed with

template <class T>
struct Plain {
  using Memory = T;
  using Compute = T;
  static void load(const T* from, T* to, std::size_t n) { std::memcpy(to, from, n * sizeof(T)); }
  static void store(const T* from, T* to, std::size_t n) { std::memcpy(to, from, n * sizeof(T)); }
};

// The upper half of an f32: widening is exact. Narrowing adds just under half a unit, plus the lowest kept
// bit, which rounds to nearest even; a NaN is kept one by setting its quiet bit, since rounding could carry
// into infinity.
struct BrainHalf {
  using Memory = std::uint16_t;
  using Compute = float;
  static void load(const Memory* from, float* to, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i)
      to[i] = std::bit_cast<float>(static_cast<std::uint32_t>(from[i]) << 16);
  }
  static void store(const float* from, Memory* to, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(from[i]);
      const std::uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
      const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
      to[i] = static_cast<Memory>(is_nan ? (bits >> 16 | 0x40u) : rounded);
    }
  }
};

// f16 has 5 bits of exponent with bias 15 and 10 of fraction, f32 has 8 with bias 127 and 23. So a normal
// number keeps its fraction and adds 112 to its exponent; below the smallest normal number the value is the
// fraction times 2^-24.
float widen(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16, exponent = half >> 10 & 31u;
  const std::uint32_t fraction = half & 0x3FFu;
  if (exponent == 0) {
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -small : small;
  }
  const std::uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

// The reverse, to nearest even. 0x477FF000 is 65520, halfway between the largest f16 and the next that would
// be; 0x38800000 is 2^-14, the smallest normal f16.
std::uint16_t narrow(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u | (size >> 13 & 0x3FFu));  // NaN
  if (size >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // rounds to infinity
  if (size < 0x38800000u) {
    // Below the smallest normal number: count in units of the last place. Adding 2^23 of them rounds to even.
    const float units = std::bit_cast<float>(size) * 0x1p24f + 0x1p23f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(units) & 0x7FFu));
  }
  // A carry out of the fraction increments the exponent, which is the right result: the next power of two.
  const std::uint32_t rounded = size + 0xFFFu + (size >> 13 & 1u) - (112u << 23);
  return static_cast<std::uint16_t>(sign | rounded >> 13);
}

#if defined(__x86_64__)
// The processor's own conversions, eight at a time; they round as narrow() does. Compiled for AVX and F16C in
// a library that is built for any x86-64, hence called only after has_8s().
__attribute__((target("avx,f16c"))) void widen_8s(const std::uint16_t* from, float* to, std::size_t n) {
  for (std::size_t i = 0; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
}
__attribute__((target("avx,f16c"))) void narrow_8s(const float* from, std::uint16_t* to, std::size_t n) {
  for (std::size_t i = 0; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
}
bool has_8s() {
#ifdef __clang__
  // Which knows "f16c" here from version 16 on only. Every processor with AVX2 has it.
  static const bool has = __builtin_cpu_supports("avx2");
#else
  static const bool has = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
#endif
  return has;
}
#else
void widen_8s(const std::uint16_t*, float*, std::size_t) {}
void narrow_8s(const float*, std::uint16_t*, std::size_t) {}
bool has_8s() {
  return false;
}
#endif

struct Half {
  using Memory = std::uint16_t;
  using Compute = float;
  static void load(const Memory* from, float* to, std::size_t n) {
    std::size_t i = 0;
    if (has_8s()) widen_8s(from, to, n), i = n - n % 8;
    for (; i < n; ++i) to[i] = widen(from[i]);
  }
  static void store(const float* from, Memory* to, std::size_t n) {
    std::size_t i = 0;
    if (has_8s()) narrow_8s(from, to, n), i = n - n % 8;
    for (; i < n; ++i) to[i] = narrow(from[i]);
  }
};

// ---- operations; integers go through unsigned 64 bits, where overflow wraps

template <class T, class F>
T wrapping(T a, T b, F f) {
  if constexpr (std::is_floating_point_v<T>)
    return f(a, b);
  else
    return static_cast<T>(f(static_cast<std::uint64_t>(a), static_cast<std::uint64_t>(b)));
}

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return wrapping(a, b, [](auto x, auto y) { return x + y; });
  }
};
struct Multiply {
  template <class T>
  T operator()(T a, T b) const {
    return wrapping(a, b, [](auto x, auto y) { return x * y; });
  }
};
// NaN first, of either operand, as torch propagates it. For integers a != a is never true and costs nothing.
struct Smaller {
  template <class T>
  T operator()(T a, T b) const {
    return a != a ? a : b != b ? b : b < a ? b : a;
  }
};
struct Larger {
  template <class T>
  T operator()(T a, T b) const {
    return a != a ? a : b != b ? b : a < b ? b : a;
  }
};
struct BitAnd {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
};
struct BitOr {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
};
struct BitXor {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
};

// One call of reduce(); `average` is separate, since a mean is a sum that is scaled at the end.
struct Job {
  std::span<const void* const> sources;
  void* target;
  std::size_t count;
  bool average;
};

// Block by block: the accumulator is loaded from the first source, the others are combined with it in the
// order given, and it is stored once. So the target may be one of the sources: its elements have been read
// when they are written. The inner loop has no branch and no call, and compilers vectorise it.
template <class Form, class Op>
void run(const Job& job, Op op) {
  using Memory = typename Form::Memory;
  using Compute = typename Form::Compute;
  alignas(64) Compute sum[kBlock], next[kBlock];
  for (std::size_t at = 0; at < job.count; at += kBlock) {
    const std::size_t n = std::min(kBlock, job.count - at);
    Form::load(static_cast<const Memory*>(job.sources[0]) + at, sum, n);
    for (std::size_t s = 1; s < job.sources.size(); ++s) {
      Form::load(static_cast<const Memory*>(job.sources[s]) + at, next, n);
      for (std::size_t i = 0; i < n; ++i) sum[i] = op(sum[i], next[i]);
    }
    if constexpr (std::is_floating_point_v<Compute>) {
      // By multiplication with the rounded reciprocal, as the host engine does: the bits must be equal.
      const auto factor = static_cast<Compute>(1.0 / static_cast<double>(job.sources.size()));
      if (job.average) {
        for (std::size_t i = 0; i < n; ++i) sum[i] *= factor;
      }
    }
    Form::store(sum, static_cast<Memory*>(job.target) + at, n);
  }
}

// Pre: can_reduce(). SUM and AVG are what remains at the end.
template <class Form>
void reduce_as(lockstep_reduce_op op, const Job& job) {
  switch (op) {
    case LOCKSTEP_PRODUCT:
      return run<Form>(job, Multiply{});
    case LOCKSTEP_MIN:
      return run<Form>(job, Smaller{});
    case LOCKSTEP_MAX:
      return run<Form>(job, Larger{});
    default:
      break;
  }
  if constexpr (std::is_integral_v<typename Form::Compute>) {
    if (op == LOCKSTEP_BAND) return run<Form>(job, BitAnd{});
    if (op == LOCKSTEP_BOR) return run<Form>(job, BitOr{});
    if (op == LOCKSTEP_BXOR) return run<Form>(job, BitXor{});
  }
  run<Form>(job, Add{});
}

// A byte of 0 or 1: "all" for product and min, "any" for sum and max, as torch.
void reduce_bools(lockstep_reduce_op op, const Job& job) {
  if (op == LOCKSTEP_PRODUCT || op == LOCKSTEP_MIN || op == LOCKSTEP_BAND) {
    return run<Plain<std::uint8_t>>(job, BitAnd{});
  }
  if (op == LOCKSTEP_BXOR) return run<Plain<std::uint8_t>>(job, BitXor{});
  run<Plain<std::uint8_t>>(job, BitOr{});
}

}  // namespace

bool can_reduce(lockstep_dtype dtype, lockstep_reduce_op op) {
  if (dtype < 0 || dtype >= LOCKSTEP_DTYPES || op < 0 || op >= LOCKSTEP_REDUCE_OPS) return false;
  const bool floating =
      dtype == LOCKSTEP_F16 || dtype == LOCKSTEP_BF16 || dtype == LOCKSTEP_F32 || dtype == LOCKSTEP_F64;
  if (op == LOCKSTEP_AVG) return floating;
  if (op == LOCKSTEP_BAND || op == LOCKSTEP_BOR || op == LOCKSTEP_BXOR) return !floating;
  return true;
}

void reduce(lockstep_dtype dtype, lockstep_reduce_op op, std::span<const void* const> sources, void* target,
            std::size_t count) {
  const Job job{sources, target, count, op == LOCKSTEP_AVG};
  switch (dtype) {
    case LOCKSTEP_U8:
      return reduce_as<Plain<std::uint8_t>>(op, job);
    case LOCKSTEP_I8:
      return reduce_as<Plain<std::int8_t>>(op, job);
    case LOCKSTEP_I16:
      return reduce_as<Plain<std::int16_t>>(op, job);
    case LOCKSTEP_I32:
      return reduce_as<Plain<std::int32_t>>(op, job);
    case LOCKSTEP_I64:
      return reduce_as<Plain<std::int64_t>>(op, job);
    case LOCKSTEP_F16:
      return reduce_as<Half>(op, job);
    case LOCKSTEP_BF16:
      return reduce_as<BrainHalf>(op, job);
    case LOCKSTEP_F32:
      return reduce_as<Plain<float>>(op, job);
    case LOCKSTEP_F64:
      return reduce_as<Plain<double>>(op, job);
    case LOCKSTEP_BOOL:
    case LOCKSTEP_DTYPES:
      return reduce_bools(op, job);
  }
}

}  // namespace lockstep::gloo_plugin
