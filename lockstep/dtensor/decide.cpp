#include "lockstep/dtensor/internal/decide.h"

#include <algorithm>
#include <limits>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/internal/strides.h"
#include "lockstep/dtensor/redistribute_plan.h"

namespace lockstep::dtensor_internal {
namespace {

// Bytes of an input's largest piece in its present layout: the same on every rank, unlike those of its own
// piece. Equal numbers matter: ranks that compute different costs could choose different alternatives, and
// then call different collectives.
double bytes_now(const Input& input, const MeshContext& mesh) {
  double bytes = static_cast<double>(input.local.element_size());
  for (const auto size : input.sizes) bytes *= static_cast<double>(size);
  for (std::size_t m = 0; m < mesh.ndim(); ++m) {
    if (input.layout->placements[m].is_shard()) bytes /= static_cast<double>(mesh.shape()[m]);
  }
  return bytes;
}

// Infinite when an input that is written would have to move.
double cost_of(const OpCall& call, const Alternative& alternative, const MeshAxis& axis) {
  const auto& mesh = *call.mesh();
  const bool cut = std::ranges::any_of(
      call.inputs(), [&](const Input& input) { return input.layout->placements[axis.dim].is_shard(); });
  double cost = 0;
  for (std::size_t i = 0; i < call.inputs().size(); ++i) {
    const auto& input = call.inputs()[i];
    const auto& now = input.layout->placements[axis.dim];
    const auto& then = alternative.inputs[i];
    if (now == then) continue;
    if (input.written) return std::numeric_limits<double>::infinity();
    // The 1 makes every move cost something, also one on a mesh dimension of one rank.
    const auto bytes = bytes_now(input, mesh);
    cost += 1 + redistribute_cost(now, then, bytes, axis.n);
    // Pieces where everything else is whole are gathered again by the next operator: a reduce_scatter alone
    // looks cheaper than the all_reduce, and the two collectives are not.
    if (now.is_partial() && then.is_shard() && !cut) {
      cost += redistribute_cost(then, Replicate(), bytes / static_cast<double>(axis.n), axis.n);
    }
  }
  // A written argument is its result.
  for (std::size_t r = 0; r < call.op().result_is.size(); ++r) {
    const auto is = call.op().result_is[r];
    if (!is) continue;
    const auto input = call.input_of(static_cast<int>(*is));
    if (input >= 0 && alternative.results[r] !=
                          call.inputs()[static_cast<std::size_t>(input)].layout->placements[axis.dim]) {
      return std::numeric_limits<double>::infinity();
    }
  }
  // Between alternatives that move nothing, results that are cut or replicated are worth more than partial
  // ones, whose reduction is still to come; and cut ones more than replicated ones, which every rank computes
  // again.
  for (const auto& result : alternative.results)
    cost += result.is_partial() ? 0.25 : result.is_replicate() ? 0.125 : 0;
  return cost;
}

// Cuts `sizes` as the placement says, for the mesh dimensions that come after. `uneven` is only ever set: a
// later mesh dimension that cuts evenly does not repair what an earlier one did.
void cut(Sizes& sizes, std::vector<bool>& uneven, const Placement& placement, std::int64_t n) {
  if (!placement.is_shard()) return;
  const auto d = static_cast<std::size_t>(placement.dim());
  const auto k = placement.interleave();
  if (!divides_evenly(sizes[d] / k, n)) uneven[d] = true;
  sizes[d] = k * chunk(sizes[d] / k, n, 0).length;
}

// The sizes of a sharded result dimension cannot be read from the local result (ranks may have fewer
// elements), so they are taken from the input dimension with the same letter. The first input that has it:
// all have it in one size (one_size).
void find_sources(const OpCall& call, Decision& decision) {
  const auto n_results = count_results(call.op());
  decision.sources.resize(n_results);
  const auto* rule = call.op().rule;
  if (!rule || !rule->letters) return;
  using Function = void (*)(const OpCall&, Letters&);
  const auto* named = rule->letters.target<Function>();
  decision.elementwise = named && *named == &rules::elementwise;
  Letters letters(call, n_results);
  rule->letters(call, letters);
  for (std::size_t r = 0; r < n_results; ++r) {
    for (const auto letter : letters.results[r]) {
      Decision::Source source;
      for (std::size_t i = 0; letter != Letters::kNone && source.input < 0 && i < letters.inputs.size();
           ++i) {
        const auto at = std::ranges::find(letters.inputs[i], letter);
        if (at != letters.inputs[i].end())
          source = {static_cast<int>(i), static_cast<int>(at - letters.inputs[i].begin())};
      }
      decision.sources[r].push_back(source);
    }
  }
}

// The sizes an operator is asked for, with -1 replaced. expand's -1 keeps the input's size, a view's -1 is
// what remains of the number of elements.
Sizes asked_sizes(const OpCall& call) {
  auto sizes = call.integers(call.op().rule->sizes_argument);
  const auto& input = call.inputs().front();
  const bool expands = call.op().name == "aten::expand";
  std::int64_t known = 1;
  for (const auto size : sizes) known *= size < 0 ? 1 : size;
  std::int64_t numel = 1;
  for (const auto size : input.sizes) numel *= size;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] >= 0) continue;
    if (expands) {
      const auto lead = sizes.size() - input.sizes.size();
      sizes[d] = d < lead ? 1 : input.sizes[d - lead];
    } else {
      sizes[d] = known == 0 ? 0 : numel / known;
    }
  }
  return sizes;
}

void check_partials(const OpCall& call, const Placements& placements) {
  std::optional<ReduceOp::Kind> op;
  for (const auto& placement : placements) {
    if (!placement.is_partial()) continue;
    if (op && *op != placement.op()) {
      base::raise(ErrorKind::kUsage,
                  base::cat(call.describe(), ": the result would be partial with two operations, ",
                            to_string(placements), "; redistribute an input first"));
    }
    op = placement.op();
  }
}

// Without a rule nothing says which piece of the result shares memory with which piece of the input.
void check_view(const OpCall& call) {
  const auto& op = call.op();
  if (op.rule || !op.is_view) return;
  const auto whole = [](const Input& input) { return input.layout->all_replicate; };
  if (std::ranges::all_of(call.inputs(), whole)) return;
  base::raise(
      ErrorKind::kUsage,
      base::cat(call.describe(),
                ": no rule says how the result shares memory with the pieces. Redistribute the tensor "
                "to Replicate() first, or call the operator that copies, ",
                op.handle.schema().name(), "_copy"));
}

}  // namespace

std::unique_ptr<const Decision> decide(const OpCall& call) {
  const auto& mesh = *call.mesh();
  auto decision = std::make_unique<Decision>();
  check_view(call);
  if (call.op().loops && !call.op().rule) {
    decision->by_copy = true;
    return decision;
  }
  const auto n_inputs = call.inputs().size();
  const auto n_results = count_results(call.op());
  if (call.op().rule && call.op().rule->sizes_argument) {
    decision->result_sizes = asked_sizes(call);
    decision->result_strides = call.integers("stride");
  }

  std::vector<Sizes> sizes;
  std::vector<std::vector<bool>> uneven;
  for (const auto& input : call.inputs()) {
    sizes.push_back(input.sizes.vec());
    uneven.emplace_back(input.sizes.size(), false);
  }
  auto result_sizes = decision->result_sizes;
  std::vector<bool> result_uneven(result_sizes.size(), false);

  std::vector<Placements> inputs(n_inputs);
  std::vector<Placements> results(n_results);
  // Greedy, one mesh dimension after the other, the outer ones first; what one has cut is smaller for the
  // next. The first alternative replicates everything and is always possible, unless an argument that is
  // written would have to move: then `best` stays null.
  for (std::size_t m = 0; m < mesh.ndim(); ++m) {
    const MeshAxis axis{m, mesh.shape()[m], sizes, uneven, result_sizes};
    const auto alternatives = alternatives_of(call, axis);
    const Alternative* best = nullptr;
    double least = std::numeric_limits<double>::infinity();
    for (const auto& alternative : alternatives) {
      const auto cost = cost_of(call, alternative, axis);
      if (cost < least) {
        least = cost;
        best = &alternative;
      }
    }
    // Remembered as well: the next call with these layouts does not search again.
    if (!best) {
      decision->by_copy = true;
      return decision;
    }
    for (std::size_t i = 0; i < n_inputs; ++i) {
      inputs[i].push_back(best->inputs[i]);
      cut(sizes[i], uneven[i], best->inputs[i], axis.n);
    }
    for (std::size_t r = 0; r < n_results; ++r) results[r].push_back(best->results[r]);
    if (!result_sizes.empty()) cut(result_sizes, result_uneven, best->results[0], axis.n);
  }

  for (std::size_t i = 0; i < n_inputs; ++i) {
    const auto* layout = mesh.layout(inputs[i]);
    decision->redistributes = decision->redistributes || layout != call.inputs()[i].layout;
    decision->inputs.push_back(layout);
    decision->pieces_differ = decision->pieces_differ || cuts_unequally(*layout, call.inputs()[i].sizes);
    decision->pieces_of_one = decision->pieces_of_one || cuts_to_one(*layout, call.inputs()[i].sizes);
  }
  // raw_results is what the operator's local results are; where the rule finishes them, their partials are
  // reduced at once.
  for (auto placements : results) {
    check_partials(call, placements);
    decision->raw_results.push_back(mesh.layout(placements));
    if (call.op().rule && call.op().rule->finish) {
      std::ranges::replace_if(
          placements, [](const Placement& p) { return p.is_partial(); }, Replicate());
    }
    decision->results.push_back(mesh.layout(placements));
  }
  if (!decision->result_sizes.empty()) {
    decision->local_result_sizes =
        local_sizes(decision->result_sizes, results[0], mesh.shape(), mesh.coordinate());
  }
  find_sources(call, *decision);
  return decision;
}

}  // namespace lockstep::dtensor_internal
