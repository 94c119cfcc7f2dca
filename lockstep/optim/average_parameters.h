// Parameters become their mean over the ranks of a group: what model averaging is made of. Gradients are not touched.
//
// The values travel flat, in chunks of the group's shared memory, two in flight, so that memory stays bounded. When
// types differ, all travel in the type that holds them all (float beside double is double, half beside bfloat16 float)
// and come back in their own. The mean is formed inside the reduction, and all ranks get the same bits.
//
// Collective: all members of the group call with as many elements of the same types; another number is an error on
// every rank. Non-members: nothing happens.
// Errors: kUsage for an undefined tensor and for types that have no mean (integers, bool), kUnsupported for tensors that
// are sparse or not on the CPU; both before anything is sent. What the group raises otherwise.
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

// All of them. Blocks until they hold the mean; their version counters move, their identity and strides stay.
void average_parameters(const std::vector<at::Tensor>& parameters, AverageParametersOptions options = {});

// Those that have a gradient, in order: what the averagers average. A parameter that took no part in the training of
// this rank is left out, so ranks must agree on which ones do.
std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& parameters);
std::vector<at::Tensor> get_params_to_average(const std::vector<torch::optim::OptimizerParamGroup>& groups);

// average_parameters(get_params_to_average(...)).
void average_parameters_or_parameter_groups(const std::vector<at::Tensor>& parameters,
                                            AverageParametersOptions options = {});
void average_parameters_or_parameter_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                            AverageParametersOptions options = {});

}  // namespace lockstep
