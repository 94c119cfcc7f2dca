// The arithmetic of kernels.h; the copies are in stream_copy.cpp.
#include "lockstep/host/kernels.h"

#include <cstdint>
#include <cstring>

// foreach_target.h includes this file again for each instruction set, with another HWY_NAMESPACE; HWY_EXPORT
// at the end collects the versions, and HWY_DYNAMIC_DISPATCH picks the best one for the processor on the
// first call. Everything between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE is compiled several times, what
// needs one definition is guarded.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lockstep/host/kernels.cpp"
// 256-bit and wider plus the baseline: four builds of one loop instead of eight.
#ifdef LOCKSTEP_TWO_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif
#include <hwy/foreach_target.h>
// After it.
#include <hwy/highway.h>

#ifndef LOCKSTEP_HOST_KERNELS_JOB
#define LOCKSTEP_HOST_KERNELS_JOB
namespace lockstep::comm {
// The arguments of reduce() with plain pointers: this struct crosses from the one dispatching function into
// code that is compiled per instruction set, where the types of those builds must not differ. Guarded: this
// file is included repeatedly.
struct Job {
  const void* const* sources;
  std::size_t n_sources;
  void* const* targets;
  std::size_t n_targets;
  std::size_t count;
  double scale;  // 1 unless averaging
};
}  // namespace lockstep::comm
#endif

// Layers, from the outside in: run_any selects the dtype, run_float / run_integer / run_bool the operation,
// run() the number of sources and the scaling, pass() is the loop. Form says how elements are loaded and
// stored, Op how two are combined; Op is applied left to right over the sources, ((s0 op s1) op s2) ...,
// which is the guarantee of kernels.h.
HWY_BEFORE_NAMESPACE();
namespace lockstep::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct Add {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Add(a, b);
  }
};
struct Multiply {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Mul(a, b);
  }
};
// Min and Max of the instruction sets do not agree on NaN, and most return the other operand. torch
// propagates it.
template <class V>
HWY_INLINE V keep_nan(V a, V b, V result) {
  return hn::IfThenElse(hn::IsNaN(a), a, hn::IfThenElse(hn::IsNaN(b), b, result));
}
struct Smaller {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    if constexpr (hwy::IsFloat<hn::TFromV<V>>())
      return keep_nan(a, b, hn::Min(a, b));
    else
      return hn::Min(a, b);
  }
};
struct Larger {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    if constexpr (hwy::IsFloat<hn::TFromV<V>>())
      return keep_nan(a, b, hn::Max(a, b));
    else
      return hn::Max(a, b);
  }
};
struct BitAnd {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::And(a, b);
  }
};
struct BitOr {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Or(a, b);
  }
};
struct BitXor {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Xor(a, b);
  }
};

// How a type is kept in memory and computed with. Plain: the same. Halves: computed in f32.
template <class T>
struct Plain {
  using Memory = T;
  using Compute = T;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const T* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> v, T* to) {
    hn::StoreU(v, d, to);
  }
  template <class V>
  static HWY_INLINE V scale(V v, V factor) {
    if constexpr (hwy::IsFloat<T>())
      return hn::Mul(v, factor);
    else
      return v;
  }
};

struct Half {
  using Memory = hwy::float16_t;
  using Compute = float;
  template <class V>
  static HWY_INLINE V scale(V v, V factor) {
    return hn::Mul(v, factor);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Memory* from) {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<Memory, D>(), from));
  }
  template <class D>
  static HWY_INLINE void store(D, hn::Vec<D> v, Memory* to) {
    const hn::Rebind<Memory, D> dh;
    hn::StoreU(hn::DemoteTo(dh, v), dh, to);
  }
};

struct BrainHalf {
  using Memory = std::uint16_t;
  using Compute = float;
  template <class V>
  static HWY_INLINE V scale(V v, V factor) {
    return hn::Mul(v, factor);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Memory* from) {
    // bf16 is the upper half of an f32, so widening is exact.
    const hn::Rebind<std::uint32_t, D> du;
    const auto wide = hn::PromoteTo(du, hn::LoadU(hn::Rebind<Memory, D>(), from));
    return hn::BitCast(d, hn::ShiftLeft<16>(wide));
  }
  // Highway 1.0's own demotion truncates, which biases sums: round to nearest even, and keep NaN a NaN.
  template <class D>
  static HWY_INLINE void store(D, hn::Vec<D> v, Memory* to) {
    const hn::Rebind<std::uint32_t, D> du;
    // Adding 0x7FFF plus the lowest kept bit carries into the kept half exactly when the dropped half is
    // above one half of a unit, or equal to it with an odd result. A NaN could carry into infinity or lose
    // its fraction: its quiet bit is set instead.
    const hn::Rebind<Memory, D> dh;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, odd), hn::Set(du, 0x7FFFu)));
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(v));
    const auto out = hn::IfThenElse(is_nan, hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u)), rounded);
    hn::StoreU(hn::DemoteTo(dh, hn::BitCast(hn::Rebind<std::int32_t, D>(), out)), dh, to);
  }
};

// A vector of every source at element i, reduced. Templated on the number of sources so that the common case
// keeps its pointers in registers; 0 means as many as the job says.
template <class Form, int kSources>
struct Sources {
  const typename Form::Memory* at[kSources];
  explicit Sources(const Job& job) {
    for (int s = 0; s < kSources; ++s) at[s] = static_cast<const typename Form::Memory*>(job.sources[s]);
  }
  template <class D, class Op>
  HWY_INLINE hn::Vec<D> reduce(D d, Op op, std::size_t i) const {
    auto sum = Form::load(d, at[0] + i);
    for (int s = 1; s < kSources; ++s) sum = op(sum, Form::load(d, at[s] + i));
    return sum;
  }
};
template <class Form>
struct Sources<Form, 0> {
  const Job& job;
  explicit Sources(const Job& from) : job(from) {}
  template <class D, class Op>
  HWY_INLINE hn::Vec<D> reduce(D d, Op op, std::size_t i) const {
    auto sum = Form::load(d, static_cast<const typename Form::Memory*>(job.sources[0]) + i);
    for (std::size_t s = 1; s < job.n_sources; ++s) {
      sum = op(sum, Form::load(d, static_cast<const typename Form::Memory*>(job.sources[s]) + i));
    }
    return sum;
  }
};

template <class Form, class D>
HWY_INLINE void store_all(D d, hn::Vec<D> v, const Job& job, std::size_t i) {
  for (std::size_t t = 0; t < job.n_targets; ++t) {
    Form::store(d, v, static_cast<typename Form::Memory*>(job.targets[t]) + i);
  }
}

// The elements that do not fill a vector go through a padded copy, so that their arithmetic is the same.
template <class Form, class D, class Op>
HWY_NOINLINE void tail(D d, Op op, const Job& job, std::size_t i, hn::Vec<D> factor) {
  using Memory = typename Form::Memory;
  // Lanes beyond the end stay zero in the input; they are computed too and not copied out.
  HWY_ALIGN Memory padded[HWY_MAX_BYTES / sizeof(Memory)] = {};
  const std::size_t n_bytes = (job.count - i) * sizeof(Memory);
  auto sum = hn::Zero(d);
  for (std::size_t s = 0; s < job.n_sources; ++s) {
    std::memcpy(padded, static_cast<const Memory*>(job.sources[s]) + i, n_bytes);
    const auto v = Form::load(d, padded);
    sum = s == 0 ? v : op(sum, v);
  }
  if (job.scale != 1.0) sum = Form::scale(sum, factor);
  Form::store(d, sum, padded);
  for (std::size_t t = 0; t < job.n_targets; ++t) {
    std::memcpy(static_cast<Memory*>(job.targets[t]) + i, padded, n_bytes);
  }
}

// One pass over all inputs, so that each byte is read from memory once however many ranks there are; a loop
// over pairs of buffers would read and write the sum again for every rank. Two vectors per turn: their
// additions do not depend on each other, which hides the latency of the operation. The number of sources and
// the scaling are template arguments to keep tests out of the loop.
template <class Form, int kSources, bool kScaled, class Op>
void pass(Op op, const Job& job) {
  using Compute = typename Form::Compute;
  const hn::ScalableTag<Compute> d;
  const std::size_t lanes = hn::Lanes(d);
  const Sources<Form, kSources> sources(job);
  const auto factor = hn::Set(d, static_cast<Compute>(job.scale));
  auto* const first = static_cast<typename Form::Memory*>(job.targets[0]);
  auto* const second = static_cast<typename Form::Memory*>(job.targets[job.n_targets == 2 ? 1 : 0]);
  std::size_t i = 0;
  if (job.n_targets <= 2) {  // two pointers are cheaper than a loop over targets
    for (; i + 2 * lanes <= job.count; i += 2 * lanes) {
      auto a = sources.reduce(d, op, i);
      auto b = sources.reduce(d, op, i + lanes);
      if constexpr (kScaled) a = Form::scale(a, factor), b = Form::scale(b, factor);
      Form::store(d, a, first + i);
      Form::store(d, b, first + i + lanes);
      if (second != first) {
        Form::store(d, a, second + i);
        Form::store(d, b, second + i + lanes);
      }
    }
  }
  for (; i + lanes <= job.count; i += lanes) {
    auto a = sources.reduce(d, op, i);
    if constexpr (kScaled) a = Form::scale(a, factor);
    store_all<Form>(d, a, job, i);
  }
  if (i < job.count) tail<Form>(d, op, job, i, factor);
}

template <class Form, class Op>
void run(Op op, const Job& job) {
  // Only two sources, the case of two ranks, have a version of their own: every further one would be compiled
  // again for each dtype, operation and instruction set.
  if constexpr (hwy::IsFloat<typename Form::Compute>()) {
    if (job.scale != 1.0) {
      return job.n_sources == 2 ? pass<Form, 2, true>(op, job) : pass<Form, 0, true>(op, job);
    }
  }
  return job.n_sources == 2 ? pass<Form, 2, false>(op, job) : pass<Form, 0, false>(op, job);
}

// Integer products: Highway has no 8-bit multiply. Unsigned, so that overflow wraps as in torch.
template <class T>
void product(const Job& job) {
  for (std::size_t i = 0; i < job.count; ++i) {
    std::uint64_t value = 1;
    for (std::size_t s = 0; s < job.n_sources; ++s) value *= static_cast<const T*>(job.sources[s])[i];
    for (std::size_t t = 0; t < job.n_targets; ++t)
      static_cast<T*>(job.targets[t])[i] = static_cast<T>(value);
  }
}

template <class Form>
void run_float(lockstep_reduce_op op, const Job& job) {
  switch (op) {
    case LOCKSTEP_SUM:
    case LOCKSTEP_AVG:
      return run<Form>(Add(), job);
    case LOCKSTEP_PRODUCT:
      return run<Form>(Multiply(), job);
    case LOCKSTEP_MIN:
      return run<Form>(Smaller(), job);
    case LOCKSTEP_MAX:
      return run<Form>(Larger(), job);
    default:
      return;
  }
}

template <class T, class Unsigned>
void run_integer(lockstep_reduce_op op, const Job& job) {
  switch (op) {
    case LOCKSTEP_SUM:
      return run<Plain<T>>(Add(), job);
    case LOCKSTEP_PRODUCT:
      return product<Unsigned>(job);
    case LOCKSTEP_MIN:
      return run<Plain<T>>(Smaller(), job);
    case LOCKSTEP_MAX:
      return run<Plain<T>>(Larger(), job);
    case LOCKSTEP_BAND:
      return run<Plain<T>>(BitAnd(), job);
    case LOCKSTEP_BOR:
      return run<Plain<T>>(BitOr(), job);
    case LOCKSTEP_BXOR:
      return run<Plain<T>>(BitXor(), job);
    default:
      return;
  }
}

// torch's bool is one byte, 0 or 1: sum and max are "any", product and min are "all".
void run_bool(lockstep_reduce_op op, const Job& job) {
  switch (op) {
    case LOCKSTEP_SUM:
    case LOCKSTEP_MAX:
    case LOCKSTEP_BOR:
      return run<Plain<std::uint8_t>>(BitOr(), job);
    case LOCKSTEP_PRODUCT:
    case LOCKSTEP_MIN:
    case LOCKSTEP_BAND:
      return run<Plain<std::uint8_t>>(BitAnd(), job);
    case LOCKSTEP_BXOR:
      return run<Plain<std::uint8_t>>(BitXor(), job);
    default:
      return;
  }
}

void run_any(lockstep_dtype dtype, lockstep_reduce_op op, const Job& job) {
  switch (dtype) {
    case LOCKSTEP_U8:
      return run_integer<std::uint8_t, std::uint8_t>(op, job);
    case LOCKSTEP_I8:
      return run_integer<std::int8_t, std::uint8_t>(op, job);
    case LOCKSTEP_I16:
      return run_integer<std::int16_t, std::uint16_t>(op, job);
    case LOCKSTEP_I32:
      return run_integer<std::int32_t, std::uint32_t>(op, job);
    case LOCKSTEP_I64:
      return run_integer<std::int64_t, std::uint64_t>(op, job);
    case LOCKSTEP_F16:
      return run_float<Half>(op, job);
    case LOCKSTEP_BF16:
      return run_float<BrainHalf>(op, job);
    case LOCKSTEP_F32:
      return run_float<Plain<float>>(op, job);
    case LOCKSTEP_F64:
      return run_float<Plain<double>>(op, job);
    case LOCKSTEP_BOOL:
      return run_bool(op, job);
    case LOCKSTEP_DTYPES:
      return;
  }
}

}  // namespace lockstep::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::comm {

HWY_EXPORT(run_any);

bool can_reduce(lockstep_dtype dtype, lockstep_reduce_op op) {
  const bool floating = dtype >= LOCKSTEP_F16 && dtype <= LOCKSTEP_F64;
  switch (op) {
    case LOCKSTEP_SUM:
    case LOCKSTEP_PRODUCT:
    case LOCKSTEP_MIN:
    case LOCKSTEP_MAX:
      return size_of(dtype) != 0;
    case LOCKSTEP_AVG:
      return floating;
    case LOCKSTEP_BAND:
    case LOCKSTEP_BOR:
    case LOCKSTEP_BXOR:
      return size_of(dtype) != 0 && !floating;
    case LOCKSTEP_REDUCE_OPS:
      return false;
  }
  return false;
}

void reduce(lockstep_dtype dtype, lockstep_reduce_op op, std::span<const void* const> sources,
            std::span<void* const> targets, std::size_t count) {
  // Applied once, to the finished sum; exact when the number of sources is a power of two (barring
  // underflow).
  const double scale = op == LOCKSTEP_AVG ? 1.0 / static_cast<double>(sources.size()) : 1.0;
  const Job job{sources.data(), sources.size(), targets.data(), targets.size(), count, scale};
  HWY_DYNAMIC_DISPATCH(run_any)(dtype, op, job);
}

}  // namespace lockstep::comm
#endif
