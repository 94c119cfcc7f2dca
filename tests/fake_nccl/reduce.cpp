#include "tests/fake_nccl/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace lockstep::fake_nccl {
namespace {

using namespace nccl_plugin;

struct Half {
  std::uint16_t bits;
  operator double() const {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double value = exponent == 0    ? std::ldexp(mantissa, -24)
                         : exponent == 31 ? (mantissa == 0 ? INFINITY : NAN)
                                          : std::ldexp(1024 + mantissa, exponent - 25);
    return (bits & 0x8000) != 0 ? -value : value;
  }
  static Half of(double value) {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::fabs(value);
    if (size == 0) return {sign};
    if (size >= 65520) return {static_cast<std::uint16_t>(sign | 0x7c00)};
    int exponent = 0;
    std::frexp(size, &exponent);
    exponent = std::max(exponent, -13);  // below are the subnormal ones
    const auto steps = static_cast<unsigned>(std::nearbyint(std::ldexp(size, 11 - exponent)));
    // A mantissa that rounds up to 2048 carries into the exponent by itself.
    return {static_cast<std::uint16_t>(sign | (steps + (static_cast<unsigned>(exponent + 13) << 10)))};
  }
};

struct Brain {
  std::uint16_t bits;
  operator double() const {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value = 0;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  static Brain of(double value) {
    const auto narrow = static_cast<float>(value);
    std::uint32_t wide = 0;
    std::memcpy(&wide, &narrow, sizeof wide);
    return {static_cast<std::uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
  }
};

template <class T>
T from_wide(double value) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain>) {
    return T::of(value);
  } else {
    return static_cast<T>(value);
  }
}

template <class Wide>
Wide combine(RedOp op, Wide a, Wide b) {
  switch (op) {
    case kProd:
      return a * b;
    case kMax:
      return std::max(a, b);
    case kMin:
      return std::min(a, b);
    default:
      return a + b;
  }
}

template <class T, class Wide>
void reduce_as(RedOp op, const std::vector<const void*>& from, void* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Wide result = static_cast<Wide>(static_cast<const T*>(from[0])[i]);
    for (std::size_t r = 1; r < from.size(); ++r)
      result = combine(op, result, static_cast<Wide>(static_cast<const T*>(from[r])[i]));
    if constexpr (std::is_floating_point_v<Wide>) {
      if (op == kAvg) result /= static_cast<Wide>(from.size());
      static_cast<T*>(to)[i] = from_wide<T>(result);
    } else {
      static_cast<T*>(to)[i] = static_cast<T>(result);
    }
  }
}

}  // namespace

std::size_t size_of(DataType type) {
  switch (type) {
    case kInt8:
    case kUint8:
      return 1;
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt32:
    case kFloat32:
      return 4;
    default:
      return 8;
  }
}

void reduce(DataType type, RedOp op, const std::vector<const void*>& from, void* to, std::size_t count) {
  switch (type) {
    case kInt8:
      return reduce_as<std::int8_t, std::int64_t>(op, from, to, count);
    case kUint8:
      return reduce_as<std::uint8_t, std::uint64_t>(op, from, to, count);
    case kInt32:
      return reduce_as<std::int32_t, std::int64_t>(op, from, to, count);
    case kInt64:
      return reduce_as<std::int64_t, std::int64_t>(op, from, to, count);
    case kFloat16:
      return reduce_as<Half, double>(op, from, to, count);
    case kBfloat16:
      return reduce_as<Brain, double>(op, from, to, count);
    case kFloat32:
      return reduce_as<float, double>(op, from, to, count);
    case kFloat64:
      return reduce_as<double, double>(op, from, to, count);
  }
}

}  // namespace lockstep::fake_nccl
