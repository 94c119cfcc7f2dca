// Post-local SGD: every step is local, and at the steps chosen by its averager the parameters are averaged
// over the ranks (Lin et al., "Don't use large mini-batches, use local SGD").
//
//   PostLocalSGDOptimizer opt(torch::optim::SGD(model->parameters(), 0.1),
//                             std::make_shared<PeriodicModelAverager>(
//                                 PeriodicModelAveragerOptions{.period = 4, .warmup_steps = 100}));
//
// Ownership: takes the optimizer with its groups, options and state; pass this object to schedulers. All of
// torch::optim::Optimizer works on it. Thread safety: as torch::optim::Optimizer, one thread at a time.
#pragma once

#include <torch/optim/optimizer.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

#include "lockstep/optim/model_averager.h"
#include "lockstep/optim/optimizer_state.h"
#include "lockstep/optim/optimizer_wrapper.h"

namespace lockstep {

class PostLocalSGDOptimizer final : public OptimizerWrapper {
 public:
  // Raises kUsage when either is null.
  PostLocalSGDOptimizer(std::unique_ptr<torch::optim::Optimizer> optim,
                        std::shared_ptr<ModelAverager> averager);
  template <std::derived_from<torch::optim::Optimizer> Optim>
  PostLocalSGDOptimizer(Optim&& optim, std::shared_ptr<ModelAverager> averager)
      : PostLocalSGDOptimizer(
            std::unique_ptr<torch::optim::Optimizer>(std::make_unique<Optim>(std::move(optim))),
            std::move(averager)) {}

  // A local step, then the averager: collective at the steps it averages. Returns the closure's loss.
  at::Tensor step(LossClosure closure = nullptr) override;

  // The optimizer's state, with the averager's step as extra["step"]. load_state_dict raises as
  // set_optimizer_state_dict; without a step it logs a warning and the averager starts at 0.
  OptimizerStateDict state_dict() const;
  void load_state_dict(const OptimizerStateDict& state_dict);
  // torch::save and torch::load: the same in an archive.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  const std::shared_ptr<ModelAverager>& averager() const { return averager_; }

 private:
  const std::shared_ptr<ModelAverager> averager_;
};

}  // namespace lockstep
