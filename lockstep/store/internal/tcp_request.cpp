#include "lockstep/store/internal/tcp_request.h"

#include <cstring>
#include <optional>

namespace lockstep::internal {

namespace {

// What follows the query byte: a fixed number of fields, or a count and that many groups; then a number.
struct Shape {
  std::uint8_t fields = 0;  // per group when counted
  bool counted = false;     // uint64 count first
  std::uint8_t number = 0;  // bytes of the trailing number
};

std::optional<Shape> shape_of(Query query) {
  switch (query) {
    case Query::kValidate:
    case Query::kPing:
      return Shape{.number = 4};
    case Query::kSet:
    case Query::kAppend:
    case Query::kQueuePush:
      return Shape{.fields = 2};
    case Query::kCompareSet:
      return Shape{.fields = 3};
    case Query::kGet:
    case Query::kDeleteKey:
    case Query::kQueuePop:
    case Query::kQueueLen:
    case Query::kQueuePopWait:
      return Shape{.fields = 1};
    case Query::kAdd:
    case Query::kAddChecked:
      return Shape{.fields = 1, .number = 8};
    case Query::kCheck:
    case Query::kWait:
    case Query::kMultiGet:
    case Query::kWaitExist:
    case Query::kGetWait:
      return Shape{.fields = 1, .counted = true};
    case Query::kMultiSet:
      return Shape{.fields = 2, .counted = true};
    case Query::kNumKeys:
    case Query::kCancelWait:
    case Query::kListKeys:
    case Query::kLocalName:
      return Shape{};
    case Query::kTorchEnd:
    case Query::kOursEnd:
      break;
  }
  return std::nullopt;
}

}  // namespace

TcpRequestParser::Result TcpRequestParser::bad(const char* why) {
  why_ = why;
  return Result::kBad;
}

void TcpRequestParser::next() {
  constexpr std::size_t kKept = 1024;
  if (fields_.capacity() > kKept) fields_ = {};
  bytes_ = {};
  fields_.clear();
  at_ = 0;
  wanted_ = 1;
  begun_ = false;
  counted_ = false;
}

// True when `n_bytes` more are there; else sets wanted_. The caller has checked n_bytes against a limit, so
// the sum cannot wrap.
bool TcpRequestParser::has(std::size_t n_bytes) {
  if (bytes_.size() - at_ >= n_bytes) return true;
  wanted_ = at_ + n_bytes;
  return false;
}

template <class T>
T TcpRequestParser::read() {
  T value;
  std::memcpy(&value, bytes_.data() + at_, sizeof value);
  at_ += sizeof value;
  return value;
}

// Incremental: what has been parsed of an incomplete request is kept as offsets (begun_, counted_, fields_),
// so that a large request that comes in many reads is not parsed from its beginning each time. `bytes` must
// begin with the same request on every call.
TcpRequestParser::Result TcpRequestParser::parse(std::span<const std::uint8_t> bytes, std::uint64_t budget) {
  bytes_ = bytes;
  if (!begun_) {
    if (!has(1)) return Result::kMore;
    query_ = static_cast<Query>(read<std::uint8_t>());
    begun_ = true;
  }
  const auto shape = shape_of(query_);
  if (!shape) return bad("no such request");
  if (!counted_) {
    if (shape->counted && !has(8)) return Result::kMore;
    const std::uint64_t groups = shape->counted ? read<std::uint64_t>() : 1;
    if (groups > limits_.keys_per_request) return bad("too many keys in one request");
    n_expected_ = groups * shape->fields;
    counted_ = true;
  }
  while (fields_.size() < n_expected_) {
    const Result result = parse_field(fields_.size() % shape->fields == 0, budget);
    if (result != Result::kRequest) return result;
  }
  if (!has(shape->number)) return Result::kMore;
  if (shape->number == 4) number_ = read<std::uint32_t>();
  if (shape->number == 8) number_ = read<std::int64_t>();
  return Result::kRequest;
}

// kRequest: the field is there.
TcpRequestParser::Result TcpRequestParser::parse_field(bool is_key, std::uint64_t budget) {
  if (!has(8)) return Result::kMore;
  const auto n_bytes = read<std::uint64_t>();
  const auto give_back = [this] { at_ -= 8; };  // read again when the bytes are there
  if (n_bytes > (is_key ? limits_.key_bytes : limits_.value_bytes)) {
    return bad(is_key ? "a key longer than the limit" : "a value longer than the limit");
  }
  if (n_bytes > budget || at_ > budget - n_bytes) return bad("the store's quota is used up");
  if (!has(n_bytes)) {
    give_back();
    return Result::kMore;
  }
  fields_.push_back({at_, static_cast<std::size_t>(n_bytes)});
  at_ += n_bytes;
  return Result::kRequest;
}

}  // namespace lockstep::internal
