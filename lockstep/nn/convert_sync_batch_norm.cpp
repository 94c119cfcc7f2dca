#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/nn/sync_batch_norm.h"

namespace lockstep::internal {
namespace {

using torch::nn::Module;

bool is_batch_norm(const Module& module) {
  return module.as<torch::nn::BatchNorm1dImpl>() != nullptr ||
         module.as<torch::nn::BatchNorm2dImpl>() != nullptr ||
         module.as<torch::nn::BatchNorm3dImpl>() != nullptr;
}

bool is_container(const Module& module) {
  return module.as<torch::nn::SequentialImpl>() != nullptr ||
         module.as<torch::nn::ModuleListImpl>() != nullptr ||
         module.as<torch::nn::ModuleDictImpl>() != nullptr;
}

void collect_fixed(const Module& module, const std::string& prefix, std::string& names) {
  for (const auto& child : module.named_children()) {
    const std::string name = prefix + child.key();
    if (is_batch_norm(*child.value()) && !is_container(module)) names += (names.empty() ? "" : ", ") + name;
    collect_fixed(*child.value(), name + ".", names);
  }
}

class Converter {
 public:
  explicit Converter(SyncBatchNormOptions options) : options_(std::move(options)) {}

  void convert(Module& module) {
    if (auto* const sequential = module.as<torch::nn::SequentialImpl>()) {
      for (const auto& child : sequential->named_children()) {
        if (!is_batch_norm(*child.value())) continue;
        const auto layer = replacement(child.value());
        for (auto entry = sequential->begin(); entry != sequential->end(); ++entry) {
          if (entry->ptr() == child.value()) *entry = torch::nn::AnyModule(layer);
        }
        sequential->replace_module(child.key(), layer);
      }
    } else if (auto* const list = module.as<torch::nn::ModuleListImpl>()) {
      for (std::size_t i = 0; i < list->size(); ++i) {
        auto& entry = *(list->begin() + static_cast<std::ptrdiff_t>(i));
        if (!is_batch_norm(*entry)) continue;
        entry = replacement(entry);
        list->replace_module(std::to_string(i), entry);
      }
    } else if (auto* const dict = module.as<torch::nn::ModuleDictImpl>()) {
      for (const auto& child : dict->named_children()) {
        if (!is_batch_norm(*child.value())) continue;
        using Entry = std::pair<std::string, std::shared_ptr<Module>>;
        dict->update(std::vector<Entry>{{child.key(), replacement(child.value())}});
      }
    }
    for (const auto& child : module.children()) convert(*child);
  }

 private:
  // One that stands in several places is one afterwards, too.
  std::shared_ptr<SyncBatchNormImpl> replacement(const std::shared_ptr<Module>& plain) {
    auto& layer = made_[plain];
    if (layer) return layer;
    if (auto* const norm1d = plain->as<torch::nn::BatchNorm1dImpl>()) {
      layer = SyncBatchNormImpl::adopt(*norm1d, options_);
    } else if (auto* const norm2d = plain->as<torch::nn::BatchNorm2dImpl>()) {
      layer = SyncBatchNormImpl::adopt(*norm2d, options_);
    } else {
      layer = SyncBatchNormImpl::adopt(*plain->as<torch::nn::BatchNorm3dImpl>(), options_);
    }
    return layer;
  }

  const SyncBatchNormOptions options_;
  std::map<std::shared_ptr<Module>, std::shared_ptr<SyncBatchNormImpl>> made_;
};

}  // namespace

void convert_sync_batchnorm(Module& module, SyncBatchNormOptions options) {
  std::string fixed;
  if (is_batch_norm(module)) fixed = "the module itself";
  collect_fixed(module, "", fixed);
  if (!fixed.empty()) {
    base::raise(
        ErrorKind::kUsage,
        base::cat("convert_sync_batchnorm: these BatchNorm layers are not in a Sequential, ModuleList or "
                  "ModuleDict, so the "
                  "variable that holds each of them cannot be made to point to another layer: ",
                  fixed, ". Declare them as lockstep::SyncBatchNorm instead. Nothing was changed."));
  }
  Converter(std::move(options)).convert(module);
}

}  // namespace lockstep::internal
