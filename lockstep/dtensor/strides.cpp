#include "lockstep/dtensor/internal/strides.h"

#include <algorithm>
#include <numeric>

namespace lockstep::dtensor_internal {
namespace {

// Dense, the dimension with the largest key outermost, equal ones in their order. Key 0: stride 0.
Sizes dense(at::IntArrayRef sizes, const Sizes& keys) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return keys[a] > keys[b]; });
  Sizes strides(sizes.size(), 0);
  std::int64_t next = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const auto d = order[i];
    if (keys[d] == 0) continue;
    strides[d] = next;
    next *= std::max<std::int64_t>(sizes[d], 1);
  }
  return strides;
}

// The input whose order of dimensions an elementwise result has: the first of its sizes, unless some of it
// was expanded.
const Input* model_of_result(const OpCall& call, at::IntArrayRef sizes) {
  for (const auto& input : call.inputs()) {
    if (input.sizes != sizes) continue;
    const auto strides = input.tensor->strides();
    return std::ranges::find(strides, 0) == strides.end() ? &input : nullptr;
  }
  return nullptr;
}

// A dimension of a view has the place of the one it comes from; one that comes from none is innermost, or is
// expanded.
Sizes of_view(const OpCall& call, const Decision& decision, std::size_t r, at::IntArrayRef sizes) {
  const auto& input = call.inputs()[0];
  const auto from = input.tensor->strides();
  if (input.sizes == sizes) return from.vec();
  const bool expands = call.op().name == "aten::expand";
  const auto& sources = decision.sources[r];
  Sizes keys(sizes.size(), 1);
  for (std::size_t d = 0; d < sizes.size() && d < sources.size(); ++d) {
    if (sources[d].input == 0) {
      keys[d] = from[static_cast<std::size_t>(sources[d].dim)];
    } else if (expands) {
      keys[d] = sizes[d] == 1 ? 1 : 0;
    } else if (sizes.size() == from.size()) {
      keys[d] = from[d];
    }
  }
  return dense(sizes, keys);
}

}  // namespace

bool cuts_unequally(const Layout& layout, at::IntArrayRef sizes) {
  auto left = sizes.vec();
  for (std::size_t m = 0; m < layout.placements.size(); ++m) {
    const auto& placement = layout.placements[m];
    if (!placement.is_shard()) continue;
    auto& size = left[static_cast<std::size_t>(placement.dim())];
    const auto n = layout.mesh->shape()[m];
    if (!divides_evenly(size / placement.interleave(), n)) return true;
    size /= n;
  }
  return false;
}

bool cuts_to_one(const Layout& layout, at::IntArrayRef sizes) {
  const auto& mesh = *layout.mesh;
  const auto piece = local_sizes(sizes.vec(), layout.placements, mesh.shape(), mesh.coordinate());
  for (std::size_t d = 0; d < piece.size(); ++d) {
    if (piece[d] <= 1 && sizes[d] > 1) return true;
  }
  return false;
}

bool lies_as_input(const OpCall& call, const Decision& decision) {
  return decision.elementwise || (call.op().is_view && call.op().rule && call.op().rule->letters);
}

Sizes agreed_strides(const OpCall& call, const Decision& decision, std::size_t r, at::IntArrayRef sizes) {
  const Sizes contiguous(sizes.size(), 1);
  if (call.op().is_view && call.op().rule && call.op().rule->letters) {
    return of_view(call, decision, r, sizes);
  }
  if (r == 0 && decision.result_strides.size() == sizes.size()) return decision.result_strides;
  const auto* model = model_of_result(call, sizes);
  if (!model || !decision.elementwise) return dense(sizes, contiguous);
  const auto strides = model->tensor->strides();
  return dense(sizes, strides.vec());
}

}  // namespace lockstep::dtensor_internal
