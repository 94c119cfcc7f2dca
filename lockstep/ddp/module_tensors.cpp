#include "lockstep/ddp/module_tensors.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

class NnModuleTensors final : public ModuleTensors {
 public:
  explicit NnModuleTensors(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  Named parameters() const override { return module_->named_parameters(); }
  Named buffers() const override { return module_->named_buffers(); }
  std::vector<at::Tensor> sparse_parameters() const override {
    std::vector<at::Tensor> weights;
    for (const auto& child : module_->modules()) {
      if (const auto* one = child->as<torch::nn::EmbeddingImpl>(); one != nullptr && one->options.sparse())
        weights.push_back(one->weight);
      if (const auto* one = child->as<torch::nn::EmbeddingBagImpl>(); one != nullptr && one->options.sparse())
        weights.push_back(one->weight);
    }
    return weights;
  }

 private:
  const std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace

std::shared_ptr<const ModuleTensors> tensors_of(std::shared_ptr<torch::nn::Module> module) {
  if (module == nullptr) raise(ErrorKind::kUsage, "DistributedDataParallel: the module is null");
  return std::make_shared<NnModuleTensors>(std::move(module));
}

}  // namespace lockstep
