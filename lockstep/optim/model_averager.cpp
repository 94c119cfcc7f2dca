#include "lockstep/optim/model_averager.h"

#include <ranges>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/world.h"
#include "lockstep/optim/average_parameters.h"

namespace lockstep {
namespace {

void check_warmup(const char* who, std::int64_t warmup_steps) {
  if (warmup_steps < 0) {
    base::raise(ErrorKind::kUsage,
                base::cat(who, ": warmup_steps must not be negative, and is ", warmup_steps));
  }
}

void warn_of_every_step(const char* who) {
  base::log(LogLevel::kWarn,
            base::cat(who,
                      ": averaging the parameters in every step costs as much as averaging the "
                      "gradients; DistributedDataParallel alone does that, and overlaps it with "
                      "backward"));
}

void check_levels(const std::vector<std::pair<std::int64_t, int>>& levels, const Group& group) {
  constexpr const char* kWho = "HierarchicalModelAverager: ";
  if (levels.empty()) {
    base::raise(ErrorKind::kUsage,
                base::cat(kWho, "period_group_size_dict is empty; give at least {period, group size}"));
  }
  std::int64_t before = 0;
  for (const auto& [period, size] : levels) {
    if (period <= 0)
      base::raise(ErrorKind::kUsage, base::cat(kWho, "a period must be positive, and one is ", period));
    if (period <= before) {
      base::raise(ErrorKind::kUsage,
                  base::cat(kWho, "periods must ascend, and ", period, " follows ", before));
    }
    before = period;
  }
  if (levels.back().second != get_world_size(group)) {
    base::raise(ErrorKind::kUsage, base::cat(kWho, "the last group size must be the whole group's, ",
                                             get_world_size(group), ", and is ", levels.back().second));
  }
}

}  // namespace

ModelAverager::ModelAverager(Group group, std::source_location where)
    : group_(group ? std::move(group) : default_group()), where_(where) {}

void ModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  if (const Group group = group_at(step_)) {
    average_parameters_or_parameter_groups(parameters, {.group = group, .where = where_});
  }
  ++step_;
}

void ModelAverager::average_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  if (const Group group = group_at(step_)) {
    average_parameters_or_parameter_groups(groups, {.group = group, .where = where_});
  }
  ++step_;
}

void ModelAverager::set_step(std::int64_t step) {
  if (step < 0)
    base::raise(ErrorKind::kUsage, base::cat("ModelAverager: a step must not be negative, and is ", step));
  step_ = step;
}

PeriodicModelAverager::PeriodicModelAverager(PeriodicModelAveragerOptions options)
    : ModelAverager(std::move(options.group), options.where),
      period_(options.period),
      warmup_steps_(options.warmup_steps) {
  check_warmup("PeriodicModelAverager", warmup_steps_);
  if (period_ < 1) {
    base::raise(ErrorKind::kUsage,
                base::cat("PeriodicModelAverager: period must be at least 1, and is ", period_));
  }
  if (period_ == 1) warn_of_every_step("PeriodicModelAverager");
}

Group PeriodicModelAverager::group_at(std::int64_t step) const {
  return step >= warmup_steps_ && (step - warmup_steps_) % period_ == 0 ? group() : nullptr;
}

HierarchicalModelAverager::HierarchicalModelAverager(HierarchicalModelAveragerOptions options)
    : ModelAverager(std::move(options.group), options.where), warmup_steps_(options.warmup_steps) {
  check_warmup("HierarchicalModelAverager", warmup_steps_);
  if (!is_group_member(group())) return;  // no levels: nothing is ever averaged
  check_levels(options.period_group_size_dict, group());
  if (options.period_group_size_dict.back().first == 1) warn_of_every_step("HierarchicalModelAverager");
  for (const auto& [period, size] : options.period_group_size_dict) {
    const bool all = size == get_world_size(group());
    levels_.emplace_back(
        period, all ? group() : new_subgroups(size, {.group = group(), .where = options.where}).mine);
  }
}

Group HierarchicalModelAverager::group_at(std::int64_t step) const {
  if (step < warmup_steps_) return nullptr;
  for (const auto& [period, group] : levels_ | std::views::reverse) {
    if (step % period == 0) return group;
  }
  return nullptr;
}

}  // namespace lockstep
