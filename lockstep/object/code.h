// The type codes of the object format (docs/wire.md): the byte every value begins with. Codes never change;
// new kinds of value get new codes and a new format version. Thread safety: no state.
#pragma once

#include <bit>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace lockstep::object {

static_assert(std::endian::native == std::endian::little, "objects are written as they are stored in memory");

enum class Code : std::uint8_t {
  kNothing = 0x00,  // std::nullopt, a null pointer, std::monostate, an undefined tensor, an empty Object
  kBool = 0x01,
  kI8 = 0x02,
  kU8 = 0x03,
  kI16 = 0x04,
  kU16 = 0x05,
  kI32 = 0x06,
  kU32 = 0x07,
  kI64 = 0x08,
  kU64 = 0x09,
  kF32 = 0x0A,
  kF64 = 0x0B,
  kC64 = 0x0C,
  kC128 = 0x0D,
  kText = 0x10,
  kPacked = 0x11,  // numbers without individual codes
  kList = 0x12,
  kMap = 0x13,
  kTuple = 0x14,
  kSome = 0x15,
  kVariant = 0x16,
  kStruct = 0x17,
  kTensor = 0x18,
};

inline constexpr std::uint8_t kMagic[] = {'L', 'S', 'O'};
inline constexpr std::uint8_t kVersion = 1;
// Maximum nesting depth, for encoding and decoding: decoding recurses.
inline constexpr int kMaxDepth = 128;

// "i32"; "an unknown type" for a byte that is not a code.
std::string_view name_of(Code code) noexcept;
// Bytes of a number (kBool to kC128), 0 for any other code.
std::size_t width_of(Code code) noexcept;

template <class T>
inline constexpr bool is_complex = false;
template <>
inline constexpr bool is_complex<std::complex<float>> = true;
template <>
inline constexpr bool is_complex<std::complex<double>> = true;

// The types that are packed in sequences. long double has no fixed representation and is excluded.
template <class T>
concept Number = (std::is_integral_v<T> && sizeof(T) <= 8) || std::is_same_v<T, float> ||
                 std::is_same_v<T, double> || std::is_enum_v<T> || is_complex<T>;

// By size and signedness, so that long and long long are one type; an enum has its underlying type's code.
template <Number T>
consteval Code code_of() {
  if constexpr (std::is_enum_v<T>) {
    return code_of<std::underlying_type_t<T>>();
  } else if constexpr (std::is_same_v<T, bool>) {
    return Code::kBool;
  } else if constexpr (std::is_integral_v<T>) {
    constexpr int step = 2 * std::countr_zero(sizeof(T)) + (std::is_signed_v<T> ? 0 : 1);
    return static_cast<Code>(static_cast<int>(Code::kI8) + step);
  } else if constexpr (is_complex<T>) {
    return sizeof(T) == 8 ? Code::kC64 : Code::kC128;
  } else {
    return sizeof(T) == 4 ? Code::kF32 : Code::kF64;
  }
}

}  // namespace lockstep::object
