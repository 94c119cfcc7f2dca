// Cuts a byte stream into requests. Nothing is copied or reserved by a length the peer claims: a length is
// compared with the limits when it is read, and the parser then says how many bytes it wants before it can go
// on.
// No I/O; what the fuzzer feeds.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/store/internal/tcp_protocol.h"
#include "lockstep/store/tcp_store.h"

namespace lockstep::internal {

class TcpRequestParser {
 public:
  enum class Result : std::uint8_t { kRequest, kMore, kBad };

  // `limits` must outlive the parser.
  explicit TcpRequestParser(const TcpStoreLimits& limits) : limits_(limits) {}

  // `bytes` begin where the request begins, and hold at least what earlier calls for this request saw.
  // `budget` is the most bytes the request may have. kMore: call again with wanted() bytes or more. kRequest:
  // the observers below hold until next(), as long as `bytes` stay. kBad: why() says what is wrong; the
  // stream is lost.
  Result parse(std::span<const std::uint8_t> bytes, std::uint64_t budget);
  // Begins with the next request.
  void next();

  std::size_t wanted() const { return wanted_; }
  const char* why() const { return why_; }
  std::size_t consumed() const { return at_; }

  Query query() const { return query_; }
  // Keys and values in the order they came.
  std::size_t n_fields() const { return fields_.size(); }
  std::span<const std::uint8_t> bytes(std::size_t i) const {
    return bytes_.subspan(fields_[i].at, fields_[i].n);
  }
  std::string_view text(std::size_t i) const {
    return {reinterpret_cast<const char*>(bytes_.data()) + fields_[i].at, fields_[i].n};
  }
  // The trailing int64 of kAdd, the uint32 of kValidate and kPing.
  std::int64_t number() const { return number_; }

 private:
  struct Field {
    std::size_t at;
    std::size_t n;
  };
  Result parse_field(bool is_key, std::uint64_t budget);
  Result bad(const char* why);
  bool has(std::size_t n_bytes);
  template <class T>
  T read();

  const TcpStoreLimits& limits_;
  std::span<const std::uint8_t> bytes_;
  std::vector<Field> fields_;
  std::uint64_t n_expected_ = 0;  // fields of this request
  std::int64_t number_ = 0;
  std::size_t at_ = 0;
  std::size_t wanted_ = 1;
  const char* why_ = "";
  Query query_ = Query::kValidate;
  bool begun_ = false;
  bool counted_ = false;
};

}  // namespace lockstep::internal
