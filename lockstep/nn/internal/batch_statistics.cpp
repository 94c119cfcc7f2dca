#include "lockstep/nn/internal/batch_statistics.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>
#include <vector>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"

namespace lockstep::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Half types are computed with in f32.
at::ScalarType computed_in(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

struct Kept final : torch::CustomClassHolder {
  Kept(BatchStatistics all, double epsilon, NormRoute way)
      : statistics(std::move(all)), eps(epsilon), route(std::move(way)) {}
  BatchStatistics statistics;
  double eps;
  NormRoute route;  // the thread that runs backward may have no default one
};

class Normalise final : public torch::autograd::Function<Normalise> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& bias, const c10::intrusive_ptr<Kept>& kept) {
    context->save_for_backward({input, weight, bias});
    context->saved_data["kept"] = c10::IValue::make_capsule(kept);
    if (input.numel() == 0) return at::empty_like(input);
    const auto dtype = computed_in(input);
    const auto& all = kept->statistics;
    // With given statistics, as in eval mode.
    const auto results =
        at::native_batch_norm(input.to(dtype), weight.to(dtype), bias.to(dtype), all.mean.to(dtype),
                              all.variance.to(dtype), /*training=*/false, /*momentum=*/0, kept->eps);
    return std::get<0>(results).to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (at::GradMode::is_enabled())
      base::raise(ErrorKind::kUnsupported, "SyncBatchNorm: backward with create_graph is not supported");
    const auto kept = c10::static_intrusive_pointer_cast<Kept>(context->saved_data["kept"].toCapsule());
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &bias = saved[2];
    const auto& all = kept->statistics;
    const auto dtype = computed_in(input);
    const at::Tensor x = input.to(dtype), scale = weight.to(dtype), mean = all.mean.to(dtype);
    at::Tensor sums = empty_sums(input.size(1), input.device());
    at::Tensor local, for_weight, for_bias;
    if (input.numel() != 0) {
      // As in eval mode, where the statistics are constants; what they depend on comes after the exchange. CUDA's
      // kernel wants what a forward pass would have saved, too.
      const at::Tensor variance = all.variance.to(dtype);
      const bool on_cpu = x.is_cpu();
      std::tie(local, for_weight, for_bias) = at::native_batch_norm_backward(
          gradients[0].to(dtype), x, scale, mean, variance, on_cpu ? at::Tensor() : mean,
          on_cpu ? at::Tensor() : (variance + kept->eps).rsqrt(), /*train=*/false, kept->eps,
          {true, true, true});
      sums[0].copy_(for_bias);
      sums[1].copy_(for_weight);
    }
    kept->route.announce(Pass::kBackward);
    all_reduce(sums, {.group = kept->route.group});
    if (input.numel() == 0) {
      local = at::empty_like(input);
      for_weight = for_bias = at::zeros({input.size(1)}, input.options().dtype(dtype));
    } else {
      subtract_common(local, x, mean, scale, sums, *kept);
    }
    return {local.to(input.scalar_type()), for_weight.to(weight.scalar_type()),
            for_bias.to(bias.scalar_type()), at::Tensor()};
  }

 private:
  // What reaches the input through mean and variance: with n values, s = 1/sqrt(variance + eps), x' = (x -
  // mean) s, it is weight s (sum(g) + x' sum(g x')) / n.
  static void subtract_common(at::Tensor& gradient, const at::Tensor& x, const at::Tensor& mean,
                              const at::Tensor& scale, const at::Tensor& sums, const Kept& kept) {
    std::vector<std::int64_t> shape(static_cast<std::size_t>(x.dim()), 1);
    shape[1] = x.size(1);
    const auto spread = [&](const at::Tensor& t) { return t.to(x.scalar_type()).view(shape); };
    const at::Tensor inverse = (kept.statistics.variance + kept.eps).rsqrt();
    const at::Tensor factor = inverse * scale / kept.statistics.count;
    at::Tensor common = x - mean.view(shape);
    common.mul_(spread(factor * inverse * sums[1])).add_(spread(factor * sums[0]));
    gradient.sub_(common);
  }
};

}  // namespace

at::Tensor describe_part(const at::Tensor& input, std::int64_t channels, c10::Device device) {
  at::Tensor part = at::zeros({1 + 2 * channels}, at::TensorOptions(at::kDouble).device(device));
  if (!input.defined() || input.numel() == 0) return part;
  std::vector<std::int64_t> dims{0};
  for (std::int64_t d = 2; d < input.dim(); ++d) dims.push_back(d);
  const auto [variance, mean] = at::var_mean(input.detach().to(computed_in(input)), dims, at::Scalar(0));
  const double count = static_cast<double>(input.numel() / channels);
  part[0].fill_(count);
  part.narrow(0, 1, channels).copy_(mean);
  part.narrow(0, 1 + channels, channels).copy_(variance).mul_(count);
  return part;
}

at::Tensor empty_parts(const at::Tensor& part, int n_ranks) {
  return at::empty({n_ranks, part.numel()}, part.options());
}

// Two passes: the means first, then the deviations of each part's mean from the mean of all. Nothing is
// subtracted that is large only because the mean is.
BatchStatistics combine_parts(const at::Tensor& parts) {
  const std::int64_t channels = (parts.size(1) - 1) / 2;
  const at::Tensor counts = parts.narrow(1, 0, 1);
  const at::Tensor means = parts.narrow(1, 1, channels);
  BatchStatistics all;
  all.count = counts.sum().item<double>();
  const double n = all.count == 0 ? 1 : all.count;
  all.mean = (counts * means).sum(0).div_(n);
  all.variance =
      (parts.narrow(1, 1 + channels, channels) + counts * (means - all.mean).square_()).sum(0).div_(n);
  return all;
}

at::Tensor empty_sums(std::int64_t channels, c10::Device device) {
  return at::zeros({2, channels}, at::TensorOptions(at::kDouble).device(device));
}

at::Tensor normalise(const at::Tensor& input, const Affine& affine, const BatchStatistics& statistics,
                     double eps, const NormRoute& route) {
  // A function of autograd's takes no undefined tensors.
  const auto options = at::TensorOptions(computed_in(input)).device(input.device());
  const at::Tensor weight = affine.weight.defined() ? affine.weight : at::ones({input.size(1)}, options);
  const at::Tensor bias = affine.bias.defined() ? affine.bias : at::zeros({input.size(1)}, options);
  return Normalise::apply(input, weight, bias, c10::make_intrusive<Kept>(statistics, eps, route));
}

}  // namespace lockstep::internal
