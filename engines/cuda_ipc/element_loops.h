// The loops of the kernels, for one thread of the grid: templates that compile for the device and for the host, where the
// fake driver runs them with a grid of one thread.
//
// Guarantees, those of lockstep/host/kernels.h: sources are combined in their order, ((s0 op s1) op s2) ..., so results
// equal the host engine's bit by bit; f16 and bf16 are accumulated in f32 and rounded once, to nearest even; min and max
// propagate NaN; the scale of a mean multiplies the finished sum. Compile with contraction of a*b+c off.
#pragma once

#include <cstdint>
#include <cstring>

#include "engines/cuda_ipc/kernels.h"
#include "lockstep/engine/engine_abi.h"

#ifdef __CUDACC__
#define LOCKSTEP_BOTH __host__ __device__ __forceinline__
#define LOCKSTEP_UNROLL _Pragma("unroll")
#else
#define LOCKSTEP_BOTH inline
#define LOCKSTEP_UNROLL
#endif

namespace lockstep::cuda_ipc {

template <class To, class From>
LOCKSTEP_BOTH To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// ---- element types: Memory is what a buffer holds, Compute what is combined ----

template <class T>
struct Plain {
  using Memory = T;
  using Compute = T;
  static LOCKSTEP_BOTH T load(T value) { return value; }
  static LOCKSTEP_BOTH T store(T value) { return value; }
};

struct Half {
  using Memory = std::uint16_t;
  using Compute = float;
#ifdef __CUDA_ARCH__
  static __device__ __forceinline__ float load(std::uint16_t value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
  }
  static __device__ __forceinline__ std::uint16_t store(float value) {
    std::uint16_t narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
    return narrow;
  }
#else
  // Exact: a subnormal half is a normal float.
  static float load(std::uint16_t value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x8000u) << 16, rest = value & 0x7fffu;
    if (rest >= 0x7c00u) return bits_as<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // A factor of 2^112 moves the exponent from the half's bias (15) to the float's (127), subnormals included.
    const float magnitude = bits_as<float>(rest << 13) * bits_as<float>(std::uint32_t{239} << 23);
    return bits_as<float>(sign | bits_as<std::uint32_t>(magnitude));
  }
  static std::uint16_t store(float value) {
    const auto bits = bits_as<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 2^16 or is more
    if (rest <
        0x38800000u) {  // below 2^-14: the addition aligns the fraction to units of 2^-24 and rounds it
      const float aligned = bits_as<float>(rest) + 0.5f;
      return static_cast<std::uint16_t>(sign | (bits_as<std::uint32_t>(aligned) - 0x3f000000u));
    }
    const std::uint32_t odd = rest >> 13 & 1u;
    return static_cast<std::uint16_t>(sign | (rest - 0x38000000u + 0xfffu + odd) >> 13);
  }
#endif
};

struct BrainHalf {
  using Memory = std::uint16_t;
  using Compute = float;
  static LOCKSTEP_BOTH float load(std::uint16_t value) {
    return bits_as<float>(static_cast<std::uint32_t>(value) << 16);
  }
  // To nearest even; a NaN stays one: its quiet bit is set.
  static LOCKSTEP_BOTH std::uint16_t store(float value) {
    const auto bits = bits_as<std::uint32_t>(value);
    if (value != value) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
};

// ---- operations ----

// Integers wrap: signed ones are combined as unsigned numbers of at least 32 bits.
template <class T>
struct Wrapping {
  using Unsigned = std::uint64_t;
};
template <>
struct Wrapping<float> {
  using Unsigned = float;
};
template <>
struct Wrapping<double> {
  using Unsigned = double;
};

struct Add {
  template <class T>
  LOCKSTEP_BOTH T operator()(T a, T b) const {
    using Wide = typename Wrapping<T>::Unsigned;
    return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
  }
};
struct Multiply {
  template <class T>
  LOCKSTEP_BOTH T operator()(T a, T b) const {
    using Wide = typename Wrapping<T>::Unsigned;
    return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
  }
};
// `a != a`: a NaN, of floating types.
struct Smaller {
  template <class T>
  LOCKSTEP_BOTH T operator()(T a, T b) const {
    return a != a ? a : b != b ? b : b < a ? b : a;
  }
};
struct Larger {
  template <class T>
  LOCKSTEP_BOTH T operator()(T a, T b) const {
    return a != a ? a : b != b ? b : a < b ? b : a;
  }
};
struct BitAnd {
  template <class T>
  LOCKSTEP_BOTH T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
};
struct BitOr {
  template <class T>
  LOCKSTEP_BOTH T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
};
struct BitXor {
  template <class T>
  LOCKSTEP_BOTH T operator()(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
};

// ---- one thread's share ----

// Thread `index` of `total`, in row `part` of the grid.
struct Share {
  std::uint64_t index, total;
  unsigned part;
};

struct alignas(kVectorBytes) Vector {
  std::uint32_t words[4];
};

LOCKSTEP_BOTH unsigned misaligned(const void* pointer) {
  return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(pointer) % kVectorBytes);
}
LOCKSTEP_BOTH const char* source_of(const ReduceTask& task, unsigned s, unsigned part) {
  return static_cast<const char*>(task.from[s]) + part * task.part_bytes;
}

template <class Form>
LOCKSTEP_BOTH typename Form::Compute scaled(typename Form::Compute value, const ReduceTask& task,
                                            bool scales) {
  return scales ? static_cast<typename Form::Compute>(value * static_cast<typename Form::Compute>(task.scale))
                : value;
}

// Elements [begin, end), one at a time.
template <class Form, class Op>
LOCKSTEP_BOTH void reduce_single(const ReduceTask& task, Op op, const Share& share, std::uint64_t begin,
                                 std::uint64_t end, bool scales) {
  using Memory = typename Form::Memory;
  for (std::uint64_t i = begin + share.index; i < end; i += share.total) {
    auto value = Form::load(reinterpret_cast<const Memory*>(source_of(task, 0, share.part))[i]);
    for (unsigned s = 1; s < task.n_from; ++s)
      value = op(value, Form::load(reinterpret_cast<const Memory*>(source_of(task, s, share.part))[i]));
    const Memory result = Form::store(scaled<Form>(value, task, scales));
    const unsigned first = task.scatter != 0 ? share.part : 0,
                   last = task.scatter != 0 ? first + 1 : task.n_to;
    for (unsigned t = first; t < last; ++t) static_cast<Memory*>(task.to[t])[i] = result;
  }
}

// Vectors [0, n) that begin at byte `skip`. kUnrolled loads of every source are under way before the first is used: what
// a device needs to keep its memory busy.
template <class Form, class Op>
LOCKSTEP_BOTH void reduce_vectors(const ReduceTask& task, Op op, const Share& share, std::uint64_t skip,
                                  std::uint64_t n, bool scales) {
  using Memory = typename Form::Memory;
  using Compute = typename Form::Compute;
  constexpr unsigned kLanes = kVectorBytes / sizeof(Memory);
  const unsigned first = task.scatter != 0 ? share.part : 0, last = task.scatter != 0 ? first + 1 : task.n_to;
  for (std::uint64_t base = share.index; base < n; base += kUnrolled * share.total) {
    Compute value[kUnrolled][kLanes];
    for (unsigned s = 0; s < task.n_from; ++s) {
      const auto* const from = reinterpret_cast<const Vector*>(source_of(task, s, share.part) + skip);
      Vector loaded[kUnrolled];
      LOCKSTEP_UNROLL
      for (unsigned u = 0; u < kUnrolled; ++u)
        if (base + u * share.total < n) loaded[u] = from[base + u * share.total];
      LOCKSTEP_UNROLL
      for (unsigned u = 0; u < kUnrolled; ++u) {
        if (base + u * share.total >= n) continue;
        Memory lanes[kLanes];
        memcpy(lanes, &loaded[u], kVectorBytes);
        LOCKSTEP_UNROLL
        for (unsigned l = 0; l < kLanes; ++l) {
          const Compute next = Form::load(lanes[l]);
          value[u][l] = s == 0 ? next : op(value[u][l], next);
        }
      }
    }
    LOCKSTEP_UNROLL
    for (unsigned u = 0; u < kUnrolled; ++u) {
      if (base + u * share.total >= n) continue;
      Memory lanes[kLanes];
      LOCKSTEP_UNROLL
      for (unsigned l = 0; l < kLanes; ++l) lanes[l] = Form::store(scaled<Form>(value[u][l], task, scales));
      Vector result;
      memcpy(&result, lanes, kVectorBytes);
      for (unsigned t = first; t < last; ++t)
        reinterpret_cast<Vector*>(static_cast<char*>(task.to[t]) + skip)[base + u * share.total] = result;
    }
  }
}

// A head of single elements up to the first vector, vectors, a tail. All single when the buffers are not aligned alike.
template <class Form, class Op>
LOCKSTEP_BOTH void reduce_part(const ReduceTask& task, Op op, const Share& share, bool scales) {
  using Memory = typename Form::Memory;
  const unsigned first = task.scatter != 0 ? share.part : 0, last = task.scatter != 0 ? first + 1 : task.n_to;
  const unsigned at = misaligned(source_of(task, 0, share.part));
  bool alike = at % sizeof(Memory) == 0;
  for (unsigned s = 1; s < task.n_from; ++s)
    alike = alike && misaligned(source_of(task, s, share.part)) == at;
  for (unsigned t = first; t < last; ++t) alike = alike && misaligned(task.to[t]) == at;
  std::uint64_t head = alike ? (kVectorBytes - at) % kVectorBytes / sizeof(Memory) : task.count;
  if (head > task.count) head = task.count;
  const std::uint64_t n_vectors = (task.count - head) * sizeof(Memory) / kVectorBytes;
  reduce_single<Form>(task, op, share, 0, head, scales);
  if (n_vectors > 0) reduce_vectors<Form>(task, op, share, head * sizeof(Memory), n_vectors, scales);
  reduce_single<Form>(task, op, share, head + n_vectors * (kVectorBytes / sizeof(Memory)), task.count,
                      scales);
}

template <class Form>
LOCKSTEP_BOTH void reduce_floats(const ReduceTask& task, const Share& share) {
  switch (task.op) {
    case LOCKSTEP_SUM:
      return reduce_part<Form>(task, Add(), share, false);
    case LOCKSTEP_AVG:
      return reduce_part<Form>(task, Add(), share, true);
    case LOCKSTEP_PRODUCT:
      return reduce_part<Form>(task, Multiply(), share, false);
    case LOCKSTEP_MIN:
      return reduce_part<Form>(task, Smaller(), share, false);
    case LOCKSTEP_MAX:
      return reduce_part<Form>(task, Larger(), share, false);
    default:
      return;
  }
}

template <class T>
LOCKSTEP_BOTH void reduce_integers(const ReduceTask& task, const Share& share) {
  using Form = Plain<T>;
  switch (task.op) {
    case LOCKSTEP_SUM:
      return reduce_part<Form>(task, Add(), share, false);
    case LOCKSTEP_PRODUCT:
      return reduce_part<Form>(task, Multiply(), share, false);
    case LOCKSTEP_MIN:
      return reduce_part<Form>(task, Smaller(), share, false);
    case LOCKSTEP_MAX:
      return reduce_part<Form>(task, Larger(), share, false);
    case LOCKSTEP_BAND:
      return reduce_part<Form>(task, BitAnd(), share, false);
    case LOCKSTEP_BOR:
      return reduce_part<Form>(task, BitOr(), share, false);
    case LOCKSTEP_BXOR:
      return reduce_part<Form>(task, BitXor(), share, false);
    default:
      return;
  }
}

// One byte, 0 or 1: sum and max are "any", product and min are "all".
LOCKSTEP_BOTH void reduce_bools(const ReduceTask& task, const Share& share) {
  using Form = Plain<std::uint8_t>;
  switch (task.op) {
    case LOCKSTEP_SUM:
    case LOCKSTEP_MAX:
    case LOCKSTEP_BOR:
      return reduce_part<Form>(task, BitOr(), share, false);
    case LOCKSTEP_PRODUCT:
    case LOCKSTEP_MIN:
    case LOCKSTEP_BAND:
      return reduce_part<Form>(task, BitAnd(), share, false);
    case LOCKSTEP_BXOR:
      return reduce_part<Form>(task, BitXor(), share, false);
    default:
      return;
  }
}

// ---- copies ----

// Units of T that begin at byte `skip`.
template <class T>
LOCKSTEP_BOTH void copy_units(const CopyPiece& piece, const Share& share, std::uint64_t skip,
                              std::uint64_t n) {
  const auto* const from = reinterpret_cast<const T*>(static_cast<const char*>(piece.from) + skip);
  auto* const to = reinterpret_cast<T*>(static_cast<char*>(piece.to) + skip);
  for (std::uint64_t base = share.index; base < n; base += kUnrolled * share.total) {
    T loaded[kUnrolled];
    LOCKSTEP_UNROLL
    for (unsigned u = 0; u < kUnrolled; ++u)
      if (base + u * share.total < n) loaded[u] = from[base + u * share.total];
    LOCKSTEP_UNROLL
    for (unsigned u = 0; u < kUnrolled; ++u)
      if (base + u * share.total < n) to[base + u * share.total] = loaded[u];
  }
}

// The widest unit that fits both addresses; bytes before and after it.
template <class T>
LOCKSTEP_BOTH bool copy_as(const CopyPiece& piece, const Share& share) {
  const auto from = reinterpret_cast<std::uintptr_t>(piece.from),
             to = reinterpret_cast<std::uintptr_t>(piece.to);
  if (from % sizeof(T) != to % sizeof(T)) return false;
  std::uint64_t head = (sizeof(T) - from % sizeof(T)) % sizeof(T);
  if (head > piece.n_bytes) head = piece.n_bytes;
  const std::uint64_t n = (piece.n_bytes - head) / sizeof(T), tail = head + n * sizeof(T);
  copy_units<unsigned char>(piece, share, 0, head);
  copy_units<T>(piece, share, head, n);
  copy_units<unsigned char>(piece, share, tail, piece.n_bytes - tail);
  return true;
}

LOCKSTEP_BOTH void copy_piece(const CopyTask& task, const Share& share) {
  const CopyPiece& piece = task.pieces[share.part];
  if (piece.from == piece.to) return;
  copy_as<Vector>(piece, share) || copy_as<std::uint64_t>(piece, share) ||
      copy_as<std::uint32_t>(piece, share) || copy_as<std::uint16_t>(piece, share) ||
      copy_as<unsigned char>(piece, share);
}

}  // namespace lockstep::cuda_ipc
