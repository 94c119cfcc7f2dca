// Collectives whose tensors travel in a half type: f32 or f64 in, the same out, half or a quarter of the bytes moved.
//
//   AutoQuantize(DQuantType::kFp16).all_gather(outputs, input);
//
// Each value arrives as if cast to the half type and back, this rank's own too. f16 values are clamped to +-65504 first,
// so that none becomes infinite; NaN stays NaN.
// Blocking only: async_op raises kUsage, as do tensors that are not f32 or f64. Else as collectives.h.
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
