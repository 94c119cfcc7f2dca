// Choosing and placing elements by index, and joining tensors.
#include <algorithm>

#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal::rules {
namespace {

std::size_t wrapped_dim(const OpCall& call, const char* name, std::int64_t ndim) {
  const auto dim = call.integer(name);
  return static_cast<std::size_t>(dim < 0 ? dim + ndim : dim);
}

// The indexed dimension is needed whole; the others are those of self and of the tensor that is put in, if
// there is one.
void index_letters(const OpCall& call, Letters& letters) {
  const auto ndim = call.inputs()[0].ndim();
  const auto at = wrapped_dim(call, "dim", ndim);
  const auto source = call.input_of("source");
  for (std::size_t d = 0; d < static_cast<std::size_t>(ndim); ++d) {
    const int letter = d == at ? Letters::kNone : static_cast<int>(d);
    letters.inputs[0][d] = letter;
    letters.results[0].push_back(letter);
    if (source >= 0 && call.inputs()[static_cast<std::size_t>(source)].ndim() == ndim) {
      letters.inputs[static_cast<std::size_t>(source)][d] = letter;
    }
  }
}

// gather, scatter: index (and src) have self's dimensions. One that is shorter than self's reads or writes
// only its first part, which then cannot be cut alike: letters of different sizes are not sharded.
void gather_letters(const OpCall& call, Letters& letters) {
  const auto ndim = call.inputs()[0].ndim();
  const auto at = wrapped_dim(call, "dim", ndim);
  for (auto& dims : letters.inputs) {
    for (std::size_t d = 0; d < dims.size(); ++d) dims[d] = d == at ? Letters::kNone : static_cast<int>(d);
  }
  letters.results[0] = letters.inputs[0];
}

// cat joins along dim, stack along a new one.
void joining(const OpCall& call, Letters& letters, bool fresh) {
  // A tensor of one dimension and no elements is accepted by cat whatever the others have: then nothing is
  // sharded.
  const auto ndim = call.inputs()[0].sizes.size();
  for (const auto& input : call.inputs()) {
    if (input.sizes.size() != ndim) {
      letters.results[0].assign(ndim, Letters::kNone);
      return;
    }
  }
  const auto at = wrapped_dim(call, "dim", static_cast<std::int64_t>(ndim) + (fresh ? 1 : 0));
  for (auto& dims : letters.inputs) {
    for (std::size_t d = 0; d < ndim; ++d) dims[d] = !fresh && d == at ? Letters::kNone : static_cast<int>(d);
  }
  letters.results[0] = letters.inputs[0];
  if (fresh)
    letters.results[0].insert(letters.results[0].begin() + static_cast<std::ptrdiff_t>(at), Letters::kNone);
}
void cat_letters(const OpCall& call, Letters& letters) {
  joining(call, letters, false);
}
void stack_letters(const OpCall& call, Letters& letters) {
  joining(call, letters, true);
}

// The last two dimensions are matrices, those before them independent.
void matrix_letters(const OpCall& call, Letters& letters) {
  const auto ndim = call.inputs()[0].sizes.size();
  for (std::size_t d = 0; d + 2 < ndim; ++d) letters.inputs[0][d] = static_cast<int>(d);
  letters.results[0] = letters.inputs[0];
}

// Dimensions that are repeated or padded are needed whole.
void repeat_letters(const OpCall& call, Letters& letters) {
  const auto repeats = call.integers("repeats");
  const auto ndim = call.inputs()[0].sizes.size();
  const auto lead = repeats.size() - ndim;
  letters.results[0].assign(lead, Letters::kNone);
  for (std::size_t d = 0; d < ndim; ++d) {
    if (repeats[lead + d] == 1) letters.inputs[0][d] = static_cast<int>(d);
    letters.results[0].push_back(letters.inputs[0][d]);
  }
}
void pad_letters(const OpCall& call, Letters& letters) {
  const auto pad = call.integers("pad");
  const auto ndim = call.inputs()[0].sizes.size();
  for (std::size_t d = 0; d < ndim; ++d) {
    const auto at = (ndim - 1 - d) * 2;  // pairs, the last dimension first
    if (at >= pad.size() || (pad[at] == 0 && pad[at + 1] == 0)) letters.inputs[0][d] = static_cast<int>(d);
  }
  letters.results[0] = letters.inputs[0];
}

// x[:, i, j]: dimensions without an index stay. Where the index's own dimensions appear among them depends on
// whether the indices are next to each other.
struct Indexed {
  std::vector<std::size_t> dims;  // of self that have an index
  std::size_t n_index = 0;        // dimensions that the indices broadcast to
  bool adjacent = true;
  bool plain = true;  // no masks
};
Indexed read_indices(const OpCall& call) {
  Indexed found;
  const auto argument = call.op().argument("indices");
  for (const auto& input : call.inputs()) {
    if (input.argument != argument) continue;
    if (input.local.scalar_type() == at::kBool || input.local.scalar_type() == at::kByte) found.plain = false;
    if (!found.dims.empty() && static_cast<std::size_t>(input.item) != found.dims.back() + 1)
      found.adjacent = false;
    found.dims.push_back(static_cast<std::size_t>(input.item));
    found.n_index = std::max(found.n_index, input.sizes.size());
  }
  return found;
}
// The letters of self and of x[indices]; the indices themselves are replicated. Advanced indexing puts the
// dimensions of the indices where the first indexed dimension was when they are adjacent, else in front, as
// in torch. A mask's result has a size that depends on its values, so nothing is sharded.
bool indexed_letters(const OpCall& call, std::vector<int>& self, std::vector<int>& chosen) {
  const auto found = read_indices(call);
  if (!found.plain || found.dims.empty()) return false;
  for (std::size_t d = 0; d < self.size(); ++d) {
    self[d] = std::ranges::find(found.dims, d) == found.dims.end() ? static_cast<int>(d) : Letters::kNone;
  }
  if (!found.adjacent) chosen.assign(found.n_index, Letters::kNone);
  for (std::size_t d = 0; d < self.size(); ++d) {
    if (found.adjacent && d == found.dims.front()) chosen.insert(chosen.end(), found.n_index, Letters::kNone);
    if (self[d] != Letters::kNone) chosen.push_back(self[d]);
  }
  return true;
}
void advanced_index_letters(const OpCall& call, Letters& letters) {
  if (!indexed_letters(call, letters.inputs[0], letters.results[0]))
    letters.inputs[0].assign(letters.inputs[0].size(), Letters::kNone);
}
void index_put_letters(const OpCall& call, Letters& letters) {
  std::vector<int> chosen;
  if (!indexed_letters(call, letters.inputs[0], chosen)) {
    letters.inputs[0].assign(letters.inputs[0].size(), Letters::kNone);
    letters.results[0] = letters.inputs[0];
    return;
  }
  letters.results[0] = letters.inputs[0];
  const auto values = static_cast<std::size_t>(call.input_of("values"));
  const auto& sizes = call.inputs()[values].sizes;
  for (std::size_t d = 0; d < sizes.size() && d < chosen.size(); ++d) {
    if (sizes[sizes.size() - 1 - d] != 1)
      letters.inputs[values][sizes.size() - 1 - d] = chosen[chosen.size() - 1 - d];
  }
}

}  // namespace

std::vector<Rule> indexing_rules() {
  return {
      {.op = "aten::index_select", .letters = index_letters},
      {.op = "aten::index_fill.int_Scalar", .letters = index_letters},
      {.op = "aten::index_add", .letters = index_letters},
      {.op = "aten::index_copy", .letters = index_letters},
      {.op = "aten::gather", .letters = gather_letters},
      {.op = "aten::scatter.src", .letters = gather_letters},
      {.op = "aten::scatter.value", .letters = gather_letters},
      {.op = "aten::scatter_add", .letters = gather_letters},
      {.op = "aten::cat", .letters = cat_letters, .linear = Linear::kTogether},
      {.op = "aten::stack", .letters = stack_letters, .linear = Linear::kTogether},
      {.op = "aten::tril", .letters = matrix_letters, .linear = Linear::kTogether},
      {.op = "aten::triu", .letters = matrix_letters, .linear = Linear::kTogether},
      {.op = "aten::repeat", .letters = repeat_letters, .linear = Linear::kMove},
      {.op = "aten::constant_pad_nd", .letters = pad_letters},
      {.op = "aten::index.Tensor", .letters = advanced_index_letters},
      {.op = "aten::index_put", .letters = index_put_letters},
      {.op = "aten::_unsafe_index_put", .letters = index_put_letters},
      {.op = "aten::_unsafe_index.Tensor", .letters = advanced_index_letters},
  };
}

}  // namespace lockstep::dtensor_internal::rules
