// Reads values in the object format from untrusted bytes. Codecs (codec.h) drive it; programs call decode
// (object.h).
//
// Nothing is trusted: a code is checked against the expected one, a length against the remaining bytes before
// memory is allocated, nesting against kMaxDepth. Any mismatch raises kUsage with the path in the value: "at
// .layers[3].name: expected text, got i32". Only the codecs of the type that the caller asked for run. Thread
// safety: none; one thread at a time. The bytes and blobs must outlive it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/base/bytes.h"
#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/object/code.h"
#include "lockstep/object/detail/device_transit.h"
#include "lockstep/object/encoder.h"

namespace lockstep::object {

class Decoder {
 public:
  // Reads the header; raises kUsage when the bytes are not an object of this version, or the number of blobs
  // does not match. `transit`: the object is a message of another worker; it must outlive the decoder, on this thread.
  explicit Decoder(std::span<const std::uint8_t> bytes, std::span<const Blob> blobs = {},
                   DeviceTransit* transit = nullptr);

  // Consumes the value's code; refuses any other than `code`, with `wanted()` naming what was expected.
  template <class Wanted>
  void expect(Code code, Wanted&& wanted) {
    if (peek() != code) refuse_type(wanted());
    take<std::uint8_t>();
  }
  Code peek() const;

  template <class N>
  N take() {
    const auto number = reader_.get<N>();
    if (!number) refuse_short(sizeof(N));
    return *number;
  }
  std::span<const std::uint8_t> take_raw(std::uint64_t n_bytes);
  std::span<const std::uint8_t> take_sized() { return take_raw(take<std::uint64_t>()); }
  // A count of elements of at least `n_bytes` each, checked against the remaining bytes.
  std::size_t take_count(std::size_t n_bytes);
  std::span<const std::uint8_t> take_blob() { return take_held_blob().bytes; }
  // With its owner when it was sent beside the object; without one when it is inside.
  Blob take_held_blob();
  // Validates a value of any type and returns its bytes, code included. Refuses values with blobs beside the
  // object.
  std::span<const std::uint8_t> take_any();
  // Null: tensors return to the device that they were on, in its current stream.
  DeviceTransit* transit() const { return transit_; }
  // Raises when bytes are left over.
  void finish() const;

  // A path component for its lifetime: a field by name, or an element by index ("[3]"; "<3>" in a tuple,
  // ".#3" in a struct whose fields have no names; nothing for the value of an optional or variant).
  class Step {
   public:
    enum class In : std::uint8_t { kList, kTuple, kStruct, kKey, kHeld };
    Step(Decoder& decoder, std::string_view field);
    Step(Decoder& decoder, std::uint64_t index, In in = In::kList);
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    friend class Decoder;
    void enter();
    void print(std::string& path) const;

    Decoder& decoder_;
    const Step* const outer_;
    const std::string_view field_;
    const std::uint64_t index_ = 0;
    const In in_ = In::kStruct;
  };

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    base::raise(ErrorKind::kUsage, base::cat("at ", path(), ": ", parts...));
  }
  [[noreturn]] void refuse_type(const std::string& wanted) const;
  // ".layers[3].name"; "the top" for the value itself.
  std::string path() const;

 private:
  [[noreturn]] void refuse_short(std::uint64_t n_bytes) const;
  void skip();
  std::string describe_next() const;

  const std::span<const std::uint8_t> bytes_;
  const std::span<const Blob> blobs_;
  DeviceTransit* const transit_;
  base::ByteReader reader_;
  const Step* step_ = nullptr;
  int depth_ = 0;
};

}  // namespace lockstep::object
