// What DistributedDataParallel needs of the autograd graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/tensor/torch_compat.h"

namespace lockstep::internal {

// Sets reached[i] for every accumulators[i] that a backward pass from any of the outputs would come to; leaves the others
// as they are. `entries` are further nodes that the pass may come to.
void mark_reached(std::span<const at::Tensor> outputs, std::span<const compat::NodePtr> entries,
                  std::span<const compat::NodePtr> accumulators, std::vector<unsigned char>& reached);

// Calls `reached` when a backward pass comes to any of the outputs, before the node that made it computes anything. No copy
// and no further node: for those who only want to know.
void on_reached(std::span<const at::Tensor> outputs, const std::function<void()>& reached);

// The same tensors behind one more node of the graph, which calls `begins` when a backward pass comes to it, before
// anything behind it. Gradients that are undefined stay so. Tensors that have no graph come back as they are. `clone`:
// the values are copies, so that changing an output in place does not change what the graph has kept.
std::vector<at::Tensor> pass_sink(const std::vector<at::Tensor>& outputs, std::function<void()> begins,
                                  bool clone);

}  // namespace lockstep::internal
