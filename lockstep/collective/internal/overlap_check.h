// Whether the tensors of several collectives that run as one share memory: what one of them writes, none of
// the others may read or write. Private to collective/; one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>

namespace lockstep::internal {

// Tensors whose elements are dense in memory are compared by their bytes, in logarithmic time; of others it
// is only known whether they are the very same tensor. Holds addresses: the tensors must live as long.
class OverlapCheck {
 public:
  // A collective that writes one tensor and reads another, which may be undefined and may share memory with
  // the first. False, and nothing is added, when one of them shares memory that it may not with those of an
  // earlier collective.
  bool add(const at::Tensor& written, const at::Tensor& read = {});

 private:
  struct Range {
    std::uintptr_t begin, end;
  };
  using Ranges = std::map<std::uintptr_t, std::uintptr_t>;  // begin to end; apart from each other
  static std::optional<Range> range_of(const at::Tensor& tensor);
  static bool meets(const Ranges& ranges, Range range);
  static void join(Ranges& ranges, Range range);
  bool meets_written(const at::Tensor& tensor) const;

  Ranges written_, read_;
  std::set<const void*> scattered_;  // tensors with gaps that are written
};

}  // namespace lockstep::internal
