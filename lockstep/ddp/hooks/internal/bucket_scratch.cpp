#include "lockstep/ddp/hooks/internal/bucket_scratch.h"

#include <ATen/ops/empty.h>

#include "lockstep/collective/collectives.h"

namespace lockstep::internal {

at::Tensor BucketScratch::get(std::size_t bucket, std::int64_t n, at::ScalarType dtype) {
  if (kept_.size() <= bucket) kept_.resize(bucket + 1);
  at::Tensor& kept = kept_[bucket];
  if (!kept.defined() || kept.numel() != n || kept.scalar_type() != dtype) {
    kept = group_ ? empty_shared({n}, dtype, {.group = group_}) : at::empty({n}, at::TensorOptions(dtype));
  }
  return kept;
}

}  // namespace lockstep::internal
