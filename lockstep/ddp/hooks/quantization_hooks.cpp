#include "lockstep/ddp/hooks/quantization_hooks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/hooks/internal/average.h"

namespace lockstep {
namespace {

constexpr double kLevels = 255;
constexpr std::int64_t kHeadBytes = 2 * sizeof(float);  // s and z of one row

// One rank's message: the heads of all rows, then their elements, then zeros up to a multiple of a head.
struct Layout {
  std::int64_t n = 0;  // elements of the bucket
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  std::int64_t n_bytes() const {
    const std::int64_t used = rows * kHeadBytes + rows * columns;
    return (used + kHeadBytes - 1) / kHeadBytes * kHeadBytes;
  }
  at::Tensor heads(const at::Tensor& message) const {
    return message.narrow(0, 0, rows * kHeadBytes).view(at::kFloat).view({rows, 2});
  }
  at::Tensor elements(const at::Tensor& message) const {
    return message.narrow(0, rows * kHeadBytes, rows * columns).view({rows, columns});
  }
};

at::Tensor quantised(const at::Tensor& buffer, const Layout& layout) {
  at::Tensor message = at::zeros({layout.n_bytes()}, at::TensorOptions(at::kByte));
  at::Tensor rows = buffer.to(at::kFloat);
  const std::int64_t n_padding = layout.rows * layout.columns - layout.n;
  if (n_padding != 0) rows = at::constant_pad_nd(rows, {0, n_padding});
  rows = rows.view({layout.rows, layout.columns});

  // minimum and maximum hand a NaN on, other ways of clamping may not.
  const auto [smallest, largest] = at::aminmax(rows, 1, true);
  const at::Tensor zero = at::zeros({1}, rows.options());
  const at::Tensor low = at::minimum(smallest, zero);
  const at::Tensor least = at::full({1}, std::numeric_limits<float>::epsilon(), rows.options());
  const at::Tensor scale = at::maximum((at::maximum(largest, zero) - low) / kLevels, least);
  const at::Tensor zero_point = (low / scale).round_().neg_().clamp_(0, kLevels);

  const at::Tensor heads = layout.heads(message);
  heads.select(1, 0).copy_(scale.view({-1}));
  heads.select(1, 1).copy_(zero_point.view({-1}));
  // A row whose scale is no number is lost by its scale; its elements only need to be some numbers.
  layout.elements(message).copy_((rows / scale).round_().add_(zero_point).nan_to_num_(0).clamp_(0, kLevels));
  return message;
}

void average(const at::Tensor& messages, const Layout& layout, const at::Tensor& buffer) {
  at::Tensor sum = at::zeros({layout.rows, layout.columns}, at::TensorOptions(at::kFloat));
  for (std::int64_t r = 0; r < messages.size(0); ++r) {
    const at::Tensor message = messages.select(0, r);
    const at::Tensor heads = layout.heads(message);
    const at::Tensor scale = heads.narrow(1, 0, 1), zero_point = heads.narrow(1, 1, 1);
    sum.add_((layout.elements(message).to(at::kFloat) - zero_point).mul_(scale));
  }
  sum.div_(static_cast<double>(messages.size(0)));
  buffer.copy_(sum.view({-1}).narrow(0, 0, layout.n));
}

// Each rank quantises by its own scale, so nothing has to be known of the others first: one operation.
GradFuture exchange(const at::Tensor& buffer, const Group& group, std::int64_t columns) {
  if (buffer.numel() == 0) return ready_future(buffer);
  const Layout layout{
      .n = buffer.numel(), .rows = (buffer.numel() + columns - 1) / columns, .columns = columns};
  at::Tensor messages = at::empty({group->size(), layout.n_bytes()}, at::TensorOptions(at::kByte));
  const Work work =
      all_gather_into_tensor(messages, quantised(buffer, layout), {.group = group, .async_op = true});
  return work.get_future()->then(
      [messages, layout, buffer](const c10::ivalue::Future& future) {
        internal::rethrow_error(future);
        average(messages, layout, buffer);
        return c10::IValue(buffer);
      },
      c10::TensorType::get());
}

}  // namespace

CommHook quantization_pertensor_hook(CommHookOptions options) {
  return {
      .run = [group = internal::resolved(std::move(options.group))](
                 GradBucket& bucket) { return exchange(bucket.buffer(), group, bucket.buffer().numel()); },
      .name = "quantization_pertensor_hook"};
}

CommHook quantization_perchannel_hook(PerChannelOptions options) {
  const std::int64_t bucket_size = options.bucket_size;
  if (bucket_size < 1) {
    base::raise(ErrorKind::kUsage,
                base::cat("quantization_perchannel_hook: bucket_size must be positive, it is ", bucket_size));
  }
  return {.run = [group = internal::resolved(std::move(options.group)),
                  bucket_size](GradBucket& bucket) { return exchange(bucket.buffer(), group, bucket_size); },
          .name = "quantization_perchannel_hook"};
}

}  // namespace lockstep
