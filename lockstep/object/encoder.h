// Writes values in the object format. Codecs (codec.h) drive it; programs call encode (object.h).
//
// The output is a byte string and optionally a list of blobs: with one, the bytes of large values (tensors)
// are not copied but referenced in the list, for transports that can send them in place. Thread safety: none;
// one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/object/code.h"
#include "lockstep/object/detail/device_transit.h"

namespace lockstep::object {

// Bytes sent beside an object. `owner` keeps them alive.
struct Blob {
  std::shared_ptr<const void> owner;
  std::span<const std::uint8_t> bytes;
  // The decoder may keep and modify the bytes as long as it holds `owner`: nothing else accesses them.
  bool yours = false;
};
using Blobs = std::vector<Blob>;

class Encoder {
 public:
  // `blobs` null: everything goes into the byte string. Otherwise it must outlive the encoder. `transit`: the object is
  // a message to another worker; its blobs are complete when transit->copies are over. Needs `blobs`.
  explicit Encoder(Blobs* blobs = nullptr, DeviceTransit* transit = nullptr);

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
  // Appended to the byte string, or to the list of blobs.
  Encoder& blob(Blob blob);

  // One nesting level for its lifetime; raises kUsage beyond kMaxDepth, so that the error occurs at the
  // sender.
  class Deeper {
   public:
    explicit Deeper(Encoder& encoder);
    ~Deeper() { --encoder_.depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;

   private:
    Encoder& encoder_;
  };

  // Null: tensors keep the device they are on.
  DeviceTransit* transit() const { return transit_; }
  // The whole object, header included. Call once.
  Bytes take();

 private:
  base::ByteWriter out_;
  Blobs* const blobs_;
  DeviceTransit* const transit_;
  int depth_ = 0;
};

}  // namespace lockstep::object
