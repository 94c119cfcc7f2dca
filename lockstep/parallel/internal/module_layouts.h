// The layouts that a plan gave a module: a child of it without parameters, which lives, moves and dies with
// the module and is not saved. Thread safety: immutable once registered.
#pragma once

#include <torch/nn/module.h>

#include "lockstep/mesh/device_mesh.h"
#include "lockstep/parallel/styles.h"

namespace lockstep::internal {

class ModuleLayouts final : public torch::nn::Module {
 public:
  ModuleLayouts(DeviceMesh mesh, PrepareModuleInputOutput layouts)
      : torch::nn::Module("lockstep_layouts"), mesh_(std::move(mesh)), layouts_(std::move(layouts)) {}

  // The module's; null when it has none.
  static const ModuleLayouts* of(const torch::nn::Module& module);
  // Joins what is given with what the module has.
  static void give(torch::nn::Module& module, const DeviceMesh& mesh,
                   const PrepareModuleInputOutput& layouts);

  const DeviceMesh& mesh() const { return mesh_; }
  const PrepareModuleInputOutput& layouts() const { return layouts_; }
  bool is_serializable() const override { return false; }

 private:
  const DeviceMesh mesh_;
  PrepareModuleInputOutput layouts_;
};

}  // namespace lockstep::internal
