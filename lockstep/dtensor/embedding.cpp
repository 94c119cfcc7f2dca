#include "lockstep/dtensor/internal/embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "lockstep/dtensor/internal/local_help.h"
#include "lockstep/dtensor/internal/meta.h"
#include "lockstep/dtensor/internal/redistribute.h"

namespace lockstep::dtensor_internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the gradient needs to know about the table.
struct LookupTable final : torch::CustomClassHolder {
  std::shared_ptr<const MeshContext> mesh;
  const Layout* layout = nullptr;
  Sizes sizes;
  LookupOptions options;
};

// The placements that gradient and indices must have, and those of the result, per mesh dimension.
struct GradientPlan {
  Placements gradient;
  Placements indices;
  Placements result;
};

GradientPlan plan_gradient(const LookupTable& table, const Layout& gradient, std::int64_t columns) {
  const auto n = table.mesh->ndim();
  GradientPlan plan{Placements(n), Placements(n), Placements(n)};
  for (std::size_t m = 0; m < n; ++m) {
    const auto& rows = table.layout->placements[m];
    const auto& now = gradient.placements[m];
    if (rows.is_shard(0)) {
      plan.result[m] = rows;  // every rank needs all gradients: any of them may be of its rows
    } else if (rows.is_shard(1) || now == Shard(columns)) {
      plan.gradient[m] = Shard(columns);
      plan.result[m] = Shard(1);
    } else if (now.is_partial() && now.op() == ReduceOp::kSum) {
      plan.gradient[m] = plan.result[m] = now;
    } else if (now.is_shard() && now.interleave() == 1 && !table.options.scale_grad_by_freq) {
      // Other lookups on other ranks. How often an index occurs is known only where all of them are.
      plan.gradient[m] = plan.indices[m] = now;
      plan.result[m] = Partial();
    }
  }
  return plan;
}

at::Tensor local_of(const at::Tensor& tensor, const MeshContext& mesh, const Placements& wanted) {
  const auto* to = mesh.layout(wanted);
  if (!is_sharded(tensor)) return slice_for(tensor, *to);  // a replica
  const auto& meta = meta_of(tensor);
  return redistribute_local(meta.local(), tensor.sizes(), *meta.layout(), *to);
}

// The gradient of this rank's rows. Lookups of other rows, and of the padding, go to one row more, which
// embedding_dense_backward is asked to leave out and which is cut off.
at::Tensor local_gradient(const LookupTable& table, const at::Tensor& gradient, const at::Tensor& indices) {
  const auto n_rows =
      local_sizes(table.sizes, table.layout->placements, table.mesh->shape(), table.mesh->coordinate())[0];
  const auto own = indices.sub(offset_of(*table.layout, table.sizes, 0));
  auto others = own.lt(0).logical_or_(own.ge(n_rows));
  if (table.options.padding_idx >= 0) others.logical_or_(indices.eq(table.options.padding_idx));
  return at::embedding_dense_backward(gradient.contiguous(), own.masked_fill(others, n_rows), n_rows + 1,
                                      n_rows, table.options.scale_grad_by_freq)
      .narrow(0, 0, n_rows);
}

at::Tensor table_gradient(const LookupTable& table, const at::Tensor& gradient, const at::Tensor& indices) {
  const auto& mesh = *table.mesh;
  const auto* whole = mesh.layout(Placements(mesh.ndim()));
  const auto plan =
      plan_gradient(table, is_sharded(gradient) ? *meta_of(gradient).layout() : *whole, gradient.dim() - 1);
  const c10::AutoGradMode no_grad(false);
  auto local =
      local_gradient(table, local_of(gradient, mesh, plan.gradient), local_of(indices, mesh, plan.indices));
  return wrap(std::move(local), table.sizes, table.mesh, mesh.layout(plan.result));
}

class EmbedRows final : public torch::autograd::Function<EmbedRows> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& indices,
                            LookupOptions options) {
    auto table = c10::make_intrusive<LookupTable>();
    table->mesh = meta_of(weight).mesh();
    table->layout = meta_of(weight).layout();
    table->sizes = weight.sizes().vec();
    table->options = options;
    context->saved_data["table"] = c10::IValue::make_capsule(std::move(table));
    context->save_for_backward({indices});
    return at::embedding(weight, indices, options.padding_idx, options.scale_grad_by_freq);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto& gradient = gradients[0];
    if (!gradient.defined()) return {{}, {}, {}};
    const auto& table = static_cast<const LookupTable&>(*context->saved_data["table"].toCapsule());
    const auto indices = context->get_saved_variables()[0];
    // libtorch's own can be differentiated once more.
    if (c10::GradMode::is_enabled() && gradient.requires_grad()) {
      return {at::embedding_dense_backward(gradient, indices, table.sizes[0], table.options.padding_idx,
                                           table.options.scale_grad_by_freq),
              {},
              {}};
    }
    return {table_gradient(table, gradient, indices), {}, {}};
  }
};

}  // namespace

bool cuts_rows(const at::Tensor& table) {
  if (!is_sharded(table) || table.dim() != 2) return false;
  const auto& placements = meta_of(table).layout()->placements;
  const auto plain_cut = [](const Placement& p) { return !p.is_shard() || p.interleave() == 1; };
  return shards(*meta_of(table).layout(), 0) && std::ranges::all_of(placements, plain_cut) &&
         std::ranges::none_of(placements, &Placement::is_partial);
}

at::Tensor embed_rows(const at::Tensor& table, const at::Tensor& indices, LookupOptions options) {
  return EmbedRows::apply(table, indices, options);
}

}  // namespace lockstep::dtensor_internal
