// Replaces parameters by their mean over the ranks of a group: the building block of model averaging.
// Gradients are not modified.
//
// Values are reduced flat, in chunks of the group's shared memory, two in flight, so memory stays bounded.
// When types differ, all are promoted to their common type (float and double to double, half and bfloat16 to
// float) and converted back afterwards. The reduction itself computes the mean, and the result is bitwise
// equal on all ranks.
//
// Collective: all members of the group pass the same number of elements of the same types; a different number
// is an error on every rank. No-op for non-members.
// Errors: kUsage for an undefined tensor and for types that have no mean (integers, bool), kUnsupported for
// tensors that are sparse or not on the CPU; both before anything is sent. Otherwise what the group raises.
// Thread safety: as collectives of the group.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <source_location>
#include <vector>

#include "lockstep/group/process_group.h"

namespace lockstep {

struct AverageParametersOptions {
  Group group{};  // null: the default group
  std::source_location where = std::source_location::current();
};

// Averages all of them. Blocks until they hold the mean; increments their version counters, keeps their
// identity and strides.
void average_parameters(const std::vector<at::Tensor>& parameters, AverageParametersOptions options = {});

// Those that have a gradient, in order: what the averagers average. A parameter that was not used on this
// rank is omitted, so ranks must agree on which ones are used.
std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& parameters);
std::vector<at::Tensor> get_params_to_average(const std::vector<torch::optim::OptimizerParamGroup>& groups);

// average_parameters(get_params_to_average(...)).
void average_parameters_or_parameter_groups(const std::vector<at::Tensor>& parameters,
                                            AverageParametersOptions options = {});
void average_parameters_or_parameter_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                            AverageParametersOptions options = {});

}  // namespace lockstep
