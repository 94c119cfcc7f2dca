// An optimizer whose state is keyed by the names of its parameters instead of their numbers: names stay valid
// when a model gets another layer or is sharded differently, numbers do not. Needed for sharded checkpoints.
//
//   lockstep::NamedOptimizer opt(net->named_parameters(), torch::optim::Adam(net->parameters(), 1e-3));
//   lockstep::NamedStateDict dict = opt.state_dict();      // dict.state.at("layer1.weight").at("exp_avg")
//
// Ownership as PostLocalSGDOptimizer: it takes ownership of the optimizer and is an optimizer itself.
// Thread safety: one thread at a time.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <concepts>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/optim/optimizer_state.h"
#include "lockstep/optim/optimizer_wrapper.h"

namespace lockstep {

struct NamedParamGroupState {
  StateValues options{};
  std::vector<std::string> params{};
};
struct NamedStateDict {
  std::map<std::string, StateValues> state{};
  std::vector<NamedParamGroupState> param_groups{};
};
auto lockstep_fields(SelfOf<NamedParamGroupState> auto& self) {
  return fields({.name = "lockstep.NamedParamGroupState", .version = 1, .members = "options params"},
                self.options, self.params);
}
auto lockstep_fields(SelfOf<NamedStateDict> auto& self) {
  return fields({.name = "lockstep.NamedStateDict", .version = 1, .members = "state param_groups"},
                self.state, self.param_groups);
}

class NamedOptimizer final : public OptimizerWrapper {
 public:
  // Names of parameters the optimizer does not have are allowed. Raises kUsage when there is no optimizer, or
  // it has a parameter without a name.
  NamedOptimizer(const torch::OrderedDict<std::string, at::Tensor>& named_parameters,
                 std::unique_ptr<torch::optim::Optimizer> optim);
  template <std::derived_from<torch::optim::Optimizer> Optim>
  NamedOptimizer(const torch::OrderedDict<std::string, at::Tensor>& named_parameters, Optim&& optim)
      : NamedOptimizer(named_parameters,
                       std::unique_ptr<torch::optim::Optimizer>(std::make_unique<Optim>(std::move(optim)))) {}

  at::Tensor step(LossClosure closure = nullptr) override { return wrapped_step(std::move(closure)); }

  // Raises kUsage when a parameter without a name was added.
  NamedStateDict state_dict() const;
  // A group takes the options of the dict's group that contains all its names, and each parameter the state
  // under its name, if any. Other entries (other ranks' shards) are ignored. Raises kUsage, changing nothing,
  // when no group of the dict contains a group's names; otherwise as set_optimizer_state_dict.
  void load_state_dict(const NamedStateDict& state_dict);
  // torch::save and torch::load: keyed by number, in the wrapped optimizer's format.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::string name_of(const at::Tensor& parameter) const;
  std::map<const void*, std::string> names_;
};

}  // namespace lockstep
