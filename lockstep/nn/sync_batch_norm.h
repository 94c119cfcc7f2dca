// Batch normalisation over the batches of all ranks: mean and variance are computed over the combined batch,
// so small batches per rank train like one large batch.
//
//   lockstep::SyncBatchNorm norm(64);                                            // in place of BatchNorm1d, 2d or 3d
//   lockstep::SyncBatchNorm other(torch::nn::BatchNormOptions(64).momentum(0.01), {.group = group});
//   lockstep::convert_sync_batchnorm(net);                                       // layers in containers
//
// In training mode forward and backward are one small collective each (an all_gather of counts, means and
// squared deviations; an all_reduce of two sums per channel): every rank runs them, in the same order.
// Batches may differ in size and be empty. Under join() ranks that have exhausted their input need no batch.
// In eval mode, without a group, or in a group of one it is torch's BatchNorm.
//
// The results and the gradient of the input are those of BatchNorm on the whole batch, for the sum of all
// ranks' losses. Gradients of weight and bias are this rank's part of the sum; DistributedDataParallel
// averages them like all others. Running statistics are bitwise equal on all ranks, whatever their batches.
// Double backward is not supported.
// Thread safety: as torch::nn::Module, one thread at a time.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/group/process_group.h"
#include "lockstep/join/background_shadow.h"

namespace lockstep {

namespace internal {
class NormShadow;
struct NormRoute;
}  // namespace internal

struct SyncBatchNormOptions {
  Group group{};  // null: the default group at the time of the forward pass
};

class SyncBatchNormImpl final : public torch::nn::Cloneable<SyncBatchNormImpl>, public LayerWithCollectives {
 public:
  explicit SyncBatchNormImpl(torch::nn::BatchNormOptions options, SyncBatchNormOptions sync = {});

  // Input: batch, channels, then any dimensions. Collective in training mode. Raises kUsage when the input
  // has the wrong shape, or when all ranks together have only one value per channel; otherwise what the group
  // raises, also from backward().
  at::Tensor forward(const at::Tensor& input);

  // Participate in the other ranks' forward or backward pass through this layer with an empty batch, without
  // updating the running statistics; for custom protocols. Under join() a background shadow does this, and
  // the statistics are synchronised with the model at the end. One call per pass, in the order in which the
  // others run their layers. Both block.
  void shadow_forward();
  void shadow_backward();
  // Of its parameters, or else its statistics; the CPU without either.
  c10::Device device() const;
  std::unique_ptr<BackgroundShadow> make_background_shadow(const std::vector<LayerWithCollectives*>& layers,
                                                           const Group& group) override;

  void reset() override;
  void reset_running_stats();
  void pretty_print(std::ostream& stream) const override;
  const Group& group() const { return group_; }

  // Names as in torch::nn::BatchNorm. weight and bias are undefined without `affine`, the others without
  // `track_running_stats`.
  torch::nn::BatchNormOptions options;
  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;

  // A layer that shares the tensors of a BatchNorm layer, with its options and mode.
  template <class BatchNormImpl>
  static std::shared_ptr<SyncBatchNormImpl> adopt(const BatchNormImpl& plain, SyncBatchNormOptions sync) {
    const Tensors tensors{plain.weight, plain.bias, plain.running_mean, plain.running_var,
                          plain.num_batches_tracked};
    auto layer = std::make_shared<SyncBatchNormImpl>(plain.options, std::move(sync));
    layer->take(tensors);
    layer->train(plain.is_training());
    return layer;
  }

 private:
  struct Tensors {
    at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;
  };
  friend class internal::NormShadow;
  void take(const Tensors& tensors);
  internal::NormRoute route() const;
  double count_batch();
  void check_input(const at::Tensor& input) const;
  void update_running(const at::Tensor& mean, const at::Tensor& variance, double count);

  Group group_;
  std::shared_ptr<const internal::NormRoute> route_;  // set under join()
};

// As TORCH_MODULE makes it, and with a constructor that takes braces.
class SyncBatchNorm : public torch::nn::ModuleHolder<SyncBatchNormImpl> {
 public:
  using Impl = SyncBatchNormImpl;
  using torch::nn::ModuleHolder<SyncBatchNormImpl>::ModuleHolder;
  SyncBatchNorm(torch::nn::BatchNormOptions options, SyncBatchNormOptions sync)
      : ModuleHolder(std::move(options), std::move(sync)) {}
};

namespace internal {
void convert_sync_batchnorm(torch::nn::Module& module, SyncBatchNormOptions options);
}

// Replaces every BatchNorm1d, 2d and 3d in a Sequential, ModuleList or ModuleDict, at any depth, by a
// SyncBatchNorm with the same parameters, buffers and mode; existing optimizers keep working. Not a
// collective. A BatchNorm registered by a user's module cannot be replaced, since its member would still
// point to the old layer: raises kUsage naming all of them, and changes nothing. Declare those as
// lockstep::SyncBatchNorm.
template <class Holder>
requires requires(Holder holder) {
  holder->named_children();
}
void convert_sync_batchnorm(Holder module, SyncBatchNormOptions options = {}) {
  internal::convert_sync_batchnorm(*module, std::move(options));
}

}  // namespace lockstep
