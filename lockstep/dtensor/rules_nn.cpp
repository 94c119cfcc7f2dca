// Layers: embeddings, norms, convolutions, pooling, attention.
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/zeros.h>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/internal/decide.h"
#include "lockstep/dtensor/internal/local_help.h"
#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal::rules {
namespace {

// weight [v, d], indices [...]. v sharded: a rank looks up the rows it has, the others are zero; the sum is
// the embedding.
void embedding_letters(const OpCall& call, Letters& letters) {
  constexpr int kV = 'v', kD = 'd';
  letters.inputs[0] = {kV, kD};
  letters.one_range = kV;
  const auto n = call.inputs()[1].sizes.size();
  for (std::size_t d = 0; d < n; ++d) {
    letters.inputs[1][d] = static_cast<int>(d);
    letters.results[0].push_back(static_cast<int>(d));
  }
  letters.results[0].push_back(kD);
  // Only the rows of the table are joined by a sum; both have a place in the result otherwise.
  letters.reduce[0] = ReduceOp::kSum;
}

void local_embedding(LocalCall& local) {
  const auto& layout = *local.decision.inputs[0];
  const bool cut = std::ranges::any_of(layout.placements, [](const Placement& p) { return p.is_shard(0); });
  if (!cut) return local.run();
  const auto weight = local.arguments()[0].toTensor();
  const auto indices = local.arguments()[1].toTensor();
  const auto offset = offset_of(layout, local.call.inputs()[0].sizes.vec(), 0);
  const auto rows = weight.size(0);
  if (rows == 0) {
    auto sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    return give(local, at::zeros(sizes, weight.options()));
  }
  const auto own = indices.sub(offset);
  const auto outside = own.lt(0).logical_or_(own.ge(rows));
  auto found = at::embedding(weight, own.masked_fill(outside, 0));
  give(local, found.masked_fill_(outside.unsqueeze(-1), 0));
}

// The gradient of the table, [v, d], from the gradients of the looked-up rows: a sum over all of them. How often
// an index occurs is known only where all of them are.
void embedding_backward_letters(const OpCall& call, Letters& letters) {
  const auto n = call.inputs()[1].sizes.size();
  for (std::size_t d = 0; d < n && !call.flag("scale_grad_by_freq"); ++d) {
    letters.inputs[0][d] = letters.inputs[1][d] = static_cast<int>(d);
  }
  letters.inputs[0][n] = 'd';
  letters.results[0] = {Letters::kNone, 'd'};
  letters.reduce[0] = ReduceOp::kSum;
}

// Each vector of the last dimensions (normalized_shape) is normalised by itself; weight and bias belong to
// those dimensions.
void layer_norm_letters(const OpCall& call, Letters& letters) {
  const auto inner = call.integers("normalized_shape").size();
  const auto whole = call.input_of("input");
  const auto ndim = call.inputs()[static_cast<std::size_t>(whole)].sizes.size();
  const auto outer = ndim - inner;
  for (std::size_t i = 0; i < call.inputs().size(); ++i) {
    if (call.inputs()[i].sizes.size() != ndim) continue;  // weight, bias
    for (std::size_t d = 0; d < outer; ++d) letters.inputs[i][d] = static_cast<int>(d);
  }
  for (auto& dims : letters.results) {
    dims.assign(ndim, Letters::kNone);
    for (std::size_t d = 0; d < outer; ++d) dims[d] = static_cast<int>(d);
  }
}
// grad_input as the input; the gradients of weight and bias are sums over all vectors.
void layer_norm_backward_letters(const OpCall& call, Letters& letters) {
  layer_norm_letters(call, letters);
  const auto inner = call.integers("normalized_shape").size();
  for (std::size_t r = 1; r < letters.results.size(); ++r) {
    letters.results[r].assign(inner, Letters::kNone);
    letters.reduce[r] = ReduceOp::kSum;
  }
}

// input [n, c, ...], weight [o, c / groups, ...], bias [o].
void convolution_letters(const OpCall& call, Letters& letters) {
  constexpr int kN = 'n', kC = 'c', kO = 'o';
  const auto input = static_cast<std::size_t>(call.input_of("input"));
  const auto weight = static_cast<std::size_t>(call.input_of("weight"));
  const auto bias = call.input_of("bias");
  const bool one_group = call.integer("groups", 1) == 1 && !call.flag("transposed");
  letters.inputs[input][0] = kN;
  letters.results[0].assign(call.inputs()[input].sizes.size(), Letters::kNone);
  letters.results[0][0] = kN;
  if (!one_group) return;
  letters.inputs[input][1] = kC;
  letters.inputs[weight][1] = kC;
  letters.inputs[weight][0] = letters.results[0][1] = kO;
  letters.reduce[0] = ReduceOp::kSum;
  if (bias >= 0) {
    letters.inputs[static_cast<std::size_t>(bias)][0] = kO;
    letters.added[static_cast<std::size_t>(bias)] = true;
  }
}
// grad_output [n, o, ...] -> gradients of input [n, c, ...], weight [o, c, ...], bias [o]. On the batch only:
// the gradients of the parameters are sums over it.
void convolution_backward_letters(const OpCall& call, Letters& letters) {
  letters.inputs[0][0] = letters.inputs[1][0] = 'n';
  letters.results[0].assign(call.inputs()[1].sizes.size(), Letters::kNone);
  letters.results[0][0] = 'n';
  letters.results[1].assign(call.inputs()[2].sizes.size(), Letters::kNone);
  letters.results[2] = {Letters::kNone};
  letters.reduce[1] = letters.reduce[2] = ReduceOp::kSum;
}

// [..., windows]: the last `windows` dimensions are looked at through a window, those before are independent.
std::function<void(const OpCall&, Letters&)> pooling(std::size_t windows) {
  return [windows](const OpCall& call, Letters& letters) {
    for (std::size_t i = 0; i < call.inputs().size(); ++i) {
      const auto ndim = call.inputs()[i].sizes.size();
      for (std::size_t d = 0; d + windows < ndim; ++d) letters.inputs[i][d] = static_cast<int>(d);
    }
    for (auto& dims : letters.results) {
      dims.assign(call.inputs()[0].sizes.size(), Letters::kNone);
      for (std::size_t d = 0; d + windows < dims.size(); ++d) dims[d] = static_cast<int>(d);
    }
  };
}

}  // namespace

std::vector<Rule> nn_rules() {
  std::vector<Rule> rules{
      {.op = "aten::embedding", .letters = embedding_letters, .local = local_embedding},
      {.op = "aten::embedding_dense_backward",
       .letters = embedding_backward_letters,
       .linear = Linear::kFirst},
      {.op = "aten::native_layer_norm", .letters = layer_norm_letters},
      {.op = "aten::native_layer_norm_backward", .letters = layer_norm_backward_letters},
      // Where the device has a kernel of it; elsewhere rms_norm is powers, a mean and products.
      {.op = "aten::_fused_rms_norm", .letters = layer_norm_letters},
      {.op = "aten::_fused_rms_norm_backward", .letters = layer_norm_backward_letters},
      {.op = "aten::convolution", .letters = convolution_letters, .needs_elements = true},
      {.op = "aten::convolution_backward", .letters = convolution_backward_letters, .needs_elements = true},
      // Heads and batches are independent: nothing is gathered.
      {.op = "aten::_scaled_dot_product_flash_attention_for_cpu",
       .letters = einsum("bh**,bh**,bh**,bh**->bh**,bh*"),
       .needs_elements = true},
      {.op = "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
       .letters = einsum("bh**,bh**,bh**,bh**,bh**,bh*,bh**->bh**,bh**,bh**"),
       .needs_elements = true},
  };
  for (const char* op : {"aten::max_pool2d_with_indices", "aten::avg_pool2d", "aten::_adaptive_avg_pool2d",
                         "aten::max_pool2d_with_indices_backward", "aten::avg_pool2d_backward",
                         "aten::_adaptive_avg_pool2d_backward", "aten::upsample_nearest2d",
                         "aten::upsample_bilinear2d", "aten::reflection_pad2d", "aten::replication_pad2d"}) {
    rules.push_back({.op = op, .letters = pooling(2), .needs_elements = true});
  }
  for (const char* op : {"aten::avg_pool1d", "aten::reflection_pad1d", "aten::replication_pad1d"}) {
    rules.push_back({.op = op, .letters = pooling(1), .needs_elements = true});
  }
  return rules;
}

}  // namespace lockstep::dtensor_internal::rules
