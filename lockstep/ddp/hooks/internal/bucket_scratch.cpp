#include "lockstep/ddp/hooks/internal/bucket_scratch.h"

#include <ATen/ops/empty.h>

#include "lockstep/collective/collectives.h"

namespace lockstep::internal {

at::Tensor BucketScratch::get(std::size_t bucket, const at::Tensor& like, at::ScalarType dtype) {
  const std::int64_t n = like.numel();
  if (kept_.size() <= bucket) kept_.resize(bucket + 1);
  at::Tensor& kept = kept_[bucket];
  if (!kept.defined() || kept.numel() != n || kept.scalar_type() != dtype || kept.device() != like.device()) {
    kept = group_ ? empty_shared({n}, dtype, {.group = group_, .device = like.device()})
                  : at::empty({n}, at::TensorOptions(dtype).device(like.device()));
  }
  return kept;
}

}  // namespace lockstep::internal
