#include "lockstep/ddp/internal/bucket_exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/ddp/internal/hook_future.h"

namespace lockstep::internal {

// Only posts: nothing here waits, except for sparse buckets, whose ranks first agree on the number of
// entries. In-place gradients are operations of their own beside the flat part; the order is the same on all
// ranks, since the buckets are.
void BucketExchange::start(std::size_t b, int divisor, bool is_last) {
  under_way_.resize(buckets_.size());
  const GradientBucket& bucket = buckets_[b];
  if (bucket.is_sparse) {
    under_way_[b].works = {all_reduce(bucket.flat, {.group = group_, .async_op = true, .where = where_})};
    timer_.bucket_posted(b);  // the ranks have met to count entries
    return;
  }
  if (bucket.n_bytes == 0) return;
  if (hook_.run) return run_hook(b, is_last);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (bucket.flat.defined()) all_reduce_part(b, bucket.flat, divisor);
  for (std::size_t slot = 0; slot < bucket.views.size(); ++slot) {
    const at::Tensor& view = bucket.views[slot];
    if (buckets_.in_place(buckets_.indices(b)[slot]))
      all_reduce_part(b, view.as_strided({view.numel()}, {1}), divisor);
  }
}

void BucketExchange::all_reduce_part(std::size_t b, const at::Tensor& flat, int divisor) {
  // Averaging belongs to the reduction: no pass of its own, and one rounding less than dividing first.
  const bool by_size = divisor == group_->size();
  if (!by_size) flat.div_(divisor);
  timer_.bucket_posted(b);
  under_way_[b].works.push_back(all_reduce(
      flat,
      {.op = by_size ? ReduceOp::kAvg : ReduceOp::kSum, .group = group_, .async_op = true, .where = where_}));
}

void BucketExchange::run_hook(std::size_t b, bool is_last) {
  const GradientBucket& bucket = buckets_[b];
  std::vector<at::Tensor> parameters;
  for (const std::size_t i : buckets_.indices(b)) parameters.push_back(buckets_.like(i));
  GradBucket seen(b, bucket.flat, bucket.views, std::move(parameters), is_last);
  GradFuture& future = under_way_[b].future;
  future = hook_.run(seen);
  if (!future)
    base::raise(ErrorKind::kUsage, base::cat("the communication hook ", hook_.name, " returned no future"));
  timer_.bucket_awaits(b, future);
}

// A hook may return a tensor of its own; the average is then copied into the bucket, where delivery expects
// it.
void BucketExchange::wait(std::size_t b) {
  if (b >= under_way_.size()) return;
  UnderWay under_way = std::exchange(under_way_[b], {});
  if (!under_way.future) {
    for (const Work& work : under_way.works) work.wait();
    if (!under_way.works.empty()) timer_.bucket_done(b, under_way.works.back());
    return;
  }
  await_hook(under_way.future, group_->timeout(), base::cat("the communication hook ", hook_.name));
  timer_.bucket_done(b);
  const at::Tensor& flat = buckets_[b].flat;
  const at::Tensor result = hook_result(*under_way.future, hook_.name, flat);
  if (!result.is_alias_of(flat) || result.const_data_ptr() != flat.const_data_ptr())
    flat.copy_(result.view({-1}));
}

}  // namespace lockstep::internal
