// Writes values in the object format. Codecs (codec.h) drive it; programs call encode (object.h).
//
// The sink is a byte string and, when wanted, a list of blobs: with one, the bytes of large things (tensors) are not
// copied but handed over beside the byte string, for transports that can send from where they lie.
// Thread safety: none; a value of one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/object/code.h"

namespace lockstep::object {

// Bytes that travel beside an object. `owner` keeps them where they are.
struct Blob {
  std::shared_ptr<const void> owner;
  std::span<const std::uint8_t> bytes;
  // Whoever decodes may keep the bytes, and change them, for as long as it holds `owner`: nobody else looks at them.
  bool yours = false;
};
using Blobs = std::vector<Blob>;

class Encoder {
 public:
  // `blobs` null: everything goes into the byte string. Else it must outlive the encoder.
  explicit Encoder(Blobs* blobs = nullptr);

  Encoder& code(Code code) { return put(static_cast<std::uint8_t>(code)); }
  template <class N>
  Encoder& put(const N& number) {
    out_.put(number);
    return *this;
  }
  Encoder& sized(std::span<const std::uint8_t> bytes) {
    out_.sized(bytes);
    return *this;
  }
  Encoder& sized(std::string_view text) {
    out_.sized(text);
    return *this;
  }
  Encoder& raw(std::span<const std::uint8_t> bytes) {
    out_.raw(bytes);
    return *this;
  }
  // In place, or beside the object.
  Encoder& blob(Blob blob);

  // One level down while it lives; raises kUsage beyond kMaxDepth, so that the sender hears of it.
  class Deeper {
   public:
    explicit Deeper(Encoder& encoder);
    ~Deeper() { --encoder_.depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;

   private:
    Encoder& encoder_;
  };

  // The whole object, header included. Once.
  Bytes take();

 private:
  base::ByteWriter out_;
  Blobs* const blobs_;
  int depth_ = 0;
};

}  // namespace lockstep::object
