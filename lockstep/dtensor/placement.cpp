#include "lockstep/dtensor/placement.h"

#include <ostream>

#include "lockstep/base/detail/text.h"

namespace lockstep {
namespace {

const char* lower_name(ReduceOp::Kind op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kBand:
      return "band";
    case ReduceOp::kBor:
      return "bor";
    case ReduceOp::kBxor:
      return "bxor";
    case ReduceOp::kPremulSum:
      return "premul_sum";
  }
  return "unknown";
}

}  // namespace

std::string to_string(const Placement& placement) {
  if (placement.is_replicate()) return "Replicate()";
  if (placement.is_partial()) return base::cat("Partial(", lower_name(placement.op()), ")");
  if (placement.interleave() == 1) return base::cat("Shard(", placement.dim(), ")");
  return base::cat("Shard(", placement.dim(), ", interleave ", placement.interleave(), ")");
}

std::string to_string(const Placements& placements) {
  std::string text = "[";
  for (const auto& placement : placements) {
    if (text.size() > 1) text += ", ";
    text += to_string(placement);
  }
  return text + "]";
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  return out << to_string(placement);
}

}  // namespace lockstep
