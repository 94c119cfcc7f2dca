// Model averaging: ranks train independently and average their parameters every few steps, instead of
// averaging gradients in every step. An averager counts its calls and decides at which of them to average.
//
//   PeriodicModelAverager averager({.period = 4, .warmup_steps = 100});
//   for (...) { loss.backward(); opt.step(); averager.average_parameters(opt.param_groups()); }
//
// Pass the parameters to average, or the groups of an optimizer; those without a gradient are skipped
// (average_parameters.h, also for errors). Constructors and average_parameters are collective over the group.
// Thread safety: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <source_location>
#include <utility>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep {

// The interface; derive from it for a custom rule.
class ModelAverager {
 public:
  virtual ~ModelAverager() = default;
  ModelAverager(const ModelAverager&) = delete;
  ModelAverager& operator=(const ModelAverager&) = delete;

  // Averages when due, then counts one step. A call that raises is not counted.
  void average_parameters(const std::vector<at::Tensor>& parameters);
  void average_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups);

  // Calls so far. Saved and restored with the optimizer by PostLocalSGDOptimizer. Raises kUsage when
  // negative.
  std::int64_t step() const { return step_; }
  void set_step(std::int64_t step);

 protected:
  ModelAverager(Group group, std::source_location where);
  // The group to average over at this step; null: no averaging.
  virtual Group group_at(std::int64_t step) const = 0;

  const Group& group() const { return group_; }

 private:
  const Group group_;
  const std::source_location where_;
  std::int64_t step_ = 0;
};

struct PeriodicModelAveragerOptions {
  std::int64_t period = 0;  // required, at least 1; 1 logs a warning, since DDP costs no more
  // Steps before the first averaging; train with DDP meanwhile, or parameters diverge.
  std::int64_t warmup_steps = 0;
  Group group{};  // null: the default group
  std::source_location where = std::source_location::current();
};

// Averages at step warmup_steps and every `period` steps after it.
class PeriodicModelAverager final : public ModelAverager {
 public:
  // Raises kUsage for a period below 1 or negative warmup_steps.
  explicit PeriodicModelAverager(PeriodicModelAveragerOptions options);

 private:
  Group group_at(std::int64_t step) const override;
  const std::int64_t period_;
  const std::int64_t warmup_steps_;
};

struct HierarchicalModelAveragerOptions {
  // {period, size of the sub-groups averaged in then}, by ascending period: {{4, 2}, {16, 8}} averages pairs
  // of neighbouring ranks every 4 steps and all 8 every 16. The last size is that of the whole group.
  std::vector<std::pair<std::int64_t, int>> period_group_size_dict{};
  std::int64_t warmup_steps = 0;
  Group group{};  // null: the default group
  std::source_location where = std::source_location::current();
};

// Averages often among few ranks and rarely among all: at step s over the sub-group of the largest period
// that divides s, once s has reached warmup_steps.
class HierarchicalModelAverager final : public ModelAverager {
 public:
  // Creates the sub-groups: collective over the group. Raises kUsage when the list is empty, a period is not
  // positive or not larger than the previous one, the last size is not the group's, a size does not divide it
  // (new_subgroups), or warmup_steps is negative.
  explicit HierarchicalModelAverager(HierarchicalModelAveragerOptions options);

 private:
  Group group_at(std::int64_t step) const override;
  std::vector<std::pair<std::int64_t, Group>> levels_;  // by ascending period
  const std::int64_t warmup_steps_;
};

}  // namespace lockstep
