// What DistributedDataParallel needs from a module: its tensors in an order common to all ranks, and the
// check that it is. Thread safety: as the module.
#pragma once

#include <ATen/core/Tensor.h>

#include <source_location>
#include <string>
#include <vector>

#include "lockstep/ddp/detail/module_tensors.h"
#include "lockstep/group/process_group.h"

namespace lockstep::internal {

struct NamedTensors {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
};

// "parameter 3 (net.weight)", for messages.
std::string describe_parameter(const NamedTensors& parameters, std::size_t index);

// In order of registration, modules first to last; a tensor registered twice (tied weights) appears once,
// under its first name. Names in `ignored` are skipped.
NamedTensors parameters_of(const ModuleTensors& module, const std::vector<std::string>& ignored);
NamedTensors buffers_of(const ModuleTensors& module, const std::vector<std::string>& ignored);
// Those of `parameters` that require a gradient.
NamedTensors trainable(const NamedTensors& parameters);
// By parameter: its gradients are sparse.
std::vector<bool> sparse_gradients(const ModuleTensors& module, const NamedTensors& parameters);

// Raises kUsage for a name in `ignored` that is neither a parameter nor a buffer: a typo there would silently
// change what is averaged.
void check_ignored(const ModuleTensors& module, const std::vector<std::string>& ignored);

// Collective. Compares number, names, types, sizes and strides on all ranks; one small operation when they
// agree. Raises kUsage on every rank when they do not, naming both counts, or the first parameter that
// differs from rank 0's.
void verify_same_on_all_ranks(const NamedTensors& parameters, const Group& group, std::source_location where);

}  // namespace lockstep::internal
