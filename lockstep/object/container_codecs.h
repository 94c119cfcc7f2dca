// Codecs of the standard containers: sequences, arrays, sets, maps. Thread safety: no shared state. Sequences
// and sets of one element type have the same type on the wire, so a vector can be read as a deque; unordered
// containers are written in iteration order.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <ranges>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "lockstep/object/codec.h"

namespace lockstep::object {

template <class T>
std::string list_name() {
  if constexpr (Number<T>) {
    if (code_of<T>() == Code::kU8) return "bytes";
  }
  return "list of " + Codec<T>::name();
}

// A sequence of elements, packed when they are numbers.
template <class T, class Range>
void write_row(Encoder& encoder, const Range& row) {
  const auto n = static_cast<std::uint64_t>(std::ranges::size(row));
  if constexpr (Number<T>) {
    encoder.code(Code::kPacked).code(code_of<T>()).put(n);
    if constexpr (std::ranges::contiguous_range<const Range>) {
      encoder.raw({reinterpret_cast<const std::uint8_t*>(std::ranges::data(row)),
                   std::ranges::size(row) * sizeof(T)});
    } else {
      for (const T element : row) encoder.put(element);
    }
  } else {
    encoder.code(Code::kList).put(n);
    const Encoder::Deeper deeper(encoder);
    for (const auto& element : row) write(encoder, element);
  }
}

// The bytes of a packed sequence, complete.
template <Number T>
std::span<const std::uint8_t> take_packed(Decoder& decoder) {
  decoder.expect(Code::kPacked, list_name<T>);
  if (const auto element = decoder.peek(); element != code_of<T>())
    decoder.refuse("expected ", list_name<T>(), ", got list of ", name_of(element));
  decoder.take<std::uint8_t>();
  const auto raw = decoder.take_raw(decoder.take_count(sizeof(T)) * sizeof(T));
  if constexpr (is_checked<T>) {
    for (std::size_t i = 0; i < raw.size(); ++i) {
      if (raw[i] > 1) decoder.refuse("element ", i, " is a bool, which is 0 or 1, not ", int{raw[i]});
    }
  }
  return raw;
}

// Calls `check(n)`, with a count the remaining bytes can hold, then add(element) for each element.
template <class T, class Check, class Add>
void read_row(Decoder& decoder, const Check& check, const Add& add) {
  if constexpr (Number<T>) {
    const auto raw = take_packed<T>(decoder);
    check(raw.size() / sizeof(T));
    for (std::size_t at = 0; at < raw.size(); at += sizeof(T)) {
      T element;
      std::memcpy(&element, raw.data() + at, sizeof(T));
      add(element);
    }
  } else {
    decoder.expect(Code::kList, list_name<T>);
    const auto n = decoder.take_count(1);
    check(n);
    for (std::size_t i = 0; i < n; ++i) {
      const Decoder::Step step(decoder, i);
      add(read<T>(decoder));
    }
  }
}

// vector, deque, list.
template <class Sequence>
struct SequenceCodec {
  using T = typename Sequence::value_type;
  static std::string name() { return list_name<T>(); }
  static void write(Encoder& encoder, const Sequence& value) { write_row<T>(encoder, value); }
  static void read(Decoder& decoder, Sequence& out) {
    if constexpr (Number<T> && std::ranges::contiguous_range<Sequence>) {
      const auto raw = take_packed<T>(decoder);
      out.resize(raw.size() / sizeof(T));
      if (!raw.empty()) std::memcpy(out.data(), raw.data(), raw.size());
    } else {
      // No reserve: elements may be larger than their encoding, and the count is untrusted.
      read_row<T>(
          decoder, [](std::size_t) {}, [&](T element) { out.push_back(std::move(element)); });
    }
  }
};
template <class T, class A>
struct Codec<std::vector<T, A>> : SequenceCodec<std::vector<T, A>> {};
template <class T, class A>
struct Codec<std::deque<T, A>> : SequenceCodec<std::deque<T, A>> {};
template <class T, class A>
struct Codec<std::list<T, A>> : SequenceCodec<std::list<T, A>> {};

template <class T, std::size_t N>
struct Codec<std::array<T, N>> {
  static std::string name() { return base::cat(list_name<T>(), " of length ", N); }
  static void write(Encoder& encoder, const std::array<T, N>& value) { write_row<T>(encoder, value); }
  static void read(Decoder& decoder, std::array<T, N>& out) {
    std::size_t next = 0;
    read_row<T>(
        decoder,
        [&](std::size_t n) {
          if (n != N) decoder.refuse("expected ", name(), ", got ", n, " elements");
        },
        [&](T element) { out[next++] = std::move(element); });
  }
};

template <class Set>
struct SetCodec {
  using T = typename Set::value_type;
  static std::string name() { return list_name<T>(); }
  static void write(Encoder& encoder, const Set& value) { write_row<T>(encoder, value); }
  static void read(Decoder& decoder, Set& out) {
    read_row<T>(
        decoder, [](std::size_t) {},
        [&](T element) {
          if (!out.insert(std::move(element)).second) decoder.refuse("a set has an element twice");
        });
  }
};
template <class T, class C, class A>
struct Codec<std::set<T, C, A>> : SetCodec<std::set<T, C, A>> {};
template <class T, class H, class E, class A>
struct Codec<std::unordered_set<T, H, E, A>> : SetCodec<std::unordered_set<T, H, E, A>> {};

template <class Map>
struct MapCodec {
  using K = typename Map::key_type;
  using V = typename Map::mapped_type;
  static std::string name() { return base::cat("map of ", Codec<K>::name(), " to ", Codec<V>::name()); }
  static void write(Encoder& encoder, const Map& value) {
    encoder.code(Code::kMap).put(static_cast<std::uint64_t>(value.size()));
    const Encoder::Deeper deeper(encoder);
    for (const auto& [key, mapped] : value) {
      object::write(encoder, key);
      object::write(encoder, mapped);
    }
  }
  static void read(Decoder& decoder, Map& out) {
    decoder.expect(Code::kMap, name);
    const auto n = decoder.take_count(2);
    for (std::size_t i = 0; i < n; ++i) {
      K key = read_key(decoder, i);
      const Decoder::Step step(decoder, i);
      if (!out.emplace(std::move(key), object::read<V>(decoder)).second)
        decoder.refuse("a map has a key twice");
    }
  }

 private:
  static K read_key(Decoder& decoder, std::size_t index) {
    const Decoder::Step step(decoder, index, Decoder::Step::In::kKey);
    return object::read<K>(decoder);
  }
};
template <class K, class V, class C, class A>
struct Codec<std::map<K, V, C, A>> : MapCodec<std::map<K, V, C, A>> {};
template <class K, class V, class H, class E, class A>
struct Codec<std::unordered_map<K, V, H, E, A>> : MapCodec<std::unordered_map<K, V, H, E, A>> {};

}  // namespace lockstep::object
