#include "lockstep/ddp/detail/module_tensors.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"

namespace lockstep::internal {
namespace {

// Its `weight` is not the parameter of that name. Asked of the kinds of layer whose weights people share.
template <class... Layers>
bool is_assigned(const torch::nn::Module& module) {
  const auto other_than = [&](const at::Tensor& weight) {
    const auto own = module.named_parameters(false);
    const at::Tensor* registered = own.find("weight");
    return weight.defined() && registered != nullptr && !registered->is_same(weight);
  };
  const auto one = [&](const auto* layer) { return layer != nullptr && other_than(layer->weight); };
  return (one(module.as<Layers>()) || ...);
}

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

  std::vector<std::string> assigned_weights() const override {
    namespace nn = torch::nn;
    std::vector<std::string> names;
    for (const auto& child : module_->named_modules()) {
      if (is_assigned<nn::LinearImpl, nn::EmbeddingImpl, nn::EmbeddingBagImpl, nn::Conv1dImpl, nn::Conv2dImpl,
                      nn::Conv3dImpl>(*child.value())) {
        names.push_back((child.key().empty() ? "" : child.key() + ".") + "weight");
      }
    }
    return names;
  }

 private:
  const std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace

std::shared_ptr<const ModuleTensors> tensors_of(std::shared_ptr<torch::nn::Module> module) {
  if (module == nullptr) base::raise(ErrorKind::kUsage, "DistributedDataParallel: the module is null");
  return std::make_shared<NnModuleTensors>(std::move(module));
}

}  // namespace lockstep::internal
