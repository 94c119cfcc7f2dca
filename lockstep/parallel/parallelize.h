// Tensor parallelism for torch::nn modules: their parameters become DTensors, and stock modules then run on
// several ranks as they are.
//
//   parallelize_module(*model, mesh["tp"], {{"layers.*.attention.[qkv]", ColwiseParallel()},
//                                           {"layers.*.attention.out", RowwiseParallel()},
//                                           {"layers.*.mlp.up", ColwiseParallel()},
//                                           {"layers.*.mlp.down", RowwiseParallel()}});
//   auto y = model->forward(x);          // plain tensors in and out; one all_reduce after `out` and one after `down`
//
// Why no hooks: C++ modules have none. What Python does in forward hooks of Linear, Embedding and LayerNorm
// is here bound to their weight (a DTensor can say how its operator treats the activations), so that no
// module is wrapped or replaced. Modules of your own that need their inputs or results changed say where,
// with prepare_inputs and prepare_outputs (prepare.h). Collective over the mesh. Thread safety: not while
// another thread uses the module. Parameters keep their identity (optimizers made before still work);
// gradients that they had are dropped.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/mesh/device_mesh.h"
#include "lockstep/parallel/styles.h"

namespace lockstep {

// Paths of submodules to styles, in order. Every token of a path may be a shell pattern: "layers.*.up". "" is
// the module itself.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

struct ParallelizeOptions {
  // As DistributeOptions: whose values the parameters get; none: every rank's own, which must be equal.
  std::optional<int> src_data_rank = 0;
};
// `mesh` has one dimension. A path without a match is a warning, and so is an empty plan. kUsage, before any
// parameter is changed, for a mesh of more dimensions, a style that does not fit its module, lists of
// different lengths.
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        ParallelizeOptions options = {});
// The style for the module itself.
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelStyle& style,
                        ParallelizeOptions options = {});

// Calls partition_fn(path, submodule, mesh) for the module and everything below it, the module first; then
// replaces parameters and buffers that are still plain by replicas. None: replicates all. Everything is
// broadcast from the mesh's first rank. input_fn and output_fn get the tensors that the module's forward hands
// to prepare_inputs and prepare_outputs (prepare.h), and return what goes on in their place.
using PartitionFn =
    std::function<void(const std::string& path, torch::nn::Module& module, const DeviceMesh& mesh)>;
using PlaceFn =
    std::function<std::vector<at::Tensor>(std::vector<at::Tensor> tensors, const DeviceMesh& mesh)>;
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh,
                       const PartitionFn& partition_fn = {}, const PlaceFn& input_fn = {},
                       const PlaceFn& output_fn = {});

// Makes a parameter or a buffer a DTensor in place: for partition functions.
void distribute_parameter(at::Tensor& parameter, const DeviceMesh& mesh, Placements placements,
                          ParallelizeOptions options = {});

}  // namespace lockstep
