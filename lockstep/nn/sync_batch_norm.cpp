#include "lockstep/nn/sync_batch_norm.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/group/detail/group_base.h"
#include "lockstep/group/world.h"
#include "lockstep/nn/internal/batch_statistics.h"
#include "lockstep/nn/internal/norm_route.h"

namespace lockstep {

SyncBatchNormImpl::SyncBatchNormImpl(torch::nn::BatchNormOptions layer_options, SyncBatchNormOptions sync)
    : options(std::move(layer_options)), group_(std::move(sync.group)) {
  if (options.num_features() <= 0) {
    base::raise(ErrorKind::kUsage, base::cat("SyncBatchNorm: the number of features is ",
                                             options.num_features(), "; it must be positive"));
  }
  SyncBatchNormImpl::reset();
}

// Undefined tensors are registered, too: names and their order are those of torch's layer, so that archives
// fit.
void SyncBatchNormImpl::reset() {
  const std::int64_t n = options.num_features();
  const bool affine = options.affine(), tracked = options.track_running_stats();
  weight = register_parameter("weight", affine ? at::ones({n}) : at::Tensor(), affine);
  bias = register_parameter("bias", affine ? at::zeros({n}) : at::Tensor(), affine);
  running_mean = register_buffer("running_mean", tracked ? at::zeros({n}) : at::Tensor());
  running_var = register_buffer("running_var", tracked ? at::ones({n}) : at::Tensor());
  num_batches_tracked =
      register_buffer("num_batches_tracked", tracked ? at::zeros({}, at::kLong) : at::Tensor());
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!options.track_running_stats()) return;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

// A registered buffer cannot be replaced, so the old tensors take over the memory of these.
void SyncBatchNormImpl::take(const Tensors& tensors) {
  if (options.affine()) {
    weight = parameters_["weight"] = tensors.weight;
    bias = parameters_["bias"] = tensors.bias;
  }
  if (options.track_running_stats()) {
    running_mean.set_data(tensors.running_mean);
    running_var.set_data(tensors.running_var);
    num_batches_tracked.set_data(tensors.num_batches_tracked);
  }
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "lockstep::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps()
         << ", momentum=" << (options.momentum() ? base::cat(*options.momentum()) : "None")
         << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats()
         << ')';
}

// Its group is null when the statistics are those of this rank only.
internal::NormRoute SyncBatchNormImpl::route() const {
  if (!is_training()) return {};
  // Set by the background shadow (norm_route.cpp) for the time of a join(): its group, and the layer's index.
  if (route_) return *route_;
  Group group = group_ ? group_ : (is_initialized() ? default_group() : nullptr);
  // A group of one needs no collective and takes the plain kernel.
  return {group && group->size() > 1 ? std::move(group) : nullptr};
}

void SyncBatchNormImpl::check_input(const at::Tensor& input) const {
  if (input.dim() < 2 || input.size(1) != options.num_features()) {
    base::raise(ErrorKind::kUsage,
                base::cat("SyncBatchNorm(", options.num_features(), "): the input is ", input.sizes(),
                          "; it must have two dimensions or more, the second of that size"));
  }
}

// One more batch in training mode. Returns the weight of its statistics in the running ones.
double SyncBatchNormImpl::count_batch() {
  if (!options.track_running_stats() || !is_training()) return options.momentum().value_or(0.0);
  num_batches_tracked.add_(1);
  return options.momentum() ? *options.momentum() : 1.0 / num_batches_tracked.item<double>();
}

void SyncBatchNormImpl::update_running(const at::Tensor& mean, const at::Tensor& variance, double count) {
  const at::NoGradGuard no_grad;
  const double factor = count_batch();
  if (!options.track_running_stats()) return;
  running_mean.mul_(1 - factor).add_(mean.to(running_mean.scalar_type()), factor);
  // Running statistics hold the unbiased variance, normalisation uses the biased one, as torch's layer does.
  // count is that of all ranks and not 1 here.
  running_var.mul_(1 - factor).add_((variance * (count / (count - 1))).to(running_var.scalar_type()), factor);
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  check_input(input);
  const internal::NormRoute way = route();
  if (!way.group) {
    const bool own_statistics = is_training() || !options.track_running_stats();
    if (own_statistics && input.numel() == input.size(1)) {
      base::raise(
          ErrorKind::kUsage,
          base::cat("SyncBatchNorm: one value per channel has no variance; the input is ", input.sizes()));
    }
    return at::batch_norm(input, weight, bias, running_mean, running_var, own_statistics, count_batch(),
                          options.eps(), at::globalContext().userEnabledCuDNN());
  }
  // One collective per pass and layer: count, mean and squared deviations travel together. Ranks may have
  // batches of different sizes, down to none, so the counts are part of it.
  const at::Tensor part = internal::describe_part(input, options.num_features(), input.device());
  const at::Tensor parts = internal::empty_parts(part, way.group->size());
  // Under join only: tells ranks without input which layer's collective follows.
  way.announce(internal::Pass::kForward);
  all_gather_into_tensor(parts, part, {.group = way.group});
  const internal::BatchStatistics all = internal::combine_parts(parts);
  // After the collective and by the common count: all ranks raise, or none.
  if (all.count == 1) {
    base::raise(ErrorKind::kUsage,
                base::cat("SyncBatchNorm: all ranks together have one value per channel, which has no "
                          "variance; here the input is ",
                          input.sizes()));
  }
  // Bitwise equal on every rank (combine_parts), so the running statistics stay equal without a broadcast.
  if (all.count != 0) update_running(all.mean, all.variance, all.count);
  return internal::normalise(input, {weight, bias}, all, options.eps(), way);
}

c10::Device SyncBatchNormImpl::device() const {
  if (options.affine()) return weight.device();
  return options.track_running_stats() ? running_mean.device() : c10::Device(c10::kCPU);
}

void SyncBatchNormImpl::shadow_forward() {
  if (const Group group = route().group) internal::shadow_forward(options.num_features(), group, device());
}

void SyncBatchNormImpl::shadow_backward() {
  if (const Group group = route().group) internal::shadow_backward(options.num_features(), group, device());
}

std::unique_ptr<BackgroundShadow> SyncBatchNormImpl::make_background_shadow(
    const std::vector<LayerWithCollectives*>& layers, const Group& group) {
  std::vector<SyncBatchNormImpl*> norms;
  for (LayerWithCollectives* const layer : layers) {
    auto* const norm = dynamic_cast<SyncBatchNormImpl*>(layer);
    if (norm == nullptr) continue;
    if (!internal::have_same_members(norm->group_, group)) {
      base::raise(
          ErrorKind::kUsage,
          "join: a SyncBatchNorm layer has another group than the model; under join both must have the "
          "same ranks of the same world");
    }
    norms.push_back(norm);
  }
  return std::make_unique<internal::NormShadow>(std::move(norms), group);
}

}  // namespace lockstep
