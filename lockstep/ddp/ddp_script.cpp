#include "lockstep/ddp/ddp_script.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace internal {

// The script's tensors as a torch::nn::Module, so that optimizers, train() and torch::save find them where
// they look. Parameters are the same tensors; buffers share memory with the script's, whose code may bind
// others at any time.
class ScriptMirror final : public torch::nn::Module {
 public:
  explicit ScriptMirror(const torch::jit::Module& script)
      : Module(script.type()->name()->name()), script_(script) {
    for (const auto& item : script_.named_parameters(false))
      register_parameter(item.name, item.value, item.value.requires_grad());
    for (const auto& item : script_.named_buffers(false)) register_buffer(item.name, item.value.detach());
    for (const auto& child : script_.named_children()) {
      parts_.push_back(std::make_shared<ScriptMirror>(child.value));
      register_module(child.name, parts_.back());
    }
  }

  void refresh() {
    for (const auto& item : named_buffers(false)) {
      const at::Tensor bound = script_.attr(item.key()).toTensor();
      if (!item.value().is_set_to(bound)) item.value().set_data(bound.detach());
    }
    for (const auto& part : parts_) part->refresh();
  }

  void train(bool on) override {
    if (script_.hasattr("training")) script_.setattr("training", on);
    Module::train(on);
  }

  void load(torch::serialize::InputArchive& archive) override {
    Module::load(archive);
    for (const auto& item : named_buffers(false)) script_.setattr(item.key(), item.value().detach());
  }

 private:
  torch::jit::Module script_;
  std::vector<std::shared_ptr<ScriptMirror>> parts_;
};

namespace {

class ScriptTensors final : public internal::ModuleTensors {
 public:
  explicit ScriptTensors(torch::jit::Module script) : script_(std::move(script)) {}

  Named parameters() const override { return named(script_.named_parameters()); }
  Named buffers() const override { return named(script_.named_buffers()); }
  std::vector<at::Tensor> sparse_parameters() const override {
    std::vector<at::Tensor> weights;
    for (const auto& part : script_.modules()) {
      if (!part.hasattr("sparse") || !part.hasattr("weight")) continue;
      const c10::IValue sparse = part.attr("sparse");
      const c10::IValue weight = part.attr("weight");
      if (sparse.isBool() && sparse.toBool() && weight.isTensor()) weights.push_back(weight.toTensor());
    }
    return weights;
  }

 private:
  template <class Slots>
  static Named named(const Slots& slots) {
    Named result;
    for (const auto& item : slots) result.insert(item.name, item.value);
    return result;
  }

  const torch::jit::Module script_;
};

std::shared_ptr<ScriptMirror> mirror_of(const torch::jit::Module& script) {
  try {
    (void)script._ivalue();
  } catch (const c10::Error&) {
    base::raise(ErrorKind::kUsage, "DistributedDataParallel: the module is empty; load or define it first");
  }
  return std::make_shared<ScriptMirror>(script);
}

}  // namespace
}  // namespace internal

using Impl = DistributedDataParallelImpl<torch::jit::Module>;

Impl::DistributedDataParallelImpl(const torch::jit::Module& module, DdpOptions options)
    : DistributedDataParallelImpl(module, internal::mirror_of(module), std::move(options)) {}

Impl::DistributedDataParallelImpl(const torch::jit::Module& module,
                                  std::shared_ptr<internal::ScriptMirror> mirror, DdpOptions options)
    : DdpCore(std::make_shared<internal::ScriptTensors>(module), mirror, std::move(options)),
      module_(module),
      mirror_(std::move(mirror)) {
  mirror_->refresh();  // mixed precision may have cast buffers
}

Impl::~DistributedDataParallelImpl() = default;

std::shared_ptr<torch::nn::Module> Impl::clone(const std::optional<torch::Device>& device) const {
  torch::NoGradGuard no_grad;  // or the copies would be computed from the originals
  const torch::jit::Module copy = module_.deepcopy(device);
  auto original = module_.parameters().begin();
  for (const at::Tensor& parameter : copy.parameters())
    parameter.set_requires_grad((*original++).requires_grad());
  return std::make_shared<DistributedDataParallelImpl>(copy, options_of_clone());
}

c10::IValue Impl::forward(std::vector<c10::IValue> inputs, torch::jit::Kwargs named) {
  const auto call = [this](std::vector<c10::IValue> values, const torch::jit::Kwargs& by_name) {
    c10::IValue output = module_.forward(std::move(values), by_name);
    mirror_->refresh();
    return output;
  };
  return internal::run_forward(*this, call, std::move(inputs), named);
}

}  // namespace lockstep
