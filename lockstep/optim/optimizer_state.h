// The state of an optimizer as plain data. torch::optim in C++ keeps it in classes of its own, keyed by the addresses of
// parameters, and only ever writes it into archives; this is the form that can be looked at, sent to other ranks
// (group/objects.h), cut into shares and put together again. Parameters are numbered in the order of the groups.
//
// Works for every optimizer that saves itself in torch::optim's layout: those of torch::optim, and those written with
// its _TORCH_OPTIM_SERIALIZE macros. Options and state may hold numbers, bools, text, tensors, tuples or lists of
// numbers, and nothing; what holds something else (LBFGS's history) is kUnsupported.
// Thread safety: values.
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

// A tuple of numbers, such as Adam's betas. A type of its own: archives tell tuples from lists.
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
  std::map<std::int64_t, StateValues> state{};  // by number; parameters that were never stepped have none
  std::vector<ParamGroupState> param_groups{};
  StateValues extra{};  // of wrappers: "step" of an averager
};

auto lockstep_fields(SelfOf<ParamGroupState> auto& self) {
  return fields({.name = "lockstep.ParamGroupState", .version = 1, .members = "options params"}, self.options,
                self.params);
}
auto lockstep_fields(SelfOf<OptimizerStateDict> auto& self) {
  return fields({.name = "lockstep.OptimizerStateDict", .version = 1, .members = "state param_groups extra"},
                self.state, self.param_groups, self.extra);
}

// A copy: later steps do not change it. Raises kUnsupported for an optimizer that does not save itself as said above.
OptimizerStateDict get_optimizer_state_dict(const torch::optim::Optimizer& optimizer);

// Afterwards the optimizer has exactly this state and these options; tensors are copied. Raises kUsage, changing
// nothing, when the groups differ in number or size, or a state belongs to no parameter; kUnsupported as above.
void set_optimizer_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& state_dict);

// The first half of that: raises kUsage when the dict is not for these groups.
void check_state_dict_fits(const torch::optim::Optimizer& optimizer, const OptimizerStateDict& state_dict);

// The same by way of a torch archive, as torch::save and torch::load of an optimizer write and read it: what one side
// wrote, the other can read. Extra values stand beside "state" and "param_groups".
void write_state_dict(torch::serialize::OutputArchive& archive, const OptimizerStateDict& state_dict);
// Raises kUsage when the archive holds no optimizer.
OptimizerStateDict read_state_dict(torch::serialize::InputArchive& archive);

}  // namespace lockstep
