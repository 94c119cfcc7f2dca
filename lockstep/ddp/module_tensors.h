// All that DistributedDataParallel knows of a module, whatever kind it is: the tensors it holds. One implementation per kind:
// torch::nn::Module here, torch::jit::Module in ddp_script.cpp.
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

namespace lockstep {

class ModuleTensors {
 public:
  using Named = torch::OrderedDict<std::string, at::Tensor>;
  virtual ~ModuleTensors() = default;
  // In order of registration; a tensor under two names appears twice.
  virtual Named parameters() const = 0;
  // As they are now: a module may bind others in its forward pass.
  virtual Named buffers() const = 0;
  // Parameters whose gradients are sparse.
  virtual std::vector<at::Tensor> sparse_parameters() const = 0;
  // Names of weights whose layer computes with another tensor than the one registered under the name, where that can be seen.
  virtual std::vector<std::string> assigned_weights() const { return {}; }
};

// Keeps the module. Sparse are the weights of Embedding and EmbeddingBag with sparse=true. Raises kUsage for a null pointer.
std::shared_ptr<const ModuleTensors> tensors_of(std::shared_ptr<torch::nn::Module> module);

}  // namespace lockstep
