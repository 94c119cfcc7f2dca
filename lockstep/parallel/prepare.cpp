#include "lockstep/parallel/prepare.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/detail/operand_style.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/parallel/internal/module_layouts.h"

namespace lockstep {
namespace internal {
namespace {

constexpr auto kChild = "lockstep_layouts";

}  // namespace

const ModuleLayouts* ModuleLayouts::of(const torch::nn::Module& module) {
  const auto children = module.named_children();
  const auto* found = children.find(kChild);
  return found ? dynamic_cast<const ModuleLayouts*>(found->get()) : nullptr;
}

void ModuleLayouts::give(torch::nn::Module& module, const DeviceMesh& mesh,
                         const PrepareModuleInputOutput& layouts, const PlaceFunctions& functions) {
  auto joined = layouts;
  auto calls = functions;
  if (const auto* before = of(module)) {
    if (joined.input.input_layouts.empty()) joined.input = before->layouts().input;
    if (joined.output.output_layouts.empty()) joined.output = before->layouts().output;
    if (!calls.input) calls.input = before->functions().input;
    if (!calls.output) calls.output = before->functions().output;
    module.unregister_module(kChild);
  }
  module.register_module(kChild, std::make_shared<ModuleLayouts>(mesh, std::move(joined), std::move(calls)));
}

namespace {

using Layouts = std::vector<std::optional<Placement>>;

std::vector<at::Tensor> placed(const char* what, std::vector<at::Tensor> tensors, const DeviceMesh& mesh,
                               const Layouts& now, const Layouts& wanted, bool use_local) {
  if (now.empty()) return tensors;
  if (tensors.size() != now.size()) {
    base::raise(ErrorKind::kUsage, base::cat(what, ": the plan has layouts for ", now.size(),
                                             " tensors, the module has ", tensors.size()));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!now[i] || !wanted[i] || !tensors[i].defined()) continue;
    auto x =
        prepare_operand(tensors[i], mesh, {.input = {*now[i]}, .desired_input = {*wanted[i]}, .output = {}});
    tensors[i] = use_local ? to_local(x) : x;
  }
  return tensors;
}

}  // namespace
}  // namespace internal

std::vector<at::Tensor> prepare_inputs(const torch::nn::Module& module, std::vector<at::Tensor> inputs) {
  const auto* own = internal::ModuleLayouts::of(module);
  if (!own) return inputs;
  const auto& plan = own->layouts().input;
  inputs = internal::placed("prepare_inputs", std::move(inputs), own->mesh(), plan.input_layouts,
                            plan.desired_input_layouts, plan.use_local_output);
  const auto& call = own->functions().input;
  return call ? call(std::move(inputs), own->mesh()) : inputs;
}

std::vector<at::Tensor> prepare_outputs(const torch::nn::Module& module, std::vector<at::Tensor> outputs) {
  const auto* own = internal::ModuleLayouts::of(module);
  if (!own) return outputs;
  const auto& plan = own->layouts().output;
  outputs = internal::placed("prepare_outputs", std::move(outputs), own->mesh(), plan.output_layouts,
                             plan.desired_output_layouts, plan.use_local_output);
  const auto& call = own->functions().output;
  return call ? call(std::move(outputs), own->mesh()) : outputs;
}

}  // namespace lockstep
