// Bounds-checked reader and writer of byte strings. Integers are little-endian as on the wire (docs/wire.md).
// A reader never trusts a length: it is checked against the remaining bytes before anything is consumed.
// Thread safety: none; one thread at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/base/bytes.h"

namespace lockstep::base {

// Appends to a buffer it owns. take() moves the buffer out.
class ByteWriter {
 public:
  template <class T>
  requires std::is_trivially_copyable_v<T> ByteWriter& put(const T& value) {
    return raw({reinterpret_cast<const std::uint8_t*>(&value), sizeof(T)});
  }
  // uint64 length, then the bytes.
  ByteWriter& sized(std::span<const std::uint8_t> bytes) {
    return put(static_cast<std::uint64_t>(bytes.size())).raw(bytes);
  }
  ByteWriter& sized(std::string_view text) {
    return sized({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
  }
  ByteWriter& raw(std::span<const std::uint8_t> bytes) {
    // Room for a few small values at once; g++ 12 at -O3 also reports a false overflow for an insert into an
    // empty vector.
    if (buffer_.capacity() == 0) buffer_.reserve(bytes.size() + 64);
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  std::span<const std::uint8_t> view() const { return buffer_; }
  Bytes take() { return std::move(buffer_); }
  void clear() { buffer_.clear(); }

 private:
  Bytes buffer_;
};

// Reads from bytes that must outlive it. A read beyond the end returns nothing and does not advance the
// reader.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  template <class T>
  requires std::is_trivially_copyable_v<T> std::optional<T> get() {
    if (left() < sizeof(T)) return std::nullopt;
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  std::optional<std::span<const std::uint8_t>> raw(std::size_t n_bytes) {
    if (left() < n_bytes) return std::nullopt;
    auto part = bytes_.subspan(at_, n_bytes);
    at_ += n_bytes;
    return part;
  }
  // uint64 length, then the bytes.
  std::optional<std::span<const std::uint8_t>> sized() {
    const std::size_t start = at_;
    const auto n_bytes = get<std::uint64_t>();
    if (n_bytes && *n_bytes <= left()) return raw(static_cast<std::size_t>(*n_bytes));
    at_ = start;
    return std::nullopt;
  }
  std::size_t left() const { return bytes_.size() - at_; }
  std::size_t position() const { return at_; }

 private:
  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
};

}  // namespace lockstep::base
