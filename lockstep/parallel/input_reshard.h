// Activations that autograd saves, sharded over the tensor-parallel ranks: torch's input_reshard. Between
// the layers that are split, every rank computes on the same activations and saves all of them for backward.
// With this each rank keeps its piece of them and gathers the whole again when backward needs it: memory for
// one all_gather per saved tensor.
//
//   at::Tensor y;
//   {
//     const InputReshardScope scope(*block, mesh["tp"], 1);
//     y = block->forward(x);
//   }
//   y.sum().backward();
//
// A scope and not a function on the module: C++ modules have no forward hooks, and wrapping a module would
// change its type and its parameters' names. A scope applies to what runs while it lives on this thread,
// whether that is a whole module or two lines of its forward. Only DTensors that are replicated on the mesh
// are sharded; pieces, partial sums, parameters and buffers of the module, expanded tensors, tensors without
// the dimension and tensors of fewer elements than ranks are saved as they are. Forward sends nothing.
// Backward gathers: all ranks run it in the same order, as ever with DTensors. Inside a checkpoint nothing is
// saved, so that nothing is sharded. Thread safety: belongs to the thread that opens it; scopes close in the
// reverse order, and the innermost one decides. Backward may run on any thread.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/mesh/device_mesh.h"

namespace lockstep {

namespace internal {
class SavedTensorScope;
}

struct InputReshardOptions {
  // Plain tensors are sharded, too. Nothing tells a plain replica from a plain piece (what a module with
  // use_local_output returns), and gathering pieces of different tensors gives wrong gradients without an
  // error, so say it only around code whose plain tensors are equal on all ranks. torch always assumes it.
  bool plain_tensors = false;
};

class InputReshardScope {
 public:
  // `mesh` has one dimension (kUsage). `dim` counts from the end when negative; none: the scope does nothing.
  // The module must outlive the scope, and its parameters must not be replaced meanwhile.
  InputReshardScope(const torch::nn::Module& module, const DeviceMesh& mesh, std::optional<std::int64_t> dim,
                    InputReshardOptions options = {});
  ~InputReshardScope();
  InputReshardScope(const InputReshardScope&) = delete;
  InputReshardScope& operator=(const InputReshardScope&) = delete;

 private:
  std::unique_ptr<internal::SavedTensorScope> scope_;  // null when there is no dimension
};

}  // namespace lockstep
