// Byte strings, as used by stores and objects. Thread safety: values, no shared state.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

using Bytes = std::vector<std::uint8_t>;

inline Bytes to_bytes(std::span<const std::uint8_t> bytes) {
  return Bytes(bytes.begin(), bytes.end());
}
inline Bytes to_bytes(std::string_view text) {
  return Bytes(text.begin(), text.end());
}
inline std::string_view as_text(std::span<const std::uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
inline std::string to_text(std::span<const std::uint8_t> bytes) {
  return std::string(as_text(bytes));
}

}  // namespace lockstep
