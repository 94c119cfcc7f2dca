// Plain arithmetic to hold engines against: elements are small whole numbers, chosen so that every reduction
// of up to eight of them is exact in every type, so that results are compared by their bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm::reference {

inline std::size_t bytes_of(lockstep_dtype dtype) {
  switch (dtype) {
    case LOCKSTEP_I16:
    case LOCKSTEP_F16:
    case LOCKSTEP_BF16:
      return 2;
    case LOCKSTEP_I32:
    case LOCKSTEP_F32:
      return 4;
    case LOCKSTEP_I64:
    case LOCKSTEP_F64:
      return 8;
    default:
      return 1;
  }
}

inline bool is_float(lockstep_dtype dtype) {
  return dtype == LOCKSTEP_F16 || dtype == LOCKSTEP_BF16 || dtype == LOCKSTEP_F32 || dtype == LOCKSTEP_F64;
}

// Which pairs a complete engine reduces.
inline bool legal(lockstep_dtype dtype, lockstep_reduce_op op) {
  if (op == LOCKSTEP_AVG) return is_float(dtype);
  if (op == LOCKSTEP_BAND || op == LOCKSTEP_BOR || op == LOCKSTEP_BXOR) return !is_float(dtype);
  return true;
}

// Writes `value` at `to`. Pre: exact in the type; integers are cut to their width.
inline void encode(lockstep_dtype dtype, std::int64_t value, std::uint8_t* to) {
  if (dtype == LOCKSTEP_F64) {
    const auto x = static_cast<double>(value);
    std::memcpy(to, &x, sizeof x);
  } else if (is_float(dtype)) {
    const auto x = static_cast<float>(value);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    if (dtype == LOCKSTEP_BF16) bits >>= 16;
    if (dtype == LOCKSTEP_F16 && bits != 0) {
      const std::uint32_t sign = bits >> 31 << 15, exponent = (bits >> 23 & 0xffu) - 127 + 15;
      bits = sign | exponent << 10 | (bits >> 13 & 0x3ffu);
    }
    std::memcpy(to, &bits, bytes_of(dtype));
  } else {
    std::memcpy(to, &value, bytes_of(dtype));
  }
}

// Element `i` that rank `r` of `n` puts in.
inline std::int64_t element(lockstep_dtype dtype, lockstep_reduce_op op, int r, int n, std::uint64_t i) {
  const bool is_bool = dtype == LOCKSTEP_BOOL, is_unsigned = dtype == LOCKSTEP_U8;
  const auto mix = static_cast<std::int64_t>(i * 3 + static_cast<std::uint64_t>(r) * 7 + i / 11);
  if (is_bool)
    return op == LOCKSTEP_PRODUCT || op == LOCKSTEP_BAND || op == LOCKSTEP_MIN ? mix % 5 != 0 : mix % 5 == 0;
  switch (op) {
    case LOCKSTEP_AVG: {  // the mean is a power of two or nothing, so that dividing and multiplying by 1/n agree
      static constexpr std::int64_t kMeans[] = {0, 1, 2, 4, -1, -2};
      return kMeans[i % 6] + 2 * r - (n - 1);
    }
    case LOCKSTEP_PRODUCT: {
      static constexpr std::int64_t kFactors[] = {1, 2, -1, -2};
      return is_unsigned ? 1 + mix % 2 : kFactors[mix % 4];
    }
    case LOCKSTEP_BAND:
    case LOCKSTEP_BOR:
    case LOCKSTEP_BXOR:
      return mix * 37 % 128;
    default:
      return mix % 15 - (is_unsigned ? 0 : 7);
  }
}

inline std::int64_t combine(lockstep_dtype dtype, lockstep_reduce_op op, std::int64_t a, std::int64_t b) {
  const bool is_bool = dtype == LOCKSTEP_BOOL;
  switch (op) {
    case LOCKSTEP_PRODUCT:
      return a * b;
    case LOCKSTEP_MIN:
      return a < b ? a : b;
    case LOCKSTEP_MAX:
      return a > b ? a : b;
    case LOCKSTEP_BAND:
      return a & b;
    case LOCKSTEP_BOR:
      return a | b;
    case LOCKSTEP_BXOR:
      return a ^ b;
    default:
      return is_bool ? (a | b) : a + b;
  }
}

// Element `i` of all ranks together.
inline std::int64_t reduced(lockstep_dtype dtype, lockstep_reduce_op op, int n, std::uint64_t i) {
  std::int64_t result = element(dtype, op, 0, n, i);
  for (int r = 1; r < n; ++r) result = combine(dtype, op, result, element(dtype, op, r, n, i));
  return op == LOCKSTEP_AVG ? result / n : result;
}

}  // namespace lockstep::comm::reference
