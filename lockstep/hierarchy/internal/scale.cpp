#include "lockstep/hierarchy/internal/scale.h"

#include <bit>
#include <cmath>

namespace lockstep::comm::hierarchy {
namespace {

// To nearest even, a NaN kept a NaN: as the kernels of the engines round.
struct Bf16 {
  static float load(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static std::uint16_t store(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

struct F16 {
  static float load(std::uint16_t bits) {
    const std::uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
      const float small = std::ldexp(static_cast<float>(fraction), -24);
      return sign != 0 ? -small : small;
    }
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  }
  static std::uint16_t store(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
    if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00u);
    const float size = std::fabs(value);
    if (size >= 65520.f) return static_cast<std::uint16_t>(sign | 0x7c00u);
    if (size < std::ldexp(1.f, -14)) {  // a multiple of 2^-24, rounded to even by the addition
      return static_cast<std::uint16_t>(sign |
                                        static_cast<std::uint16_t>(std::nearbyint(std::ldexp(size, 24))));
    }
    const std::uint32_t absolute = bits & 0x7fffffffu;
    const std::uint32_t rounded = (absolute + 0xfff + (absolute >> 13 & 1)) >> 13;
    return static_cast<std::uint16_t>(sign | (rounded - (112u << 10)));
  }
};

template <class Half>
void scale_halves(void* data, std::uint64_t count, float factor) {
  auto* const x = static_cast<std::uint16_t*>(data);
  for (std::uint64_t i = 0; i < count; ++i) x[i] = Half::store(Half::load(x[i]) * factor);
}

template <class T>
void scale_plain(void* data, std::uint64_t count, T factor) {
  auto* const x = static_cast<T*>(data);
  for (std::uint64_t i = 0; i < count; ++i) x[i] *= factor;
}

}  // namespace

void scale(lockstep_dtype dtype, void* data, std::uint64_t count, double factor) {
  switch (dtype) {
    case LOCKSTEP_F16:
      return scale_halves<F16>(data, count, static_cast<float>(factor));
    case LOCKSTEP_BF16:
      return scale_halves<Bf16>(data, count, static_cast<float>(factor));
    case LOCKSTEP_F32:
      return scale_plain(data, count, static_cast<float>(factor));
    case LOCKSTEP_F64:
      return scale_plain(data, count, factor);
    default:
      return;
  }
}

}  // namespace lockstep::comm::hierarchy
