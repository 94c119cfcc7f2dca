#include "lockstep/dtensor/dtensor.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/collective/collectives.h"
#include "lockstep/dtensor/detail/operand_style.h"
#include "lockstep/dtensor/internal/checks.h"
#include "lockstep/dtensor/internal/embedding.h"
#include "lockstep/dtensor/internal/meta.h"
#include "lockstep/dtensor/internal/op_call.h"
#include "lockstep/dtensor/internal/redistribute.h"

namespace lockstep {
namespace {

using namespace dtensor_internal;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const Meta& sharded(const at::Tensor& tensor, const char* function) {
  if (!tensor.defined()) base::raise(ErrorKind::kUsage, base::cat(function, ": the tensor is undefined"));
  if (!is_sharded(tensor)) {
    base::raise(ErrorKind::kUsage, base::cat(function, ": a plain tensor of sizes ", tensor.sizes(),
                                             " is not a DTensor; see distribute_tensor and from_local"));
  }
  return meta_of(tensor);
}

// Only then is a node of the graph worth making: without it the plain path has no allocation for autograd.
bool recorded(const at::Tensor& tensor) {
  return c10::GradMode::is_enabled() && tensor.requires_grad();
}

// Gradients are never asked for as partial: the placement in which a partial tensor's gradient is kept.
Placements without_partials(Placements placements) {
  std::ranges::replace_if(
      placements, [](const Placement& p) { return p.is_partial(); }, Replicate());
  return placements;
}

// A gradient under the given layout. Autograd's own zeros are plain: replicas.
at::Tensor gradient_local(const at::Tensor& gradient, const Layout& wanted) {
  if (!is_sharded(gradient)) return slice_for(gradient, wanted);
  const auto& meta = meta_of(gradient);
  return redistribute_local(meta.local(), gradient.sizes(), *meta.layout(), wanted);
}

// What a node of the graph keeps: the mesh above all, which owns the layouts.
struct Kept final : torch::CustomClassHolder {
  std::shared_ptr<const MeshContext> mesh;
  const Layout* layout = nullptr;
  Sizes sizes;
  std::optional<at::ScalarType> dtype;
};
void keep(AutogradContext* context, std::shared_ptr<const MeshContext> mesh, const Layout* layout,
          at::IntArrayRef sizes, std::optional<at::ScalarType> dtype = {}) {
  auto kept = c10::make_intrusive<Kept>();
  kept->mesh = std::move(mesh);
  kept->layout = layout;
  kept->sizes = sizes.vec();
  kept->dtype = dtype;
  context->saved_data["kept"] = c10::IValue::make_capsule(std::move(kept));
}
const Kept& kept_in(AutogradContext* context) {
  return static_cast<const Kept&>(*context->saved_data["kept"].toCapsule());
}

// Backward of each of the three nodes, as placements:
//
//   FromLocal     local -> DTensor in L         gradient: DTensor in any layout -> local in L
//   ToLocal       DTensor in L -> local         gradient: local -> DTensor in grad_placements, or in L
//   Redistribute  DTensor in L -> DTensor in M  gradient: DTensor in any layout -> DTensor in L
//
// Where L has partials, the gradient has Replicate: the derivative of a sum by each of its parts is 1, so
// every part's gradient is the whole gradient.
class FromLocal final : public torch::autograd::Function<FromLocal> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local,
                            std::shared_ptr<const MeshContext> mesh, const Layout* layout, Sizes sizes) {
    keep(context, mesh, mesh->layout(without_partials(layout->placements)), sizes);
    return wrap(local.detach(), sizes, mesh, layout);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {{}, {}, {}, {}};
    return {gradient_local(gradients[0], *kept_in(context).layout), {}, {}, {}};
  }
};

class ToLocal final : public torch::autograd::Function<ToLocal> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const Layout* gradient_layout) {
    const auto& meta = meta_of(tensor);
    keep(context, meta.mesh(), gradient_layout, tensor.sizes());
    return meta.local().detach();  // not the tensor itself, which would become part of the graph
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {{}, {}};
    const auto& kept = kept_in(context);
    // A local tensor that met a sharded one inside an ImplicitReplicationScope counted as a replica, and its
    // gradient comes sharded: of a replica it is the whole.
    const auto& gradient = gradients[0];
    auto local = is_sharded(gradient)
                     ? gradient_local(gradient, *kept.mesh->layout(Placements(kept.mesh->ndim())))
                     : gradient.detach();
    return {wrap(std::move(local), kept.sizes, kept.mesh, kept.layout), {}};
  }
};

// The conversion comes before the collectives: a narrower type also makes them cheaper.
at::Tensor move_values(const at::Tensor& tensor, const Layout& to, std::optional<at::ScalarType> dtype,
                       bool async) {
  const auto& meta = meta_of(tensor);
  auto local = meta.local();
  if (dtype && *dtype != local.scalar_type()) local = local.to(*dtype);
  Work last;
  auto moved = redistribute_local(local, tensor.sizes(), *meta.layout(), to, async ? &last : nullptr);
  if (moved.is_same(meta.local())) moved = moved.detach();
  auto result = wrap(std::move(moved), tensor.sizes(), meta.mesh(), &to, false, std::move(last));
  // What did not move keeps its strides; a small piece does not show them (internal/strides.h).
  if (meta.layout() == &to) {
    result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  }
  return result;
}

class Redistribute final : public torch::autograd::Function<Redistribute> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const Layout* to,
                            RedistributeOptions options) {
    const auto& meta = meta_of(tensor);
    keep(context, meta.mesh(), meta.mesh()->layout(without_partials(meta.layout()->placements)),
         tensor.sizes(), options.backward_dtype);
    context->saved_data["dtype"] = tensor.scalar_type();
    return move_values(tensor, *to, options.forward_dtype, options.async_op);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {{}, {}, {}};
    const auto& kept = kept_in(context);
    auto gradient = gradients[0];
    if (kept.dtype) gradient = gradient.to(*kept.dtype);
    auto local = gradient_local(gradient, *kept.layout).to(context->saved_data["dtype"].toScalarType());
    return {wrap(std::move(local), kept.sizes, kept.mesh, kept.layout), {}, {}};
  }
};

// Piece by piece along one mesh dimension, from the rank that has the values. Pieces are padded to the first
// one's size, since a scatter's parts are of one size.
at::Tensor scatter_pieces(const at::Tensor& whole, const Placement& placement, const MeshContext& mesh,
                          std::size_t m, int src) {
  const auto n = mesh.shape()[m];
  const auto index = mesh.coordinate()[m];
  const auto dim = placement.dim();
  auto sizes = whole.sizes().vec();
  // Ranks that do not send have a tensor too, whose sizes they use and whose values they ignore.
  const auto own = chunk(whole.size(dim), n, index).length;
  sizes[static_cast<std::size_t>(dim)] = chunk(whole.size(dim), n, 0).length;
  auto received = empty_piece(sizes, whole.options(), mesh);
  std::vector<at::Tensor> parts;
  for (std::int64_t r = 0; index == src && r < n; ++r) {
    const auto range = chunk(whole.size(dim), n, r);
    auto part = at::zeros(sizes, whole.options());
    part.narrow(dim, 0, range.length).copy_(whole.narrow(dim, range.offset, range.length));
    parts.push_back(std::move(part));
  }
  scatter(received, std::move(parts), {.group_src = src, .group = mesh.group(m)});
  return own == received.size(dim) ? received : copy_piece(received.narrow(dim, 0, own), mesh);
}

// Mesh dimension by mesh dimension. Invariant: after dimension m the ranks whose coordinates along all later
// dimensions are `src` have the right piece; the others have something that the next dimensions overwrite. A
// broadcast writes into its argument, so the caller's tensor is never given to it.
at::Tensor send_from(const at::Tensor& tensor, const Layout& layout, int src) {
  const auto& mesh = *layout.mesh;
  auto local = tensor;
  for (std::size_t m = 0; m < mesh.ndim(); ++m) {
    const auto& placement = layout.placements[m];
    if (placement.is_shard() && placement.interleave() == 1) {
      local = scatter_pieces(local, placement, mesh, m, src);
    } else {
      if (!local.is_contiguous() || local.is_alias_of(tensor)) local = copy_piece(local.contiguous(), mesh);
      broadcast(local, {.group_src = src, .group = mesh.group(m)});
      // An interleaved piece is many, which a scatter cannot send; views make such shards, users hardly do.
      if (placement.is_shard()) local = copy_piece(piece_for(local, mesh, m, placement), mesh);
    }
  }
  return local;
}

// This rank's piece of its own tensor, copied. Dimensions lie in memory in the order of `strides`, which those
// of a small piece do not tell.
at::Tensor own_piece(const at::Tensor& tensor, const Layout& layout, at::IntArrayRef strides) {
  const auto piece = slice_for(tensor, layout);
  const bool by_rows = std::ranges::is_sorted(strides, std::ranges::greater());
  return by_rows ? copy_piece(piece, *layout.mesh) : piece.clone();
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) {
  return is_sharded(tensor);
}
DeviceMesh device_mesh(const at::Tensor& dtensor) {
  return sharded(dtensor, "device_mesh").mesh()->mesh();
}
const Placements& placements(const at::Tensor& dtensor) {
  return sharded(dtensor, "placements").layout()->placements;
}

at::Tensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                             DistributeOptions options) {
  constexpr auto kName = "distribute_tensor";
  if (!tensor.defined()) base::raise(ErrorKind::kUsage, base::cat(kName, ": the tensor is undefined"));
  const auto context = MeshContext::of(mesh, kName, placements);
  placements = checked_placements(kName, *context, tensor.dim(), std::move(placements));
  refuse_partial(kName, placements);
  if (is_sharded(tensor)) {
    const auto& meta = meta_of(tensor);
    if (meta.mesh() == context && meta.layout()->placements == placements) return tensor;
    base::raise(ErrorKind::kUsage, base::cat(kName, ": the tensor is distributed already, ", describe(tensor),
                                             "; redistribute changes its placements"));
  }
  if (tensor.requires_grad() && !tensor.is_leaf()) {
    base::raise(ErrorKind::kUsage,
                base::cat(kName,
                          ": the tensor is a result of operators, and a DTensor made of it would be a "
                          "leaf without its history; use from_local, or detach() it"));
  }
  if (options.src_data_rank) {
    for (const auto n : context->shape()) {
      if (*options.src_data_rank < 0 || *options.src_data_rank >= n) {
        base::raise(ErrorKind::kUsage, base::cat(kName, ": src_data_rank ", *options.src_data_rank,
                                                 " on a mesh dimension of ", n, " ranks"));
      }
    }
  }
  install_kernels();
  const auto* layout = context->layout(placements);
  const c10::AutoGradMode no_grad(false);
  // What was sent is contiguous, however the tensors of the ranks lie. Otherwise the strides are those of a copy
  // in one process.
  const auto strides = at::infer_dense_strides(tensor.sizes(), tensor.strides());
  auto local = options.src_data_rank ? send_from(tensor.detach(), *layout, *options.src_data_rank)
                                     : own_piece(tensor.detach(), *layout, strides);
  auto result = wrap(std::move(local), tensor.sizes(), context, layout);
  if (!options.src_data_rank) result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), strides);
  if (cuts_rows(result) && result.is_floating_point())
    result = with_style(result, {.kind = OperandStyle::Kind::kTable});
  result.set_requires_grad(tensor.requires_grad());
  return result;
}

at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                      FromLocalOptions options) {
  constexpr auto kName = "from_local";
  if (!local.defined()) base::raise(ErrorKind::kUsage, base::cat(kName, ": the tensor is undefined"));
  if (is_sharded(local))
    base::raise(ErrorKind::kUsage, base::cat(kName, ": the tensor is a DTensor already, ", describe(local)));
  const auto context = MeshContext::of(mesh, kName, placements);
  if (options.run_check) check_locals(kName, *context, local, placements, options);
  placements = checked_placements(kName, *context, local.dim(), std::move(placements));
  auto sizes = global_sizes(kName, *context, local, placements, options);
  // Before wrap(): the first operator on the new tensor must find a kernel.
  install_kernels();
  const auto* layout = context->layout(placements);
  auto result = recorded(local) ? FromLocal::apply(local, context, layout, sizes)
                                : wrap(local.detach(), sizes, context, layout);
  // Strides of the whole, where the caller knows better than what follows from the local tensor.
  if (options.stride) result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, *options.stride);
  return result;
}

at::Tensor to_local(const at::Tensor& dtensor, ToLocalOptions options) {
  constexpr auto kName = "to_local";
  const auto& meta = sharded(dtensor, kName);
  if (!recorded(dtensor)) return meta.local().detach();
  auto gradient = without_partials(meta.layout()->placements);
  if (options.grad_placements) {
    gradient = checked_placements(kName, *meta.mesh(), dtensor.dim(), *options.grad_placements);
  }
  return ToLocal::apply(dtensor, meta.mesh()->layout(gradient));
}

at::Tensor redistribute(const at::Tensor& dtensor, Placements placements, RedistributeOptions options) {
  constexpr auto kName = "redistribute";
  const auto& meta = sharded(dtensor, kName);
  if (placements.empty()) base::raise(ErrorKind::kUsage, base::cat(kName, ": placements are required"));
  placements = checked_placements(kName, *meta.mesh(), dtensor.dim(), std::move(placements));
  for (std::size_t m = 0; m < placements.size(); ++m) {
    // Staying partial is allowed, becoming partial is not.
    if (placements[m].is_partial() && placements[m] != meta.layout()->placements[m])
      refuse_partial(kName, placements);
  }
  const auto* layout = meta.mesh()->layout(placements);
  if (recorded(dtensor)) return Redistribute::apply(dtensor, layout, options);
  return move_values(dtensor, *layout, options.forward_dtype, options.async_op);
}

at::Tensor full_tensor(const at::Tensor& dtensor) {
  const auto& meta = sharded(dtensor, "full_tensor");
  return to_local(redistribute(dtensor, Placements(meta.mesh()->ndim())));
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined tensor";
  const auto type = base::cat(tensor.scalar_type(), " ", tensor.sizes());
  if (!is_sharded(tensor)) return base::cat("tensor ", type);
  const auto& meta = meta_of(tensor);
  return base::cat("DTensor ", type, " on mesh ", meta.mesh()->describe(), ", ",
                   to_string(meta.layout()->placements), ", local ", meta.local().sizes());
}

ImplicitReplicationScope::ImplicitReplicationScope() : before_(implicit_replication()) {
  set_implicit_replication(true);
}
ImplicitReplicationScope::~ImplicitReplicationScope() {
  set_implicit_replication(before_);
}

}  // namespace lockstep
