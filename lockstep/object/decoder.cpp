#include "lockstep/object/decoder.h"

#include <algorithm>

#include "lockstep/base/detail/byte_io.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/object/tensor_code.h"

namespace lockstep::object {
Decoder::Decoder(std::span<const std::uint8_t> bytes, std::span<const Blob> blobs, DeviceTransit* transit)
    : bytes_(bytes), blobs_(blobs), transit_(transit), reader_(bytes) {
  const auto magic = reader_.raw(sizeof(kMagic));
  if (!magic || !std::ranges::equal(*magic, kMagic)) {
    base::raise(
        ErrorKind::kUsage,
        base::cat("these ", bytes.size(), " bytes are not an encoded object (they do not begin with LSO)"));
  }
  const auto version = reader_.get<std::uint8_t>();
  // Equality: both ends are expected to be the same lockstep.
  if (version != kVersion) {
    base::raise(ErrorKind::kUsage, base::cat("this object is of format version ",
                                             version ? int{*version} : -1, ", this program reads version ",
                                             int{kVersion}, "; run the same lockstep on every rank"));
  }
  if (const auto n = take<std::uint32_t>(); n != blobs.size()) {
    base::raise(ErrorKind::kUsage,
                base::cat("this object has ", n, " blobs beside it, ", blobs.size(), " came"));
  }
}

Code Decoder::peek() const {
  if (reader_.left() == 0) refuse_short(1);
  return static_cast<Code>(bytes_[reader_.position()]);
}

std::span<const std::uint8_t> Decoder::take_raw(std::uint64_t n_bytes) {
  if (n_bytes > reader_.left()) refuse_short(n_bytes);
  return *reader_.raw(static_cast<std::size_t>(n_bytes));
}

// Every element takes at least n_bytes: a count that the remaining bytes cannot hold is rejected before
// memory is reserved for it.
std::size_t Decoder::take_count(std::size_t n_bytes) {
  const auto n = take<std::uint64_t>();
  if (n > reader_.left() / n_bytes) {
    refuse(n, " elements of at least ", n_bytes, " bytes are announced, ", reader_.left(),
           " bytes are left; the object is damaged");
  }
  return static_cast<std::size_t>(n);
}

// place 0: the bytes are in the object; 1: in a blob beside it, by index. The length is in both places and
// must agree.
Blob Decoder::take_held_blob() {
  const auto place = take<std::uint8_t>();
  if (place == 0) return {.owner = {}, .bytes = take_sized()};
  if (place != 1) refuse("a blob's place is 0 or 1, not ", int{place}, "; the object is damaged");
  const auto index = take<std::uint32_t>();
  const auto n_bytes = take<std::uint64_t>();
  if (index >= blobs_.size()) refuse("blob ", index, " of ", blobs_.size(), "; the object is damaged");
  if (blobs_[index].bytes.size() != n_bytes) {
    refuse("blob ", index, " should have ", n_bytes, " bytes and has ", blobs_[index].bytes.size());
  }
  return blobs_[index];
}

// For Object, which keeps the bytes and decodes them later: everything is walked now, so that damage is found
// where it came in.
std::span<const std::uint8_t> Decoder::take_any() {
  const std::size_t begin = reader_.position();
  skip();
  return bytes_.subspan(begin, reader_.position() - begin);
}

void Decoder::finish() const {
  if (reader_.left() != 0) {
    base::raise(ErrorKind::kUsage, base::cat(reader_.left(), " bytes follow the object; it is damaged"));
  }
}

void Decoder::refuse_type(const std::string& wanted) const {
  refuse("expected ", wanted, ", got ", describe_next());
}

void Decoder::refuse_short(std::uint64_t n_bytes) const {
  refuse("the object ends here: ", n_bytes, " bytes are needed, ", reader_.left(), " are left");
}

// For messages: reads ahead on a copy of the reader, and takes whatever it finds.
std::string Decoder::describe_next() const {
  base::ByteReader ahead(bytes_.subspan(reader_.position()));
  const auto code = static_cast<Code>(ahead.get<std::uint8_t>().value_or(0xFF));
  if (code == Code::kPacked) {
    const auto element = static_cast<Code>(ahead.get<std::uint8_t>().value_or(0xFF));
    return element == Code::kU8 ? "bytes" : base::cat("list of ", name_of(element));
  }
  if (code == Code::kStruct) {
    const auto name = ahead.sized();
    const auto version = ahead.get<std::uint32_t>();
    const auto n = ahead.get<std::uint32_t>();
    if (name && !name->empty()) {
      return base::cat("struct ", as_text(name->first(std::min<std::size_t>(name->size(), 100))), " version ",
                       version.value_or(0), " of ", n.value_or(0), " fields");
    }
    return base::cat("struct of ", n.value_or(0), " fields");
  }
  if (code == Code::kTuple) return base::cat("tuple of ", ahead.get<std::uint32_t>().value_or(0));
  if (name_of(code) == name_of(static_cast<Code>(0xFF)))
    return base::cat("unknown type code ", static_cast<int>(code));
  return std::string(name_of(code));
}

// Recursion is bounded by Step.
void Decoder::skip() {
  const auto code = peek();
  const auto elements = [this](std::uint64_t n, Step::In in) {
    for (std::uint64_t i = 0; i < n; ++i) {
      const Step step(*this, i, in);
      skip();
    }
  };
  if (code == Code::kNothing || width_of(code) != 0) {
    take_raw(1 + width_of(code));
    return;
  }
  const auto unknown = [&] { refuse_type("a value"); };
  // Before the code is consumed: the message describes what comes next.
  if (name_of(code) == name_of(static_cast<Code>(0xFF))) unknown();
  take<std::uint8_t>();
  switch (code) {
    case Code::kText:
      take_sized();
      return;
    case Code::kPacked: {
      const auto element = static_cast<Code>(take<std::uint8_t>());
      if (width_of(element) == 0) refuse("a packed list cannot hold ", name_of(element));
      const auto n = take_count(width_of(element));
      take_raw(n * width_of(element));
      return;
    }
    case Code::kList:
      return elements(take_count(1), Step::In::kList);
    // Two values per entry, key and value in turn.
    case Code::kMap:
      return elements(std::uint64_t{take_count(2)} * 2, Step::In::kList);
    case Code::kTuple:
      // No take_count(): the loop allocates nothing, and each element takes at least a byte, so it ends with
      // the bytes.
      return elements(take<std::uint32_t>(), Step::In::kTuple);
    case Code::kVariant:
      take<std::uint32_t>();
      return elements(1, Step::In::kHeld);
    case Code::kSome:
      return elements(1, Step::In::kHeld);
    case Code::kStruct:
      take_sized();
      take<std::uint32_t>();
      return elements(take<std::uint32_t>(), Step::In::kStruct);
    case Code::kTensor: {
      const auto flags = take_raw(kTensorHeadBytes).back();
      const bool sparse = (flags & kSparse) != 0;
      const auto n_dimensions = take<std::uint32_t>();
      take_raw(std::uint64_t{n_dimensions} * sizeof(std::int64_t));
      if ((flags & kPermuted) != 0) take_raw(n_dimensions);
      if (sparse) take_raw(sizeof(std::uint32_t) + sizeof(std::int64_t));
      for (int n_blobs = sparse ? 2 : 1; n_blobs > 0; --n_blobs) {
        if (take<std::uint8_t>() != 0) refuse("bytes beside the object cannot be kept with an Object");
        take_sized();
      }
      return;
    }
    default:
      unknown();
  }
}

std::string Decoder::path() const {
  std::string path;
  if (step_ != nullptr) step_->print(path);
  return path.empty() ? "the top" : path;
}

Decoder::Step::Step(Decoder& decoder, std::string_view field)
    : decoder_(decoder), outer_(decoder.step_), field_(field) {
  enter();
}

Decoder::Step::Step(Decoder& decoder, std::uint64_t index, In in)
    : decoder_(decoder), outer_(decoder.step_), index_(index), in_(in) {
  enter();
}

void Decoder::Step::enter() {
  if (decoder_.depth_ >= kMaxDepth) {
    decoder_.refuse("the object is nested more than ", kMaxDepth, " levels deep");
  }
  ++decoder_.depth_;
  decoder_.step_ = this;
}

// Steps are on the stack and linked to the outer one: the path costs nothing until an error prints it.
Decoder::Step::~Step() {
  --decoder_.depth_;
  decoder_.step_ = outer_;
}

void Decoder::Step::print(std::string& path) const {
  if (outer_ != nullptr) outer_->print(path);
  if (!field_.empty()) {
    path += base::cat(".", field_);
  } else if (in_ == In::kList) {
    path += base::cat("[", index_, "]");
  } else if (in_ == In::kTuple) {
    path += base::cat("<", index_, ">");
  } else if (in_ == In::kHeld) {
    return;
  } else if (in_ == In::kKey) {
    path += base::cat("[key ", index_, "]");
  } else {
    path += base::cat(".#", index_);
  }
}

}  // namespace lockstep::object
