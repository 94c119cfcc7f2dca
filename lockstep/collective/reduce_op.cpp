#include "lockstep/collective/reduce_op.h"

#include <ATen/ops/scalar_tensor.h>

namespace lockstep {

ReduceOp ReduceOp::premul_sum(const c10::Scalar& factor) {
  return premul_sum(at::scalar_tensor(factor, at::TensorOptions().dtype(factor.type())));
}

ReduceOp ReduceOp::premul_sum(at::Tensor factor) {
  ReduceOp op(kPremulSum);
  op.factor_ = std::move(factor);
  return op;
}

const char* name_of(ReduceOp::Kind kind) noexcept {
  switch (kind) {
    case ReduceOp::kSum:
      return "SUM";
    case ReduceOp::kAvg:
      return "AVG";
    case ReduceOp::kProduct:
      return "PRODUCT";
    case ReduceOp::kMin:
      return "MIN";
    case ReduceOp::kMax:
      return "MAX";
    case ReduceOp::kBand:
      return "BAND";
    case ReduceOp::kBor:
      return "BOR";
    case ReduceOp::kBxor:
      return "BXOR";
    case ReduceOp::kPremulSum:
      return "PREMUL_SUM";
  }
  return "unknown";
}

}  // namespace lockstep
