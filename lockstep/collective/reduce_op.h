// How values of several ranks are combined into one. A small value: write ReduceOp::kSum and the like, or
// ReduceOp::premul_sum(factor).
// Thread safety: a value type without shared state.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

namespace lockstep {

class ReduceOp {
 public:
  // The numbers of torch.distributed.ReduceOp.
  enum Kind : int {
    kSum = 0,
    kAvg = 1,  // the sum divided by the group's size; floating and complex types
    kProduct = 2,
    kMin = 3,
    kMax = 4,
    kBand = 5,  // bitwise: integers and bool
    kBor = 6,
    kBxor = 7,
    kPremulSum = 8,  // needs a factor: premul_sum
  };

  // kPremulSum without a factor is refused by the collectives.
  ReduceOp(Kind kind = kSum) : kind_(kind) {}
  // Every rank's values are multiplied by its own factor, then summed. The factor is a number or a tensor of
  // one element; a tensor is read when the collective is called. Integers need an integer factor.
  static ReduceOp premul_sum(const c10::Scalar& factor);
  static ReduceOp premul_sum(at::Tensor factor);

  Kind kind() const { return kind_; }
  // For switch and ==; the factor is not compared.
  operator Kind() const { return kind_; }
  // Undefined except for premul_sum.
  const at::Tensor& factor() const { return factor_; }

 private:
  Kind kind_;
  at::Tensor factor_;
};

// "SUM", "AVG", ...; "unknown" for a number that is not a Kind.
const char* name_of(ReduceOp::Kind kind) noexcept;

}  // namespace lockstep
