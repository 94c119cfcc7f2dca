#include "lockstep/object/encoder.h"

#include <cstring>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep::object {
namespace {

constexpr std::size_t kBlobCountAt = sizeof(kMagic) + sizeof(kVersion);

}  // namespace

std::string_view name_of(Code code) noexcept {
  switch (code) {
    case Code::kNothing:
      return "nothing";
    case Code::kBool:
      return "bool";
    case Code::kI8:
      return "i8";
    case Code::kU8:
      return "u8";
    case Code::kI16:
      return "i16";
    case Code::kU16:
      return "u16";
    case Code::kI32:
      return "i32";
    case Code::kU32:
      return "u32";
    case Code::kI64:
      return "i64";
    case Code::kU64:
      return "u64";
    case Code::kF32:
      return "f32";
    case Code::kF64:
      return "f64";
    case Code::kC64:
      return "c64";
    case Code::kC128:
      return "c128";
    case Code::kText:
      return "text";
    case Code::kPacked:
      return "packed list";
    case Code::kList:
      return "list";
    case Code::kMap:
      return "map";
    case Code::kTuple:
      return "tuple";
    case Code::kSome:
      return "optional";
    case Code::kVariant:
      return "variant";
    case Code::kStruct:
      return "struct";
    case Code::kTensor:
      return "tensor";
  }
  return "an unknown type";
}

std::size_t width_of(Code code) noexcept {
  constexpr std::uint8_t kWidths[] = {0, 1, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 8, 16};
  const auto number = static_cast<std::size_t>(code);
  return number < sizeof(kWidths) ? kWidths[number] : 0;
}

Encoder::Encoder(Blobs* blobs, DeviceTransit* transit) : blobs_(blobs), transit_(transit) {
  out_.raw(kMagic).put(kVersion).put(std::uint32_t{0});
}

Encoder& Encoder::blob(Blob blob) {
  if (blobs_ == nullptr) return put(std::uint8_t{0}).sized(blob.bytes);
  put(std::uint8_t{1}).put(static_cast<std::uint32_t>(blobs_->size()));
  put(static_cast<std::uint64_t>(blob.bytes.size()));
  blobs_->push_back(std::move(blob));
  return *this;
}

Encoder::Deeper::Deeper(Encoder& encoder) : encoder_(encoder) {
  if (encoder.depth_ >= kMaxDepth) {
    base::raise(ErrorKind::kUsage, base::cat("this object is nested more than ", kMaxDepth,
                                             " levels deep; send a long chain as a list of its links"));
  }
  ++encoder.depth_;
}

// The number of blobs is known only at the end; its place in the head was left open.
Bytes Encoder::take() {
  Bytes bytes = out_.take();
  if (blobs_ != nullptr) {
    const auto n = static_cast<std::uint32_t>(blobs_->size());
    std::memcpy(bytes.data() + kBlobCountAt, &n, sizeof n);
  }
  return bytes;
}

}  // namespace lockstep::object
