// Views: the same elements under other sizes.
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/reshape.h>
#include <ATen/ops/squeeze.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/internal/decide.h"
#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal::rules {
namespace {

std::size_t wrapped(std::int64_t dim, std::int64_t ndim) {
  return static_cast<std::size_t>(dim < 0 ? dim + ndim : dim);
}

// Numbers the input's dimensions; the helpers below say where they go.
std::vector<int> numbered(Letters& letters) {
  auto& dims = letters.inputs[0];
  for (std::size_t d = 0; d < dims.size(); ++d) dims[d] = static_cast<int>(d);
  return dims;
}

void transposing(const OpCall& call, Letters& letters) {
  auto dims = numbered(letters);
  const auto ndim = call.inputs()[0].ndim();
  if (ndim > 0)
    std::swap(dims[wrapped(call.integer("dim0"), ndim)], dims[wrapped(call.integer("dim1"), ndim)]);
  letters.results[0] = dims;
}
void t(const OpCall&, Letters& letters) {
  auto dims = numbered(letters);
  std::ranges::reverse(dims);
  letters.results[0] = dims;
}
void permuting(const OpCall& call, Letters& letters) {
  const auto dims = numbered(letters);
  for (const auto dim : call.integers("dims"))
    letters.results[0].push_back(dims[wrapped(dim, call.inputs()[0].ndim())]);
}
void unsqueezing(const OpCall& call, Letters& letters) {
  auto dims = numbered(letters);
  const auto at = wrapped(call.integer("dim"), call.inputs()[0].ndim() + 1);
  dims.insert(dims.begin() + static_cast<std::ptrdiff_t>(at), Letters::kNone);
  letters.results[0] = dims;
}
// Dimensions of size 1 go; of the named ones only when there is an argument "dim".
void squeezing(const OpCall& call, Letters& letters) {
  const auto dims = numbered(letters);
  const auto& input = call.inputs()[0];
  const auto named = call.dims("dim", input.ndim());
  for (std::size_t d = 0; d < dims.size(); ++d) {
    if (input.sizes[d] == 1 && named[d]) {
      letters.inputs[0][d] = Letters::kNone;
    } else {
      letters.results[0].push_back(dims[d]);
    }
  }
}
// A piece may have a dimension of size 1 where the whole has more.
void local_squeeze(LocalCall& local) {
  const auto& sizes = local.call.inputs()[0].sizes;
  const auto named = local.call.dims("dim", local.call.inputs()[0].ndim());
  Sizes dims;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1 && named[d]) dims.push_back(static_cast<std::int64_t>(d));
  }
  auto result = at::squeeze(local.arguments()[0].toTensor(), dims);
  torch::jit::drop(local.stack, local.call.op().arguments.size());
  local.stack.emplace_back(std::move(result));
}
// One dimension is taken apart and must be whole; in the results it is gone (select, unbind) or another one.
void taking_apart(const OpCall& call, Letters& letters, bool gone) {
  const auto dims = numbered(letters);
  const auto at = wrapped(call.integer("dim"), call.inputs()[0].ndim());
  letters.inputs[0][at] = Letters::kNone;
  auto result = letters.inputs[0];
  if (gone) result.erase(result.begin() + static_cast<std::ptrdiff_t>(at));
  letters.results[0] = result;
}
void selecting(const OpCall& call, Letters& letters) {
  taking_apart(call, letters, true);
}
void splitting(const OpCall& call, Letters& letters) {
  taking_apart(call, letters, false);
}
// A slice of everything is no slice.
void slicing(const OpCall& call, Letters& letters) {
  splitting(call, letters);
  const auto at = wrapped(call.integer("dim"), call.inputs()[0].ndim());
  const auto size = call.inputs()[0].sizes[at];
  if (call.integer("start", 0) == 0 && call.integer("end", size) >= size && call.integer("step", 1) == 1) {
    letters.inputs[0][at] = letters.results[0][at] = static_cast<int>(at);
  }
}
void expanding(const OpCall& call, Letters& letters) {
  const auto dims = numbered(letters);
  const auto asked = call.integers("size");
  const auto& sizes = call.inputs()[0].sizes;
  const auto lead = asked.size() - sizes.size();
  letters.results[0].assign(lead, Letters::kNone);
  for (std::size_t d = 0; d < dims.size(); ++d) {
    const bool stays = asked[lead + d] < 0 || asked[lead + d] == sizes[d];
    if (!stays) letters.inputs[0][d] = Letters::kNone;
    letters.results[0].push_back(stays ? dims[d] : Letters::kNone);
  }
}

// How many blocks of contiguous elements come before dimension `dim`: the product of the sizes in front of
// it.
std::int64_t blocks_before(const Sizes& sizes, std::size_t dim) {
  std::int64_t blocks = 1;
  for (std::size_t d = 0; d < dim; ++d) blocks *= sizes[d];
  return blocks;
}

// The same cut under the sizes of the result. With `blocks` blocks before the cut, the result's dimension p
// must begin at or before it (a divides blocks) and be cut evenly after it.
std::optional<Placement> same_cut(const Sizes& to, std::int64_t blocks, std::int64_t n) {
  for (std::size_t p = 0; p < to.size(); ++p) {
    const auto before = blocks_before(to, p);
    if (before == 0 || blocks % before != 0) continue;
    // A cut inside dimension p, which then consists of that many blocks.
    const auto interleave = blocks / before;
    if (interleave > to[p] || to[p] % interleave != 0) continue;
    const auto rest = to[p] / interleave;
    if (rest > 1 && divides_evenly(rest, n)) return Shard(static_cast<std::int64_t>(p), interleave);
  }
  return std::nullopt;
}

void viewing(const OpCall& call, const MeshAxis& axis, std::vector<Alternative>& alternatives) {
  const auto& from = axis.sizes[0];
  const auto& to = axis.result_sizes;
  const auto& uneven = axis.uneven[0];
  const auto& now = call.inputs()[0].layout->placements[axis.dim];
  if (blocks_before(from, from.size()) == 0) return;  // no elements: nothing to keep in place
  for (std::size_t d = 0; d < from.size(); ++d) {
    // Elements are numbered in row-major order. A cut of dimension d into n parts reads them as
    // blocks_before(d) blocks and takes the i-th part of each; two cuts are the same when they have the same
    // number of blocks and divide the rest equally.
    // A dimension that stays as it is, with the same elements before it, may be cut in any way.
    std::size_t p = 0;
    while (p < to.size() && !(to[p] == from[d] && blocks_before(to, p) == blocks_before(from, d))) ++p;
    const auto interleave = now.is_shard(static_cast<std::int64_t>(d)) ? now.interleave() : 1;
    if (p < to.size() && from[d] > 1) {
      alternatives.push_back({{Shard(static_cast<std::int64_t>(d), interleave)},
                              {Shard(static_cast<std::int64_t>(p), interleave)}});
      continue;
    }
    // Otherwise the pieces must be equal, on this mesh dimension and on those before it.
    if (std::ranges::find(uneven, true) != uneven.end()) continue;
    const auto rest = from[d] / interleave;
    if (rest <= 1 || !divides_evenly(rest, axis.n)) continue;
    if (const auto cut = same_cut(to, blocks_before(from, d) * interleave, axis.n)) {
      alternatives.push_back({{Shard(static_cast<std::int64_t>(d), interleave)}, {*cut}});
    }
  }
}

// A sharded tensor's strides are dense even where its pieces are parts of larger ones (a slice), so libtorch
// may ask for a view that the piece cannot give; then it is copied.
void local_view(LocalCall& local) {
  const auto input = local.arguments()[0].toTensor();
  auto result =
      at::reshape(input, local.decision.result_sizes.empty() ? Sizes{} : local.decision.local_result_sizes);
  local.lost_base = !result.is_alias_of(input);
  torch::jit::drop(local.stack, local.call.op().arguments.size());
  local.stack.emplace_back(std::move(result));
}

// Strides are given for the whole: the piece has its dimensions in the same order.
void local_empty_strided(LocalCall& local) {
  const auto strides = local.call.integers("stride");
  const auto& sizes = local.decision.local_result_sizes;
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  Sizes own(sizes.size());
  std::int64_t next = 1;
  for (const auto d : order) {
    own[d] = next;
    next *= std::max<std::int64_t>(sizes[d], 1);
  }
  const auto like = local.arguments()[0].toTensor();
  auto options = like.options();
  const auto dtype = local.call.op().argument("dtype");
  if (!local.call.value(dtype).isNone()) options = options.dtype(local.call.value(dtype).toScalarType());
  torch::jit::drop(local.stack, local.call.op().arguments.size());
  local.stack.emplace_back(at::empty_strided(sizes, own, options));
}

// new_zeros and the like: cut as the tensor they are made after where the sizes are the same.
void like_self(const OpCall& call, Letters& letters) {
  const auto asked = call.integers("size");
  letters.results[0].assign(asked.size(), Letters::kNone);
  if (call.inputs()[0].sizes != at::IntArrayRef(asked)) return;
  letters.results[0] = numbered(letters);
}

// The gradient of a view that took something out: put back into zeros of the old sizes.
void putting_back(const OpCall& call, Letters& letters, bool gone) {
  const auto sizes = call.integers("input_sizes");
  const auto at = wrapped(call.integer("dim"), static_cast<std::int64_t>(sizes.size()));
  std::size_t own = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (d == at) {
      letters.results[0].push_back(Letters::kNone);
      if (!gone) ++own;
      continue;
    }
    letters.results[0].push_back(static_cast<int>(d));
    letters.inputs[0][own++] = static_cast<int>(d);
  }
}
void putting_back_slice(const OpCall& call, Letters& letters) {
  putting_back(call, letters, false);
}
void putting_back_selected(const OpCall& call, Letters& letters) {
  putting_back(call, letters, true);
}

// diagonal: two dimensions go, their diagonal comes last; and its gradient.
std::vector<std::size_t> diagonal_rest(const OpCall& call, std::int64_t ndim) {
  std::vector<std::size_t> rest;
  for (std::size_t d = 0; d < static_cast<std::size_t>(ndim); ++d) {
    if (d != wrapped(call.integer("dim1"), ndim) && d != wrapped(call.integer("dim2"), ndim))
      rest.push_back(d);
  }
  return rest;
}
void diagonal(const OpCall& call, Letters& letters) {
  for (const auto d : diagonal_rest(call, call.inputs()[0].ndim())) {
    letters.inputs[0][d] = static_cast<int>(d);
    letters.results[0].push_back(static_cast<int>(d));
  }
  letters.results[0].push_back(Letters::kNone);
}
void putting_back_diagonal(const OpCall& call, Letters& letters) {
  const auto ndim = call.integers("input_sizes").size();
  letters.results[0].assign(ndim, Letters::kNone);
  std::size_t own = 0;
  for (const auto d : diagonal_rest(call, static_cast<std::int64_t>(ndim))) {
    letters.inputs[0][own++] = letters.results[0][d] = static_cast<int>(d);
  }
}

// unfold: windows over a dimension, which is needed whole; the window comes last; and its gradient.
void unfolding(const OpCall& call, Letters& letters) {
  numbered(letters);
  letters.inputs[0][wrapped(call.integer("dimension"), call.inputs()[0].ndim())] = Letters::kNone;
  letters.results[0] = letters.inputs[0];
  letters.results[0].push_back(Letters::kNone);
}
void folding_back(const OpCall& call, Letters& letters) {
  const auto ndim = call.integers("input_sizes").size();
  const auto at = wrapped(call.integer("dim"), static_cast<std::int64_t>(ndim));
  for (std::size_t d = 0; d < ndim; ++d) {
    letters.results[0].push_back(d == at ? Letters::kNone : static_cast<int>(d));
    letters.inputs[0][d] = letters.results[0][d];
  }
}

// Complex numbers as pairs in a last dimension, and back.
void as_pairs(const OpCall&, Letters& letters) {
  letters.results[0] = numbered(letters);
  letters.results[0].push_back(Letters::kNone);
}
void from_pairs(const OpCall&, Letters& letters) {
  numbered(letters);
  letters.inputs[0].back() = Letters::kNone;
  letters.results[0].assign(letters.inputs[0].begin(), letters.inputs[0].end() - 1);
}
// Another type of the same bytes; the last dimension becomes shorter or longer.
void retyping(const OpCall&, Letters& letters) {
  numbered(letters);
  if (!letters.inputs[0].empty()) letters.inputs[0].back() = Letters::kNone;
  letters.results[0] = letters.inputs[0];
}

// Strides say where elements are in memory, which only a whole in its own order can answer.
[[noreturn]] void refuse_strides(const OpCall& call) {
  base::raise(ErrorKind::kUsage,
              base::cat(call.describe(),
                        ": strides describe memory, and a sharded tensor has none of its own. Say it with "
                        "view, transpose, slice or expand, or work on to_local()"));
}
void striding(const OpCall& call, const MeshAxis&, std::vector<Alternative>&) {
  if (!call.inputs()[0].layout->all_replicate) refuse_strides(call);
}
void local_as_strided(LocalCall& local) {
  const auto& input = local.call.inputs()[0];
  if (input.local.strides() != input.tensor->strides()) refuse_strides(local.call);
  local.run();
}

}  // namespace

std::vector<Rule> view_rules() {
  std::vector<Rule> rules{
      {.op = "aten::diagonal", .letters = diagonal, .linear = Linear::kMove},
      {.op = "aten::diagonal_backward",
       .letters = putting_back_diagonal,
       .linear = Linear::kTogether,
       .sizes_argument = "input_sizes"},
      {.op = "aten::unfold", .letters = unfolding, .linear = Linear::kMove},
      {.op = "aten::unfold_backward",
       .letters = folding_back,
       .linear = Linear::kTogether,
       .sizes_argument = "input_sizes"},
      {.op = "aten::view_as_real", .letters = as_pairs, .linear = Linear::kTogether},
      {.op = "aten::view_as_complex", .letters = from_pairs, .linear = Linear::kTogether},
      {.op = "aten::view.dtype", .letters = retyping},
      {.op = "aten::as_strided", .alternatives = striding, .local = local_as_strided},
      {.op = "aten::transpose.int", .letters = transposing, .linear = Linear::kMove},
      {.op = "aten::t", .letters = t, .linear = Linear::kMove},
      {.op = "aten::permute", .letters = permuting, .linear = Linear::kMove},
      {.op = "aten::unsqueeze", .letters = unsqueezing, .linear = Linear::kMove},
      {.op = "aten::squeeze", .letters = squeezing, .linear = Linear::kMove, .local = local_squeeze},
      {.op = "aten::squeeze.dim", .letters = squeezing, .linear = Linear::kMove, .local = local_squeeze},
      {.op = "aten::squeeze.dims", .letters = squeezing, .linear = Linear::kMove, .local = local_squeeze},
      {.op = "aten::select.int", .letters = selecting, .linear = Linear::kMove},
      {.op = "aten::unbind.int", .letters = selecting, .linear = Linear::kMove},
      {.op = "aten::slice.Tensor", .letters = slicing, .linear = Linear::kMove},
      {.op = "aten::split.Tensor", .letters = splitting, .linear = Linear::kMove},
      {.op = "aten::split_with_sizes", .letters = splitting, .linear = Linear::kMove},
      {.op = "aten::expand", .letters = expanding, .linear = Linear::kMove, .sizes_argument = "size"},
      {.op = "aten::slice_backward",
       .letters = putting_back_slice,
       .linear = Linear::kTogether,
       .sizes_argument = "input_sizes"},
      {.op = "aten::select_backward",
       .letters = putting_back_selected,
       .linear = Linear::kTogether,
       .sizes_argument = "input_sizes"},
  };
  for (const char* op : {"aten::view", "aten::_unsafe_view", "aten::_reshape_alias", "aten::view_copy"}) {
    rules.push_back({.op = op,
                     .linear = Linear::kMove,
                     .alternatives = viewing,
                     .sizes_argument = "size",
                     .local = local_view});
  }
  for (const char* op : {"aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full"}) {
    rules.push_back({.op = op, .letters = like_self, .sizes_argument = "size"});
  }
  rules.push_back({.op = "aten::new_empty_strided",
                   .letters = like_self,
                   .sizes_argument = "size",
                   .local = local_empty_strided});
  return rules;
}

}  // namespace lockstep::dtensor_internal::rules
