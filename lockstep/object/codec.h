// Conversion between C++ types and the object format: Codec<T>, specialised here for numbers, text and
// structs, in container_codecs.h and tuple_codecs.h for the standard library, in tensor/tensor_object.h for
// tensors.
//
// A user's struct needs one function beside it, found by argument-dependent lookup, that lists its members:
//
//   struct Sample { std::string name; std::vector<float> values; };
//   auto lockstep_fields(lockstep::SelfOf<Sample> auto& self) { return std::tie(self.name, self.values); }
//
// or, with a name and version that must match on both sides and member names for error messages:
//
//   auto lockstep_fields(lockstep::SelfOf<Sample> auto& self) {
//     return lockstep::fields({.name = "app.Sample", .version = 2, .members = "name values"}, self.name, self.values);
//   }
//
// The struct must be default constructible. For private members declare the function a friend, or define it
// in the class. Thread safety: no shared state.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lockstep/object/code.h"
#include "lockstep/object/decoder.h"
#include "lockstep/object/encoder.h"

namespace lockstep {

// T or const T: one lockstep_fields serves writing and reading.
template <class Self, class T>
concept SelfOf = std::same_as<std::remove_const_t<Self>, T>;

// What the two sides compare of a struct. The strings must be literals.
struct StructInfo {
  std::string_view name{};
  std::uint32_t version = 0;
  std::string_view members{};  // separated by spaces; not sent
};

template <class... Members>
struct Fields {
  StructInfo info;
  std::tuple<Members&...> members;
};

template <class... Members>
Fields<Members...> fields(StructInfo info, Members&... members) {
  return {info, std::tie(members...)};
}

namespace object {

// Each has
//   static std::string name()                the type in error messages
//   static void write(Encoder&, const T&)
//   static void read(Decoder&, T& out)       `out` is default constructed; raises kUsage
template <class T>
struct Codec;

// T can be encoded. Checked up front, for a readable compile error.
template <class T>
concept Encodable = requires(Encoder& encoder, const T& value) {
  Codec<T>::write(encoder, value);
  Codec<T>::name();
};

template <class T>
void write(Encoder& encoder, const T& value) {
  static_assert(
      Encodable<T>,
      "lockstep cannot encode this type: give it a lockstep_fields function (lockstep/object/codec.h); "
      "for tensors include lockstep/tensor/tensor_object.h");
  Codec<T>::write(encoder, value);
}

template <class T>
T read(Decoder& decoder) {
  static_assert(std::is_default_constructible_v<T>, "a type that is decoded must be default constructible");
  T value{};
  Codec<T>::read(decoder, value);
  return value;
}

// A bool or an enum of bool must be 0 or 1; reading any other byte as one would be undefined behaviour.
template <Number T>
inline constexpr bool is_checked = code_of<T>() == Code::kBool;

template <Number T>
struct Codec<T> {
  static std::string name() { return std::string(name_of(code_of<T>())); }
  static void write(Encoder& encoder, const T& value) { encoder.code(code_of<T>()).put(value); }
  static void read(Decoder& decoder, T& out) {
    decoder.expect(code_of<T>(), name);
    if constexpr (is_checked<T>) {
      const auto byte = decoder.take<std::uint8_t>();
      if (byte > 1) decoder.refuse("a bool is 0 or 1, not ", int{byte});
      out = static_cast<T>(byte == 1);
    } else {
      out = decoder.take<T>();
    }
  }
};

template <>
struct Codec<std::string> {
  static std::string name() { return "text"; }
  static void write(Encoder& encoder, const std::string& value) { encoder.code(Code::kText).sized(value); }
  static void read(Decoder& decoder, std::string& out) {
    decoder.expect(Code::kText, name);
    out = as_text(decoder.take_sized());
  }
};

template <class... Members>
Fields<Members...> as_fields(std::tuple<Members&...> members) {
  return {{}, members};
}
template <class... Members>
Fields<Members...> as_fields(Fields<Members...> fields) {
  return fields;
}

template <class T>
concept HasFields = std::is_class_v<T> && requires(T& value) {
  as_fields(lockstep_fields(value));
};

// The i-th word of `members`, empty when there are fewer.
std::string_view member_name(std::string_view members, std::size_t index) noexcept;
// Reads a struct's header; refuses anything but `info` and `n` members.
void expect_struct(Decoder& decoder, const StructInfo& info, std::size_t n);
std::string struct_name(const StructInfo& info, std::size_t n);

template <HasFields T>
struct Codec<T> {
  static std::string name() {
    T probe{};  // only for an error message: name and member count come from its fields
    const auto fields = as_fields(lockstep_fields(probe));
    return struct_name(fields.info, std::tuple_size_v<decltype(fields.members)>);
  }
  static void write(Encoder& encoder, const T& value) {
    const auto fields = as_fields(lockstep_fields(value));
    constexpr auto kMembers = std::tuple_size_v<decltype(fields.members)>;
    encoder.code(Code::kStruct).sized(fields.info.name).put(fields.info.version);
    encoder.put(static_cast<std::uint32_t>(kMembers));
    const Encoder::Deeper deeper(encoder);
    std::apply([&](const auto&... member) { (object::write(encoder, member), ...); }, fields.members);
  }
  static void read(Decoder& decoder, T& out) {
    const auto fields = as_fields(lockstep_fields(out));
    expect_struct(decoder, fields.info, std::tuple_size_v<decltype(fields.members)>);
    std::size_t index = 0;
    const auto read_member = [&](auto& member) {
      const auto word = member_name(fields.info.members, index);
      const Decoder::Step step = word.empty() ? Decoder::Step(decoder, index, Decoder::Step::In::kStruct)
                                              : Decoder::Step(decoder, word);
      ++index;
      Codec<std::remove_reference_t<decltype(member)>>::read(decoder, member);
    };
    std::apply([&](auto&... member) { (read_member(member), ...); }, fields.members);
  }
};

}  // namespace object
}  // namespace lockstep
