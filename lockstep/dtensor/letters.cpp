// From the letters of a call to its alternatives, and the helpers with which the tables name letters.
#include <algorithm>
#include <set>
#include <sstream>

#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal {
namespace {

// The interleavings with which inputs are sharded on this letter now, and 1. Any will do as long as all use
// the same, unless the rule counts from where a piece begins.
std::set<std::int64_t> interleavings(const OpCall& call, const Letters& letters, int letter,
                                     std::size_t mesh_dim) {
  std::set<std::int64_t> found{1};
  if (letter == letters.one_range) return found;
  for (std::size_t i = 0; i < call.inputs().size(); ++i) {
    const auto& now = call.inputs()[i].layout->placements[mesh_dim];
    if (now.is_shard() && letters.inputs[i][static_cast<std::size_t>(now.dim())] == letter) {
      found.insert(now.interleave());
    }
  }
  return found;
}

Placement placed(const std::vector<int>& dims, int letter, std::int64_t interleave) {
  const auto at = std::ranges::find(dims, letter);
  if (at == dims.end()) return Replicate();
  return Shard(at - dims.begin(), interleave);
}

std::int64_t letter_size(const Letters& letters, const MeshAxis& axis, int letter) {
  for (std::size_t i = 0; i < letters.inputs.size(); ++i) {
    const auto at = std::ranges::find(letters.inputs[i], letter);
    if (at != letters.inputs[i].end())
      return axis.sizes[i][static_cast<std::size_t>(at - letters.inputs[i].begin())];
  }
  return 0;
}

// Operands that have the letter in different sizes would be cut differently.
bool one_size(const Letters& letters, const MeshAxis& axis, int letter) {
  const auto size = letter_size(letters, axis, letter);
  for (std::size_t i = 0; i < letters.inputs.size(); ++i) {
    for (std::size_t d = 0; d < letters.inputs[i].size(); ++d) {
      if (letters.inputs[i][d] == letter && axis.sizes[i][d] != size) return false;
    }
  }
  return true;
}

// Earlier mesh dimensions left some ranks less of it than the sizes say.
bool cut_unevenly(const Letters& letters, const MeshAxis& axis, int letter) {
  for (std::size_t i = 0; i < letters.inputs.size(); ++i) {
    for (std::size_t d = 0; d < letters.inputs[i].size(); ++d) {
      if (letters.inputs[i][d] == letter && axis.uneven[i][d]) return true;
    }
  }
  return false;
}

// The alternative in which this letter is sharded: inputs with the letter are cut there, the others
// replicated; a result with the letter is cut, one without it is the reduction over the ranks' parts. None
// when the rule or the sizes do not allow it.
std::optional<Alternative> sharded_on(const Letters& letters, const MeshAxis& axis, bool needs_all,
                                      int letter, std::int64_t interleave) {
  if (!one_size(letters, axis, letter)) return std::nullopt;
  const bool none_empty = !cut_unevenly(letters, axis, letter) &&
                          leaves_none_empty(letter_size(letters, axis, letter) / interleave, axis.n);
  if (needs_all && !none_empty) return std::nullopt;
  Alternative alternative;
  for (const auto& dims : letters.inputs) alternative.inputs.push_back(placed(dims, letter, interleave));
  for (std::size_t r = 0; r < letters.results.size(); ++r) {
    auto placement = placed(letters.results[r], letter, interleave);
    if (placement.is_replicate()) {
      const auto op = letters.reduce[r];
      if (!op) return std::nullopt;
      // The extremum of no elements does not exist.
      const bool needs_elements = *op == ReduceOp::kMax || *op == ReduceOp::kMin;
      if (needs_elements && !none_empty) return std::nullopt;
      placement = Partial(*op);
    }
    alternative.results.push_back(placement);
  }
  for (std::size_t i = 0; i < letters.inputs.size(); ++i) {
    if (letters.added[i] && alternative.results[0].is_partial())
      alternative.inputs[i] = alternative.results[0];
  }
  return alternative;
}

// The partial kinds worth considering: those the inputs have on this mesh dimension, and the sum. An average
// is linear like a sum; a maximum or a product only passes through operators that move values.
std::set<ReduceOp::Kind> partial_kinds(const OpCall& call, std::size_t mesh_dim, Linear linear) {
  std::set<ReduceOp::Kind> kinds{ReduceOp::kSum};
  for (const auto& input : call.inputs()) {
    const auto& now = input.layout->placements[mesh_dim];
    if (!now.is_partial()) continue;
    const bool any = linear == Linear::kMove || linear == Linear::kIgnored;
    if (any || now.op() == ReduceOp::kAvg) kinds.insert(now.op());
  }
  return kinds;
}

void add_partials(const OpCall& call, const MeshAxis& axis, Linear linear, std::size_t n_results,
                  std::vector<Alternative>& alternatives) {
  if (linear == Linear::kNone) return;
  const auto n = call.inputs().size();
  for (const auto kind : partial_kinds(call, axis.dim, linear)) {
    const Placements results(n_results, linear == Linear::kIgnored ? Placement() : Placement(Partial(kind)));
    if (linear == Linear::kTogether || linear == Linear::kMove || linear == Linear::kIgnored) {
      alternatives.push_back({Placements(n, Partial(kind)), results});
      continue;
    }
    for (std::size_t i = 0; i < (linear == Linear::kFirst ? std::min<std::size_t>(n, 1) : n); ++i) {
      Placements inputs(n);
      inputs[i] = Partial(kind);
      alternatives.push_back({std::move(inputs), results});
    }
  }
}

}  // namespace

Letters::Letters(const OpCall& call, std::size_t n_results) : results(n_results), reduce(n_results) {
  for (const auto& input : call.inputs()) inputs.emplace_back(input.sizes.size(), kNone);
  added.resize(inputs.size());
}

std::size_t count_results(const Operator& op) {
  return op.result_is.size();
}

std::vector<Alternative> alternatives_of(const OpCall& call, const MeshAxis& axis) {
  const auto n_results = count_results(call.op());
  std::vector<Alternative> alternatives{{Placements(call.inputs().size()), Placements(n_results)}};
  const auto* rule = call.op().rule;
  if (!rule) return alternatives;
  if (rule->alternatives) {
    rule->alternatives(call, axis, alternatives);
  }
  // An ordered set, so that all ranks list the alternatives in the same order: of two with equal cost the
  // first is taken.
  if (rule->letters) {
    Letters letters(call, n_results);
    rule->letters(call, letters);
    std::set<int> names;
    for (const auto& dims : letters.inputs) names.insert(dims.begin(), dims.end());
    names.erase(Letters::kNone);
    for (const auto letter : names) {
      for (const auto interleave : interleavings(call, letters, letter, axis.dim)) {
        if (auto found = sharded_on(letters, axis, rule->needs_elements, letter, interleave))
          alternatives.push_back(std::move(*found));
      }
    }
  }
  if (!rule->linear_if || rule->linear_if(call)) {
    add_partials(call, axis, rule->linear, n_results, alternatives);
  }
  return alternatives;
}

namespace rules {

// Overflow is not considered: a sum that is too large for its type has no value that could be kept.
bool converts_linearly(const OpCall& call) {
  const auto at = call.op().argument("dtype");
  const auto to =
      at >= 0 && call.has("dtype") ? call.value(at).toScalarType() : call.inputs()[0].local.scalar_type();
  return std::ranges::all_of(call.inputs(), [&](const Input& input) {
    const auto from = input.local.scalar_type();
    if (from == to) return true;
    if (from == at::kBool || to == at::kBool) return false;
    return at::isIntegralType(from, false) || !at::isIntegralType(to, false);
  });
}

// The letter of a dimension is its number in the result, counted from the front; shorter operands are aligned
// at the end, as broadcasting does.
void elementwise(const OpCall& call, Letters& letters) {
  std::size_t ndim = 0;
  for (const auto& input : call.inputs()) ndim = std::max(ndim, input.sizes.size());
  std::vector<std::int64_t> sizes(ndim, 1);
  for (const auto& input : call.inputs()) {
    const auto lead = ndim - input.sizes.size();
    for (std::size_t d = 0; d < input.sizes.size(); ++d) {
      if (input.sizes[d] != 1) sizes[lead + d] = input.sizes[d];
    }
  }
  for (std::size_t i = 0; i < call.inputs().size(); ++i) {
    const auto& own = call.inputs()[i].sizes;
    const auto lead = ndim - own.size();
    for (std::size_t d = 0; d < own.size(); ++d) {
      // A dimension of size 1 beside a larger one is broadcast: every rank needs all of it.
      if (own[d] == sizes[lead + d]) letters.inputs[i][d] = static_cast<int>(lead + d);
    }
  }
  std::vector<int> result(ndim);
  for (std::size_t d = 0; d < ndim; ++d) result[d] = static_cast<int>(d);
  for (auto& dims : letters.results) dims = result;
}

namespace {

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, by);) parts.push_back(part);
  return parts;
}

// Letters of leading dimensions ('.') are numbered from the last one, so that operands of different rank
// agree.
constexpr int kLeading = 1000;

std::vector<int> expand_spec(const std::string& spec, std::size_t ndim) {
  std::vector<int> dims;
  const bool leading = spec.starts_with('.');
  const std::string named = leading ? spec.substr(1) : spec;
  // '.' takes what the named letters leave over.
  const auto n_leading = leading ? ndim - std::min(ndim, named.size()) : 0;
  for (std::size_t i = 0; i < n_leading; ++i) dims.push_back(kLeading + static_cast<int>(n_leading - 1 - i));
  for (const char c : named) dims.push_back(c == '*' ? Letters::kNone : c);
  return dims;
}

}  // namespace

// The text is taken apart once, when the table is built; the returned function only numbers the dimensions of
// one call.
std::function<void(const OpCall&, Letters&)> einsum(std::string spec) {
  const auto arrow = spec.find("->");
  return [inputs = split(spec.substr(0, arrow), ','), results = split(spec.substr(arrow + 2), ',')](
             const OpCall& call, Letters& letters) {
    std::size_t most_leading = 0;
    for (std::size_t i = 0; i < call.inputs().size(); ++i) {
      // By argument and not by place, since optional tensors may be missing.
      const auto tensor = static_cast<std::size_t>(call.inputs()[i].argument);
      std::size_t nth = 0;
      for (std::size_t a = 0; a < tensor; ++a) {
        if (call.op().arguments[a] == ArgumentKind::kTensor) ++nth;
      }
      if (nth >= inputs.size()) continue;
      auto dims = expand_spec(inputs[nth], call.inputs()[i].sizes.size());
      if (dims.size() != call.inputs()[i].sizes.size())
        continue;  // another number of dimensions: do not shard
      if (inputs[nth].starts_with('.'))
        most_leading = std::max(most_leading, dims.size() + 1 - inputs[nth].size());
      // A broadcast dimension is needed whole.
      for (std::size_t d = 0; d < dims.size(); ++d) {
        const bool broadcast = call.inputs()[i].sizes[d] == 1;
        letters.inputs[i][d] = broadcast ? Letters::kNone : dims[d];
      }
    }
    for (std::size_t r = 0; r < letters.results.size() && r < results.size(); ++r) {
      const auto named = results[r].size() - (results[r].starts_with('.') ? 1 : 0);
      letters.results[r] = expand_spec(results[r], named + (results[r].starts_with('.') ? most_leading : 0));
      letters.reduce[r] = ReduceOp::kSum;
    }
  };
}

}  // namespace rules
}  // namespace lockstep::dtensor_internal
