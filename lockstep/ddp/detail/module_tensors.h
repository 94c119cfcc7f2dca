// All that DistributedDataParallel knows about a module, of any kind: its tensors. One implementation per
// kind: torch::nn::Module here, torch::jit::Module in ddp_script.cpp.
// Thread safety: as the module.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lockstep::internal {

class ModuleTensors {
 public:
  using Named = torch::OrderedDict<std::string, at::Tensor>;
  virtual ~ModuleTensors() = default;
  // In order of registration; a tensor under two names appears twice.
  virtual Named parameters() const = 0;
  // The current ones: a module may rebind buffers in its forward pass.
  virtual Named buffers() const = 0;
  // Parameters whose gradients are sparse.
  virtual std::vector<at::Tensor> sparse_parameters() const = 0;
  // Names of weights whose layer computes with a tensor other than the one registered under that name, where
  // detectable.
  virtual std::vector<std::string> assigned_weights() const { return {}; }
};

// Holds the module. Sparse parameters are the weights of Embedding and EmbeddingBag with sparse=true. Raises
// kUsage for a null pointer.
std::shared_ptr<const ModuleTensors> tensors_of(std::shared_ptr<torch::nn::Module> module);

}  // namespace lockstep::internal
