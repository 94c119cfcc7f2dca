// Reads values in the object format from bytes that may be anybody's. Codecs (codec.h) drive it; programs call decode
// (object.h).
//
// Nothing is believed: a code is compared with the expected one, a length with the bytes that are there before memory
// is taken, nesting with kMaxDepth. Whatever is wrong raises kUsage with the place in the value:
// "at .layers[3].name: expected text, got i32". No code runs but the codecs of the type that the caller asked for.
// Thread safety: none; a value of one thread. The bytes and blobs must outlive it.
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
#include "lockstep/object/encoder.h"

namespace lockstep::object {

class Decoder {
 public:
  // Reads the header; raises kUsage when these are not an object's bytes, or not of this version, or when another
  // number of blobs came with them.
  explicit Decoder(std::span<const std::uint8_t> bytes, std::span<const Blob> blobs = {});

  // Takes the value's code; any other than `code` is refused, with `wanted()` saying what was expected.
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
  // A count of things that take at least `n_bytes` each.
  std::size_t take_count(std::size_t n_bytes);
  std::span<const std::uint8_t> take_blob() { return take_held_blob().bytes; }
  // With its owner, where it came beside the object; without one where it lies inside.
  Blob take_held_blob();
  // Checks a value of any type and returns its bytes, code included. Blobs beside it are refused.
  std::span<const std::uint8_t> take_any();
  // Raises when bytes are left over.
  void finish() const;

  // A step into a value while it lives: a field by name, or an element by number ("[3]"; "<3>" in a tuple, ".#3" in a
  // struct whose fields have no names; nothing for what an optional or variant holds).
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
  base::ByteReader reader_;
  const Step* step_ = nullptr;
  int depth_ = 0;
};

}  // namespace lockstep::object
