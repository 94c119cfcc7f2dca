// Operators whose weight has a style, met above autograd: what they do around the operator is recorded as if
// the program had written it.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rms_norm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "lockstep/base/detail/raise.h"
#include "lockstep/dtensor/detail/operand_style.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/internal/checks.h"
#include "lockstep/dtensor/internal/embedding.h"
#include "lockstep/dtensor/internal/meta.h"

namespace lockstep {

namespace {

// A plain input as a DTensor. Pieces count as equal, unless the weight tells that they are not: ranks then have
// different numbers of its `features`, or none.
at::Tensor as_dtensor(const at::Tensor& input, const DeviceMesh& mesh, const OperandStyle& style,
                      std::optional<std::int64_t> features) {
  if (is_dtensor(input)) return input;
  if (!features || input.dim() == 0) return from_local(input, mesh, style.input);
  constexpr auto kName = "the input of a parallel module";
  const auto context = dtensor_internal::MeshContext::of(mesh, kName, style.input);
  const auto placed = dtensor_internal::checked_placements(kName, *context, input.dim(), style.input);
  auto sizes = dtensor_internal::global_sizes(kName, *context, input, placed, {});
  const bool cut = std::ranges::any_of(
      placed, [&](const Placement& placement) { return placement.is_shard(input.dim() - 1); });
  if (!cut || sizes.back() == *features) return from_local(input, mesh, style.input);
  sizes.back() = *features;
  const auto strides = c10::contiguous_strides(sizes);
  return from_local(input, mesh, placed,
                    {.shape = sizes, .stride = dtensor_internal::Sizes(strides.begin(), strides.end())});
}

}  // namespace

at::Tensor prepare_operand(const at::Tensor& input, const DeviceMesh& mesh, const OperandStyle& style,
                           std::optional<std::int64_t> features) {
  auto x = as_dtensor(input, mesh, style, features);
  const auto wanted = dtensor_internal::checked_placements(
      "the input of a parallel module", *dtensor_internal::meta_of(x).mesh(), x.dim(), style.desired_input);
  return placements(x) == wanted ? x : redistribute(x, wanted);
}

at::Tensor finish_operand(const at::Tensor& output, const OperandStyle& style) {
  auto y = output;
  const auto wanted = dtensor_internal::checked_placements(
      "the output of a parallel module", *dtensor_internal::meta_of(y).mesh(), y.dim(), style.output);
  if (placements(y) != wanted) y = redistribute(y, wanted);
  return style.use_local_output ? to_local(y) : y;
}

namespace {

using dtensor_internal::is_sharded;
using dtensor_internal::kStyleKey;
using dtensor_internal::meta_of;

// Runs `op` on the prepared input where the weight has a style, as it is where it has none.
using Kind = OperandStyle::Kind;

// `features`: the weight's dimension that has the size of the input's last one.
template <class Op>
at::Tensor styled(Kind kind, const at::Tensor& input, const at::Tensor& weight, Op&& op,
                  std::optional<std::int64_t> features = {}) {
  // Inside, the operator takes its ordinary way: its parts (matmul in linear) must not apply the style a
  // second time.
  const c10::impl::ExcludeDispatchKeyGuard once(kStyleKey);
  const auto style = is_sharded(weight) ? meta_of(weight).style() : nullptr;
  if (!style || style->kind != kind) return op(input);
  const auto n_features = features ? std::optional(weight.size(*features)) : std::nullopt;
  const auto x = prepare_operand(input, meta_of(weight).mesh()->mesh(), *style, n_features);
  return finish_operand(op(x), *style);
}

at::Tensor styled_linear(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias) {
  return styled(
      Kind::kLinear, input, weight, [&](const at::Tensor& x) { return at::linear(x, weight, bias); }, -1);
}

at::Tensor styled_matmul(const at::Tensor& input, const at::Tensor& weight) {
  return styled(
      Kind::kLinear, input, weight, [&](const at::Tensor& x) { return at::matmul(x, weight); }, 0);
}

at::Tensor styled_addmm(const at::Tensor& bias, const at::Tensor& input, const at::Tensor& weight,
                        const at::Scalar& beta, const at::Scalar& alpha) {
  return styled(
      Kind::kLinear, input, weight,
      [&](const at::Tensor& x) { return at::addmm(bias, x, weight, beta, alpha); }, 0);
}

// The bias to add to a local product of `ndim` dimensions in the layout of the style: the piece that belongs
// to the product's last dimension. Where rows are cut, the gradients of the ranks' rows add up to the bias's.
at::Tensor local_bias(const at::Tensor& bias, const OperandStyle& style, std::int64_t ndim) {
  Placements placed, gradient;
  for (const auto& output : style.output) {
    const bool columns = output.is_shard(-1) || output.is_shard(ndim - 1);
    placed.push_back(columns ? Placement(Shard(0)) : Placement());
    gradient.push_back(output.is_shard() && !columns ? Placement(Partial()) : placed.back());
  }
  if (placements(bias) == placed && gradient == placed) return to_local(bias);
  return to_local(redistribute(bias, placed), {.grad_placements = gradient});
}

// torch::nn::Linear's `output += bias`, where the product was returned as a local tensor.
at::Tensor& styled_add_(at::Tensor& self, const at::Tensor& bias, const at::Scalar& alpha) {
  const c10::impl::ExcludeDispatchKeyGuard once(kStyleKey);
  const auto style = is_sharded(bias) ? meta_of(bias).style() : nullptr;
  const bool local = !is_sharded(self) && style && style->kind == Kind::kLinear;
  return self.add_(local ? local_bias(bias, *style, self.dim()) : bias, alpha);
}

at::Tensor styled_embedding(const at::Tensor& weight, const at::Tensor& indices, c10::SymInt padding_idx,
                            bool scale_grad_by_freq, bool sparse) {
  return styled(Kind::kEmbedding, indices, weight, [&](const at::Tensor& i) {
    if (!sparse && dtensor_internal::cuts_rows(weight)) {
      return dtensor_internal::embed_rows(weight, i, {padding_idx.expect_int(), scale_grad_by_freq});
    }
    return at::embedding_symint(weight, i, padding_idx, scale_grad_by_freq, sparse);
  });
}

at::Tensor styled_layer_norm(const at::Tensor& input, c10::SymIntArrayRef shape,
                             const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                             double eps, bool cudnn_enable) {
  return styled(Kind::kNorm, input, weight.value_or(at::Tensor()), [&](const at::Tensor& x) {
    return at::layer_norm_symint(x, shape, weight, bias, eps, cudnn_enable);
  });
}

at::Tensor styled_rms_norm(const at::Tensor& input, c10::SymIntArrayRef shape,
                           const std::optional<at::Tensor>& weight, std::optional<double> eps) {
  return styled(Kind::kNorm, input, weight.value_or(at::Tensor()),
                [&](const at::Tensor& x) { return at::rms_norm_symint(x, shape, weight, eps); });
}

// Never undone, as the kernels at kKey.
void install_styles() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto& dispatcher = c10::Dispatcher::singleton();
    auto* const handles = new std::vector<c10::RegistrationHandleRAII>;
    const auto install = [&](const char* op, c10::KernelFunction kernel) {
      const std::string name = op;
      const auto dot = name.find('.');
      const c10::OperatorName full(name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1));
      handles->push_back(dispatcher.registerImpl(full, kStyleKey, std::move(kernel), std::nullopt, nullptr,
                                                 "lockstep/dtensor"));
    };
    handles->push_back(
        dispatcher.registerFallback(kStyleKey, c10::KernelFunction::makeFallthrough(), "lockstep/dtensor"));
    install("aten::linear", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&styled_linear));
    install("aten::matmul", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&styled_matmul));
    install("aten::addmm", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&styled_addmm));
    install("aten::add_.Tensor", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&styled_add_));
    install("aten::embedding", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&styled_embedding));
    install("aten::layer_norm", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&styled_layer_norm));
    install("aten::rms_norm", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&styled_rms_norm));
  });
}

}  // namespace

at::Tensor with_style(const at::Tensor& dtensor, OperandStyle style) {
  if (!is_sharded(dtensor)) base::raise(ErrorKind::kUsage, "with_style: not a DTensor");
  install_styles();
  const auto& meta = meta_of(dtensor);
  auto result = dtensor_internal::wrap(meta.local(), dtensor.sizes(), meta.mesh(), meta.layout(), false, {},
                                       std::make_shared<const OperandStyle>(std::move(style)));
  result.unsafeGetTensorImpl()->set_sizes_and_strides(dtensor.sizes(), dtensor.strides());
  result.set_requires_grad(dtensor.requires_grad());
  return result;
}

}  // namespace lockstep
