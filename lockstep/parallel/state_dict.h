// Saving and loading a module with DTensor parameters. A DTensor has no memory that torch::save could write
// (it raises); these give plain tensors under the names of named_parameters() and named_buffers().
//
//   auto whole = full_state_dict(*net);                // on every rank of the meshes; then rank 0 saves it
//   load_full_state_dict(*net, whole);                 // into any plan, on any mesh, or into plain modules
//
// Local pieces are cheaper, and fit the same plan on a mesh of the same shape only. Thread safety: not while
// another thread uses the module.
#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <string>

namespace lockstep {

using StateDict = torch::OrderedDict<std::string, at::Tensor>;

// This rank's pieces; they share the module's memory. Local.
StateDict local_state_dict(const torch::nn::Module& module);
// Whole tensors, those of DTensors gathered. Collective over the meshes of the module's DTensors.
StateDict full_state_dict(const torch::nn::Module& module);

// Copies values into the module's tensors, which keep memory, placements and requires_grad. Local: every rank
// gives the dict. kUsage, before anything is changed, for a name that is missing or too many, and for other
// sizes than the module's.
void load_local_state_dict(torch::nn::Module& module, const StateDict& state);
// The same from whole tensors, equal on all ranks, of which each rank takes its piece.
void load_full_state_dict(torch::nn::Module& module, const StateDict& state);

}  // namespace lockstep
