// Collectives that send tensors in a 16-bit type: f32 or f64 in, the same out, half or a quarter of the bytes
// sent.
//
//   AutoQuantize(DQuantType::kFp16).all_gather(outputs, input);
//
// Each value is received as if cast to the 16-bit type and back, this rank's own included. f16 values are
// clamped to +-65504 first, so that none becomes infinite; NaN stays NaN.
// Blocking only: async_op raises kUsage, as do tensors that are not f32 or f64. Otherwise as collectives.h.
// Thread safety: an immutable value.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/collective/collectives.h"

namespace lockstep {

enum class DQuantType : std::uint8_t { kFp16, kBfp16 };

class AutoQuantize {
 public:
  explicit AutoQuantize(DQuantType type) : type_(type) {}

  void all_gather(std::vector<at::Tensor> outputs, at::Tensor input, AllGatherOptions options = {}) const;
  void all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                  AllToAllOptions options = {}) const;
  void all_to_all_single(at::Tensor output, at::Tensor input, AllToAllSingleOptions options = {}) const;

 private:
  at::Tensor small(const at::Tensor& tensor, const char* operation) const;
  at::Tensor room_for(const at::Tensor& tensor, const char* operation) const;
  at::ScalarType dtype() const { return type_ == DQuantType::kFp16 ? at::kHalf : at::kBFloat16; }

  DQuantType type_;
};

}  // namespace lockstep
