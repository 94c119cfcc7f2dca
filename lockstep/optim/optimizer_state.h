// The state of an optimizer as plain data. torch::optim in C++ keeps it in its own classes, keyed by
// parameter addresses, and only writes it to archives; this form can be inspected, sent to other ranks
// (group/objects.h), sharded and merged. Parameters are numbered in the order of the groups.
//
// Works for every optimizer that saves itself in torch::optim's layout: those of torch::optim, and those
// written with its _TORCH_OPTIM_SERIALIZE macros. Options and state may hold numbers, bools, text, tensors,
// tuples or lists of numbers, or nothing; anything else (LBFGS's history) is kUnsupported.
// Thread safety: values, no shared state; an optimizer is accessed by one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/object/object.h"
#include "lockstep/tensor/tensor_object.h"

namespace lockstep {

// A tuple of numbers, such as Adam's betas. A separate type, since archives distinguish tuples from lists.
struct NumberTuple {
  std::vector<double> values{};
  friend bool operator==(const NumberTuple&, const NumberTuple&) = default;
};
auto lockstep_fields(SelfOf<NumberTuple> auto& self) {
  return std::tie(self.values);
}

using StateValue = std::variant<std::monostate, bool, std::int64_t, double, std::string, NumberTuple,
                                std::vector<double>, at::Tensor>;
using StateValues = std::map<std::string, StateValue>;  // "exp_avg", "step"; "lr", "betas"

struct ParamGroupState {
  StateValues options{};
  std::vector<std::int64_t> params{};  // numbers of its parameters
};

struct OptimizerStateDict {
  std::map<std::int64_t, StateValues> state{};  // by number; parameters never stepped have no entry
  std::vector<ParamGroupState> param_groups{};
  StateValues extra{};  // from wrappers: an averager's "step"
};

auto lockstep_fields(SelfOf<ParamGroupState> auto& self) {
  return fields({.name = "lockstep.ParamGroupState", .version = 1, .members = "options params"}, self.options,
                self.params);
}
auto lockstep_fields(SelfOf<OptimizerStateDict> auto& self) {
  return fields({.name = "lockstep.OptimizerStateDict", .version = 1, .members = "state param_groups extra"},
                self.state, self.param_groups, self.extra);
}

// A copy: later steps do not change it. Raises kUnsupported for an optimizer that does not use the layout
// above.
OptimizerStateDict get_optimizer_state_dict(const torch::optim::Optimizer& optimizer);

// Afterwards the optimizer has exactly this state and these options; tensors are copied. Raises kUsage,
// changing nothing, when the groups differ in number or size, or a state has no parameter; kUnsupported as
// above.
void set_optimizer_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& state_dict);

// Only the check: raises kUsage when the dict does not match these groups.
void check_state_dict_fits(const torch::optim::Optimizer& optimizer, const OptimizerStateDict& state_dict);

// The same through a torch archive, in the format of torch::save and torch::load of an optimizer:
// interchangeable in both directions. Extra values are stored beside "state" and "param_groups".
void write_state_dict(torch::serialize::OutputArchive& archive, const OptimizerStateDict& state_dict);
// Raises kUsage when the archive does not contain an optimizer.
OptimizerStateDict read_state_dict(torch::serialize::InputArchive& archive);

}  // namespace lockstep
