// C++ values as bytes: self-describing, bounded, data only (docs/wire.md). codec.h shows how to add a struct
// of your own.
//
//   Bytes bytes = encode(std::map<std::string, std::vector<double>>{{"loss", {0.5, 0.25}}});
//   auto back = decode<std::map<std::string, std::vector<double>>>(bytes);
//
// Every value carries its type: a reader that expects another one gets a kUsage error with the path in the
// value, never a wrong value. Types are numbers, bool, enums, std::string, what container_codecs.h and
// tuple_codecs.h name, tensors (include tensor/tensor_object.h), structs with lockstep_fields, and Object,
// which holds any of these. Thread safety: values, no shared state.
#pragma once

#include <concepts>
#include <span>
#include <string>
#include <type_traits>

#include "lockstep/base/bytes.h"
#include "lockstep/object/codec.h"
#include "lockstep/object/container_codecs.h"
#include "lockstep/object/tuple_codecs.h"

namespace lockstep {

// Raises kUsage for a value nested too deeply, kUnsupported for a tensor that cannot be sent.
template <class T>
Bytes encode(const T& value) {
  object::Encoder encoder;
  object::write(encoder, value);
  return encoder.take();
}

// As above, but the bytes of tensors are not copied: they are appended to `blobs`, which keep the tensors
// alive. `transit`: the object is a message to another worker.
template <class T>
Bytes encode(const T& value, object::Blobs& blobs, object::DeviceTransit* transit = nullptr) {
  object::Encoder encoder(&blobs, transit);
  object::write(encoder, value);
  return encoder.take();
}

// Raises kUsage when the bytes are not exactly one T, or are corrupt. `blobs` are those of encode. `transit`: the object
// is a message of another worker; its streams stay current until that is destroyed.
template <class T>
T decode(std::span<const std::uint8_t> bytes, std::span<const object::Blob> blobs = {},
         object::DeviceTransit* transit = nullptr) {
  object::Decoder decoder(bytes, blobs, transit);
  T value = object::read<T>(decoder);
  decoder.finish();
  return value;
}

// A value of any type that can be sent, for lists whose entries differ:
//
//   std::vector<Object> list = {Object(3), Object("three"), Object(std::vector{1.0, 2.0})};
//   all_gather_object(...);  list[1].as<std::string>();
//
// Holds the encoded value, so a copy costs its bytes. Default-constructed: empty.
class Object {
 public:
  Object() = default;
  template <class T>
  requires(!std::same_as<std::remove_cvref_t<T>, Object>) explicit Object(const T& value) {
    if constexpr (std::is_convertible_v<const T&, std::string_view>) {
      value_ = strip(encode(std::string(std::string_view(value))));
    } else {
      value_ = strip(encode(value));
    }
  }

  // Raises kUsage, naming both types, when it holds something else.
  template <class T>
  T as() const {
    return decode<T>(with_header());
  }
  // The type of the value: "i32", "list", "nothing".
  std::string type() const;
  bool empty() const { return value_.empty(); }
  // Compares the encoded bytes; equal unordered containers may differ in order.
  friend bool operator==(const Object&, const Object&) = default;

 private:
  friend struct object::Codec<Object>;
  static Bytes strip(Bytes object);
  Bytes with_header() const;

  Bytes value_;  // without header; empty for nothing
};

namespace object {

template <>
struct Codec<Object> {
  static std::string name() { return "any value"; }
  static void write(Encoder& encoder, const Object& value);
  static void read(Decoder& decoder, Object& out);
};

}  // namespace object
}  // namespace lockstep
