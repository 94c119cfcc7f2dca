// What DistributedDataParallel needs from the autograd graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/tensor/torch_compat.h"

namespace lockstep::internal {

// Sets reached[i] for every accumulators[i] that a backward pass from any of the outputs would reach; leaves
// the others unchanged. `entries` are further nodes that the pass may reach.
void mark_reached(std::span<const at::Tensor> outputs, std::span<const compat::NodePtr> entries,
                  std::span<const compat::NodePtr> accumulators, std::vector<unsigned char>& reached);

// Calls `reached` when a backward pass reaches any of the outputs, before the node that produced it runs.
// Makes no copy and adds no node: for pure notification.
void on_reached(std::span<const at::Tensor> outputs, const std::function<void()>& reached);

// The same tensors behind one more graph node, which calls `begins` when a backward pass reaches it, before
// anything behind it. Undefined gradients stay undefined. Tensors without a graph are returned unchanged.
// `clone`: the values are copies, so that modifying an output in place does not change what the graph has
// saved.
std::vector<at::Tensor> pass_sink(const std::vector<at::Tensor>& outputs, std::function<void()> begins,
                                  bool clone);

}  // namespace lockstep::internal
