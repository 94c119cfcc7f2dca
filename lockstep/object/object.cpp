#include "lockstep/object/object.h"

namespace lockstep {
namespace {

constexpr std::size_t kHeaderBytes =
    sizeof(object::kMagic) + sizeof(object::kVersion) + sizeof(std::uint32_t);

}  // namespace

Bytes Object::strip(Bytes object) {
  object.erase(object.begin(), object.begin() + kHeaderBytes);
  if (object.size() == 1) object.clear();  // nothing is the only value of one byte
  return object;
}

Bytes Object::with_header() const {
  object::Encoder encoder;
  object::write(encoder, *this);
  return encoder.take();
}

std::string Object::type() const {
  return std::string(object::name_of(empty() ? object::Code::kNothing : object::Code{value_.front()}));
}

namespace object {

std::string_view member_name(std::string_view members, std::size_t index) noexcept {
  constexpr std::string_view kBetween = " ,";
  std::size_t begin = members.find_first_not_of(kBetween);
  for (; index > 0 && begin != members.npos; --index)
    begin = members.find_first_not_of(kBetween, members.find_first_of(kBetween, begin));
  if (begin == members.npos) return {};
  return members.substr(begin, members.find_first_of(kBetween, begin) - begin);
}

std::string struct_name(const StructInfo& info, std::size_t n) {
  if (info.name.empty()) return base::cat("struct of ", n, " fields");
  return base::cat("struct ", info.name, " version ", info.version, " of ", n, " fields");
}

void expect_struct(Decoder& decoder, const StructInfo& info, std::size_t n) {
  const auto wanted = [&] { return struct_name(info, n); };
  decoder.expect(Code::kStruct, wanted);
  const auto name = decoder.take_sized();
  const auto version = decoder.take<std::uint32_t>();
  const auto count = decoder.take<std::uint32_t>();
  if (as_text(name) == info.name && version == info.version && count == n) return;
  const auto shown = as_text(name.first(std::min<std::size_t>(name.size(), 100)));
  decoder.refuse("expected ", wanted(), ", got ", struct_name({.name = shown, .version = version}, count));
}

void Codec<Object>::write(Encoder& encoder, const Object& value) {
  if (value.empty()) {
    encoder.code(Code::kNothing);
  } else {
    encoder.raw(value.value_);
  }
}

void Codec<Object>::read(Decoder& decoder, Object& out) {
  const auto any = decoder.take_any();
  if (any.size() > 1) out.value_.assign(any.begin(), any.end());
}

}  // namespace object
}  // namespace lockstep
