// Codecs of pair, tuple, optional, variant, and owning pointers, which are encoded as optionals: two pointers
// to one object are decoded as two objects. Thread safety: no shared state.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>

#include "lockstep/base/detail/raise.h"
#include "lockstep/object/codec.h"

namespace lockstep::object {

template <class Tuple, class... Ts>
struct TupleCodec {
  static std::string name() {
    std::string names;
    ((names += names.empty() ? Codec<Ts>::name() : ", " + Codec<Ts>::name()), ...);
    return base::cat("tuple of ", sizeof...(Ts), " (", names, ")");
  }
  static void write(Encoder& encoder, const Tuple& value) {
    encoder.code(Code::kTuple).put(static_cast<std::uint32_t>(sizeof...(Ts)));
    const Encoder::Deeper deeper(encoder);
    std::apply([&](const auto&... part) { (object::write(encoder, part), ...); }, value);
  }
  static void read(Decoder& decoder, Tuple& out) {
    decoder.expect(Code::kTuple, name);
    if (const auto n = decoder.take<std::uint32_t>(); n != sizeof...(Ts))
      decoder.refuse("expected ", name(), ", got tuple of ", n);
    std::uint64_t index = 0;
    const auto read_part = [&](auto& part) {
      const Decoder::Step step(decoder, index++, Decoder::Step::In::kTuple);
      Codec<std::remove_reference_t<decltype(part)>>::read(decoder, part);
    };
    std::apply([&](auto&... part) { (read_part(part), ...); }, out);
  }
};
template <class... Ts>
struct Codec<std::tuple<Ts...>> : TupleCodec<std::tuple<Ts...>, Ts...> {};
template <class A, class B>
struct Codec<std::pair<A, B>> : TupleCodec<std::pair<A, B>, A, B> {};

template <>
struct Codec<std::monostate> {
  static std::string name() { return "nothing"; }
  static void write(Encoder& encoder, std::monostate) { encoder.code(Code::kNothing); }
  static void read(Decoder& decoder, std::monostate&) { decoder.expect(Code::kNothing, name); }
};

// optional, unique_ptr, shared_ptr: empty, or a value.
template <class Holder, class T>
struct HolderCodec {
  static std::string name() { return "optional " + Codec<T>::name(); }
  static void write(Encoder& encoder, const Holder& value) {
    if (!value) {
      encoder.code(Code::kNothing);
      return;
    }
    encoder.code(Code::kSome);
    const Encoder::Deeper deeper(encoder);
    object::write<T>(encoder, *value);
  }
  static void read(Decoder& decoder, Holder& out) {
    if (decoder.peek() == Code::kNothing) {
      decoder.take<std::uint8_t>();
      return;
    }
    decoder.expect(Code::kSome, name);
    const Decoder::Step step(decoder, 0, Decoder::Step::In::kHeld);
    if constexpr (std::is_same_v<Holder, std::optional<T>>) {
      out.emplace(object::read<T>(decoder));
    } else {
      out = Holder(new T(object::read<T>(decoder)));
    }
  }
};
template <class T>
struct Codec<std::optional<T>> : HolderCodec<std::optional<T>, T> {};
template <class T>
struct Codec<std::unique_ptr<T>> : HolderCodec<std::unique_ptr<T>, T> {};
template <class T>
struct Codec<std::shared_ptr<T>> : HolderCodec<std::shared_ptr<T>, T> {};

template <class... Ts>
struct Codec<std::variant<Ts...>> {
  using Variant = std::variant<Ts...>;
  static std::string name() {
    std::string names;
    ((names += names.empty() ? Codec<Ts>::name() : " | " + Codec<Ts>::name()), ...);
    return base::cat("variant (", names, ")");
  }
  static void write(Encoder& encoder, const Variant& value) {
    if (value.valueless_by_exception())
      base::raise(ErrorKind::kUsage, "a variant that holds no value cannot be sent");
    encoder.code(Code::kVariant).put(static_cast<std::uint32_t>(value.index()));
    const Encoder::Deeper deeper(encoder);
    std::visit([&](const auto& held) { object::write(encoder, held); }, value);
  }
  static void read(Decoder& decoder, Variant& out) {
    decoder.expect(Code::kVariant, name);
    const auto index = decoder.take<std::uint32_t>();
    if (index >= sizeof...(Ts))
      decoder.refuse("expected ", name(), ", got alternative ", index, ", which it does not have");
    const Decoder::Step step(decoder, index, Decoder::Step::In::kHeld);
    read_alternative(decoder, out, index, std::index_sequence_for<Ts...>{});
  }

 private:
  template <std::size_t... I>
  static void read_alternative(Decoder& decoder, Variant& out, std::size_t index, std::index_sequence<I...>) {
    ((index == I ? (void)out.template emplace<I>(object::read<Ts>(decoder)) : void()), ...);
  }
};

}  // namespace lockstep::object
