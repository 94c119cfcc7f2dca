// Gradients that are averaged together, outside the buckets, when the gradient of one chosen parameter
// arrives.
//
// They are stored in one flat buffer per element type, in the group's shared memory; .grad is a view of it.
// The gradient whose arrival starts the reduction, the trigger, must arrive after all of them: a delayed
// gradient that arrives later is an error. Thread safety: as the reducer, one thread at a time. Ownership:
// keeps parameters and group alive; its hook ends with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/ddp/internal/gradient_hooks.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/group/process_group.h"
#include "lockstep/group/work.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep::internal {

class DelayedReduction final : public std::enable_shared_from_this<DelayedReduction> {
 public:
  static std::shared_ptr<DelayedReduction> create(NamedTensors parameters, const at::Tensor& trigger,
                                                  Group group, std::source_location where);
  ~DelayedReduction() = default;
  DelayedReduction(const DelayedReduction&) = delete;
  DelayedReduction& operator=(const DelayedReduction&) = delete;

  // After a forward pass whose backward pass is to be reduced.
  void expect() { expected_ = true; }
  // Raises the failure of the last reduction, kUsage when it was not completed.
  void check() const;
  // Before a forward pass: hooks follow their parameters to new accumulators.
  void follow_parameters() { hooks_.follow(); }

 private:
  DelayedReduction(NamedTensors parameters, const at::Tensor& trigger, Group group,
                   std::source_location where);
  void on_gradient(std::size_t index);
  void start();
  void finish();

  const NamedTensors parameters_;
  const std::size_t trigger_;  // index of the hook; the number of parameters when it is not one of them
  const Group group_;
  const std::source_location where_;
  ShardGradients gradients_{std::make_shared<GradField>()};
  std::vector<at::Tensor> flats_;
  std::vector<at::Tensor> views_;  // by parameter
  std::vector<Work> works_;
  bool expected_ = false;
  std::optional<Failure> failure_;
  GradientHooks hooks_;  // of the parameters, then of the trigger if it is not one of them
};

}  // namespace lockstep::internal
