// Copies of kernels.h with stores that bypass the caches.
#include <cstdint>
#include <cstring>

#include "lockstep/host/kernels.h"

// Included again for each instruction set: kernels.cpp says how, and which ones.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lockstep/host/stream_copy.cpp"
#ifdef LOCKSTEP_TWO_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif
#include <hwy/foreach_target.h>
// After it.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace lockstep::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Between rows the processor's own prefetching begins again and again, too late: it costs two thirds of the
// speed with rows of 5 KiB. Bytes ahead of the copy, in this row or in the one at `next`.
constexpr std::size_t kAhead = 2048;
HWY_INLINE void prefetch_ahead(const std::uint8_t* from, std::size_t at, std::size_t n_bytes,
                               const std::uint8_t* next) {
  const std::size_t ahead = at + kAhead;
  hwy::Prefetch(ahead < n_bytes ? from + ahead : next + (ahead - n_bytes));
}

// `next`: the row that comes after this one; null when there is none.
void stream_row(std::uint8_t* to, const std::uint8_t* from, std::size_t n_bytes, const std::uint8_t* next) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t width = hn::Lanes(d);
  // Streaming stores need an aligned target; the bytes before the first whole vector, and after the last one,
  // are copied as usual.
  const std::size_t before = (width - reinterpret_cast<std::uintptr_t>(to) % width) % width;
  if (n_bytes < before + 4 * width) {
    if (n_bytes != 0) std::memcpy(to, from, n_bytes);
    return;
  }
  std::memcpy(to, from, before);
  std::size_t at = before;
  for (; at + 4 * width <= n_bytes; at += 4 * width) {
    if (next != nullptr) {
      for (std::size_t line = 0; line < 4 * width; line += 64) prefetch_ahead(from, at + line, n_bytes, next);
    }
    const auto a = hn::LoadU(d, from + at), b = hn::LoadU(d, from + at + width);
    const auto c = hn::LoadU(d, from + at + 2 * width), e = hn::LoadU(d, from + at + 3 * width);
    hn::Stream(a, d, to + at);
    hn::Stream(b, d, to + at + width);
    hn::Stream(c, d, to + at + 2 * width);
    hn::Stream(e, d, to + at + 3 * width);
  }
  std::memcpy(to + at, from + at, n_bytes - at);
}

void stream_any(std::uint8_t* to, std::size_t to_pitch, const std::uint8_t* from, std::size_t from_pitch,
                std::size_t run, std::size_t n_rows) {
  for (std::size_t row = 0; row < n_rows; ++row) {
    const std::uint8_t* const begin = from + row * from_pitch;
    stream_row(to + row * to_pitch, begin, run,
               n_rows > 1 && from_pitch != run ? begin + from_pitch : nullptr);
  }
  hwy::FlushStream();  // before any flag that says the bytes are there
}

}  // namespace lockstep::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lockstep::comm {

HWY_EXPORT(stream_any);

void stream_copy(void* to, const void* from, std::size_t n_bytes) {
  stream_copy_rows(to, 0, from, 0, n_bytes, 1);
}

void stream_copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                      std::size_t run, std::size_t n_rows) {
  HWY_DYNAMIC_DISPATCH(stream_any)
  (static_cast<std::uint8_t*>(to), to_pitch, static_cast<const std::uint8_t*>(from), from_pitch, run, n_rows);
}

}  // namespace lockstep::comm
#endif
