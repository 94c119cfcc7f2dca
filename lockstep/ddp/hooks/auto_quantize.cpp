#include "lockstep/ddp/hooks/auto_quantize.h"

#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/group/groups.h"

namespace lockstep {
namespace {

constexpr double kLargestHalf = 65504;

void check(const at::Tensor& tensor, const char* operation) {
  if (tensor.defined() && (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble)) return;
  base::raise(ErrorKind::kUsage,
              base::cat("AutoQuantize::", operation, " takes f32 and f64 tensors, this one is ",
                        tensor.defined() ? c10::toString(tensor.scalar_type()) : "undefined"));
}

void check_blocking(bool async_op, const char* operation) {
  if (!async_op) return;
  base::raise(ErrorKind::kUsage, base::cat("AutoQuantize::", operation,
                                           ": async_op is not supported, since results are cast when ",
                                           "the operation is over; leave it false"));
}

void copy_back(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i].detach().copy_(from[i]);
}

}  // namespace

at::Tensor AutoQuantize::small(const at::Tensor& tensor, const char* operation) const {
  check(tensor, operation);
  const at::Tensor values = tensor.detach();
  return (type_ == DQuantType::kFp16 ? at::clamp(values, -kLargestHalf, kLargestHalf) : values).to(dtype());
}

at::Tensor AutoQuantize::room_for(const at::Tensor& tensor, const char* operation) const {
  check(tensor, operation);
  return at::empty(tensor.sizes(), tensor.options().dtype(dtype()).requires_grad(false));
}

void AutoQuantize::all_gather(std::vector<at::Tensor> outputs, at::Tensor input,
                              AllGatherOptions options) const {
  check_blocking(options.async_op, "all_gather");
  std::vector<at::Tensor> arrived;
  for (const at::Tensor& output : outputs) arrived.push_back(room_for(output, "all_gather"));
  lockstep::all_gather(arrived, small(input, "all_gather"), options);
  if (is_group_member(options.group)) copy_back(outputs, arrived);
}

void AutoQuantize::all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                              AllToAllOptions options) const {
  check_blocking(options.async_op, "all_to_all");
  std::vector<at::Tensor> arrived, sent;
  for (const at::Tensor& output : outputs) arrived.push_back(room_for(output, "all_to_all"));
  for (const at::Tensor& input : inputs) sent.push_back(small(input, "all_to_all"));
  lockstep::all_to_all(arrived, std::move(sent), options);
  if (is_group_member(options.group)) copy_back(outputs, arrived);
}

void AutoQuantize::all_to_all_single(at::Tensor output, at::Tensor input,
                                     AllToAllSingleOptions options) const {
  check_blocking(options.async_op, "all_to_all_single");
  const at::Tensor arrived = room_for(output, "all_to_all_single");
  lockstep::all_to_all_single(arrived, small(input, "all_to_all_single"), options);
  if (is_group_member(options.group)) output.detach().copy_(arrived);
}

}  // namespace lockstep
