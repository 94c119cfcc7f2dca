#include "lockstep/optim/named_optimizer.h"

#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

bool has_all(const NamedParamGroupState& group, const std::vector<std::string>& names) {
  return std::all_of(names.begin(), names.end(), [&](const std::string& name) {
    return std::find(group.params.begin(), group.params.end(), name) != group.params.end();
  });
}

const NamedParamGroupState& group_with(const NamedStateDict& dict, const std::vector<std::string>& names) {
  for (const auto& group : dict.param_groups) {
    if (has_all(group, names)) return group;
  }
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "" : ", ") + name;
  base::raise(ErrorKind::kUsage,
              base::cat("NamedOptimizer: no group of the state dict has all of these parameters: ", list));
}

}  // namespace

NamedOptimizer::NamedOptimizer(const torch::OrderedDict<std::string, at::Tensor>& named_parameters,
                               std::unique_ptr<torch::optim::Optimizer> optim)
    : OptimizerWrapper("NamedOptimizer", std::move(optim)) {
  // Of a parameter with two names (tied weights) the first counts.
  for (const auto& item : named_parameters) names_.emplace(item.value().unsafeGetTensorImpl(), item.key());
  for (const auto& group : param_groups_) {
    for (const auto& parameter : group.params()) name_of(parameter);
  }
}

std::string NamedOptimizer::name_of(const at::Tensor& parameter) const {
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  if (found == names_.end()) {
    base::raise(ErrorKind::kUsage,
                base::cat("NamedOptimizer: a parameter of sizes ", parameter.sizes(), " has no name"));
  }
  return found->second;
}

NamedStateDict NamedOptimizer::state_dict() const {
  OptimizerStateDict numbered = wrapped_state_dict();
  NamedStateDict named;
  for (std::size_t g = 0; g < numbered.param_groups.size(); ++g) {
    auto& group = named.param_groups.emplace_back();
    group.options = std::move(numbered.param_groups[g].options);
    for (std::size_t i = 0; i < param_groups_[g].params().size(); ++i) {
      group.params.push_back(name_of(param_groups_[g].params()[i]));
      const auto state = numbered.state.find(numbered.param_groups[g].params[i]);
      if (state != numbered.state.end()) named.state.emplace(group.params.back(), std::move(state->second));
    }
  }
  return named;
}

void NamedOptimizer::load_state_dict(const NamedStateDict& dict) {
  OptimizerStateDict numbered;
  std::int64_t number = 0;
  for (const auto& own : param_groups_) {
    std::vector<std::string> names;
    for (const auto& parameter : own.params()) names.push_back(name_of(parameter));
    auto& group = numbered.param_groups.emplace_back();
    group.options = group_with(dict, names).options;
    for (const auto& name : names) {
      if (const auto state = dict.state.find(name); state != dict.state.end())
        numbered.state.emplace(number, state->second);
      group.params.push_back(number++);
    }
  }
  load_wrapped_state_dict(numbered);
}

void NamedOptimizer::save(torch::serialize::OutputArchive& archive) const {
  write_state_dict(archive, wrapped_state_dict());
}

void NamedOptimizer::load(torch::serialize::InputArchive& archive) {
  load_wrapped_state_dict(read_state_dict(archive));
}

}  // namespace lockstep
