// DTensors made from sizes. Namespace dtensor, since the names are torch's. `placements`: one per mesh
// dimension, none: all Replicate; never Partial. Local, but for rand and randn, which draw the numbers that
// one process with the same seed draws (manual_seed, random.h) and need all ranks of the mesh to draw alike.
// Thread safety: any thread. Errors: kUsage as distribute_tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>

#include "lockstep/dtensor/placement.h"
#include "lockstep/mesh/device_mesh.h"

namespace lockstep::dtensor {

// `options`: type and requires_grad; the device is the mesh's.
at::Tensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                 c10::TensorOptions options = {});
at::Tensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                 c10::TensorOptions options = {});
at::Tensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                c10::TensorOptions options = {});
at::Tensor full(at::IntArrayRef sizes, const c10::Scalar& value, const DeviceMesh& mesh,
                Placements placements = {}, c10::TensorOptions options = {});
// Between 0 and 1; normally distributed.
at::Tensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                c10::TensorOptions options = {});
at::Tensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements = {},
                 c10::TensorOptions options = {});

}  // namespace lockstep::dtensor
