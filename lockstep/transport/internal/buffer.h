// Memory for what arrives: aligned to cache lines, shared by the blobs that are in it.
#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/transport/internal/ring.h"

namespace lockstep::transport::internal {

struct alignas(kLine) Line {
  std::uint8_t bytes[kLine];
};

class Buffer {
 public:
  Buffer() = default;
  // Not zeroed. Raises std::bad_alloc.
  explicit Buffer(std::uint64_t n_bytes)
      : lines_(std::make_shared_for_overwrite<Line[]>(round_to_lines(n_bytes) / kLine)) {}
  std::uint8_t* data() const { return reinterpret_cast<std::uint8_t*>(lines_.get()); }
  std::shared_ptr<const void> owner() const { return lines_; }

 private:
  std::shared_ptr<Line[]> lines_;
};

}  // namespace lockstep::transport::internal
