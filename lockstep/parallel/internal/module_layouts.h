// What a plan, or distribute_module, gave a module for its inputs and outputs: a child of it without
// parameters, which lives, moves and dies with the module and is not saved. Thread safety: immutable once
// registered.
#pragma once

#include <torch/nn/module.h>

#include "lockstep/mesh/device_mesh.h"
#include "lockstep/parallel/parallelize.h"
#include "lockstep/parallel/styles.h"

namespace lockstep::internal {

struct PlaceFunctions {
  PlaceFn input{};
  PlaceFn output{};
};

class ModuleLayouts final : public torch::nn::Module {
 public:
  ModuleLayouts(DeviceMesh mesh, PrepareModuleInputOutput layouts, PlaceFunctions functions)
      : torch::nn::Module("lockstep_layouts"),
        mesh_(std::move(mesh)),
        layouts_(std::move(layouts)),
        functions_(std::move(functions)) {}

  // The module's; null when it has none.
  static const ModuleLayouts* of(const torch::nn::Module& module);
  // Joins what is given with what the module has.
  static void give(torch::nn::Module& module, const DeviceMesh& mesh, const PrepareModuleInputOutput& layouts,
                   const PlaceFunctions& functions = {});

  const DeviceMesh& mesh() const { return mesh_; }
  const PrepareModuleInputOutput& layouts() const { return layouts_; }
  // Run after the layouts have been applied.
  const PlaceFunctions& functions() const { return functions_; }
  bool is_serializable() const override { return false; }

 private:
  const DeviceMesh mesh_;
  const PrepareModuleInputOutput layouts_;
  const PlaceFunctions functions_;
};

}  // namespace lockstep::internal
