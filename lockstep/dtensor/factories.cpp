#include "lockstep/dtensor/factories.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/internal/checks.h"
#include "lockstep/dtensor/internal/meta.h"
#include "lockstep/dtensor/internal/redistribute.h"

namespace lockstep::dtensor {
namespace {

using namespace dtensor_internal;

at::Tensor make(const char* function, at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                const c10::TensorOptions& options) {
  for (const auto size : sizes) {
    if (size < 0) base::raise(ErrorKind::kUsage, base::cat(function, ": sizes ", sizes, " are negative"));
  }
  const auto context = MeshContext::of(mesh, function, placements);
  placements =
      checked_placements(function, *context, static_cast<std::int64_t>(sizes.size()), std::move(placements));
  refuse_partial(function, placements);
  install_kernels();
  const auto* layout = context->layout(placements);
  const auto own = local_sizes(sizes.vec(), placements, context->shape(), context->coordinate());
  auto local =
      empty_piece(own, options.device(c10::Device(mesh.device_type())).requires_grad(false), *context);
  return wrap(std::move(local), sizes, context, layout);
}

// The values are set before anybody asks for a gradient.
at::Tensor finished(at::Tensor tensor, const c10::TensorOptions& options) {
  return tensor.set_requires_grad(options.requires_grad());
}

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                 c10::TensorOptions options) {
  return finished(make("dtensor::empty", sizes, mesh, std::move(placements), options), options);
}
at::Tensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                 c10::TensorOptions options) {
  return finished(make("dtensor::zeros", sizes, mesh, std::move(placements), options).zero_(), options);
}
at::Tensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                c10::TensorOptions options) {
  return finished(make("dtensor::ones", sizes, mesh, std::move(placements), options).fill_(1), options);
}
at::Tensor full(at::IntArrayRef sizes, const c10::Scalar& value, const DeviceMesh& mesh,
                Placements placements, c10::TensorOptions options) {
  return finished(make("dtensor::full", sizes, mesh, std::move(placements), options).fill_(value), options);
}
at::Tensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                c10::TensorOptions options) {
  return finished(make("dtensor::rand", sizes, mesh, std::move(placements), options).uniform_(), options);
}
at::Tensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements,
                 c10::TensorOptions options) {
  return finished(make("dtensor::randn", sizes, mesh, std::move(placements), options).normal_(), options);
}

}  // namespace lockstep::dtensor
