// Every operator that has a rule, over every combination of placements that the rule admits, against the same
// operator on plain tensors: values, placements of the results, and gradients.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/long_testing.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/internal/decide.h"
#include "lockstep/dtensor/internal/meta.h"
#include "lockstep/dtensor/internal/redistribute.h"
#include "lockstep/dtensor/internal/rule.h"
#include "lockstep/dtensor/internal/rule_samples.h"
#include "lockstep/group/group_testing.h"

namespace lockstep::dtensor_internal {
namespace {

using c10::IValue;
using testing::world;
using torch::jit::Stack;

// Results of operators whose memory is not initialised.
const std::set<std::string> kUninitialised{"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"};

std::vector<std::unique_ptr<const Operator>> ruled_operators() {
  std::vector<std::unique_ptr<const Operator>> found;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto handle = dispatcher.findSchema(name);
    if (!handle || !handle->schema().name().starts_with("aten::")) continue;
    if (!handle->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    auto op = read_operator(*handle);
    const bool ruled = (op->rule || op->loops) && op->name != "aten::as_strided_";  // which is refused
    if (ruled && !op->is_random && (!op->writes || op->in_place)) found.push_back(std::move(op));
  }
  std::ranges::sort(found, {}, [](const auto& op) { return op->name; });
  return found;
}

// The plain tensors of a list of arguments, in the order of OpCall::inputs().
std::vector<at::Tensor> tensors_in(const Stack& arguments) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value.toTensor());
    if (!value.isList()) continue;
    for (const auto& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) tensors.push_back(element.toTensor());
    }
  }
  return tensors;
}
Stack with_tensors(const Stack& arguments, const std::vector<at::Tensor>& tensors) {
  auto next = tensors.begin();
  Stack result;
  for (const auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined()) {
      result.push_back(*next++);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (std::size_t i = 0; i < value.toTensorVector().size(); ++i) list.push_back(*next++);
      result.push_back(list);
    } else if (value.isList() && value.type()->containedType(0)->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& element : value.toListRef()) {
        list.push_back(element.isTensor() ? std::optional<at::Tensor>(*next++) : std::nullopt);
      }
      result.push_back(list);
    } else {
      result.push_back(value);
    }
  }
  return result;
}

// Rank r's share of a value that is partial over n ranks. Shares differ; those of an integer sum are all and
// nothing.
at::Tensor share_of(const at::Tensor& value, ReduceOp::Kind kind, double r, double n) {
  if (kind == ReduceOp::kMax) return r == 0 ? value : value - r;
  if (!value.is_floating_point() && !value.is_complex()) return value * (r == 0 ? 1 : 0);
  const auto share = (r + 1) / (n * (n + 1) / 2);
  return value * (kind == ReduceOp::kAvg ? n * share : share);
}

// `value` under `placements`.
at::Tensor placed(const at::Tensor& value, const DeviceMesh& mesh, const Placements& placements) {
  const auto context = MeshContext::of(mesh, "placed");
  auto part = value;
  for (std::size_t m = 0; m < placements.size(); ++m) {
    if (!placements[m].is_partial()) continue;
    part = share_of(part, placements[m].op(), static_cast<double>(context->coordinate()[m]),
                    static_cast<double>(context->shape()[m]));
  }
  const auto* layout = context->layout(placements);
  return wrap(slice_for(part, *layout).clone(), value.sizes(), context, layout);
}

std::vector<at::Tensor> results_of(const Stack& stack) {
  return tensors_in(stack);
}

std::vector<at::Tensor> call(const Operator& op, Stack stack) {
  op.handle.callBoxed(stack);
  return results_of(stack);
}

bool same(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.sizes() != expected.sizes() || actual.scalar_type() != expected.scalar_type()) return false;
  if (!expected.is_floating_point() && !expected.is_complex()) return actual.equal(expected);
  return at::allclose(actual, expected, 1e-4, 1e-5, true);
}

struct Tally {
  std::mutex mutex;
  std::set<std::string> operators;
  std::int64_t combinations = 0;
  std::int64_t gradients = 0;
  std::map<std::string, std::string> failures;

  void fail(const std::string& name, const std::string& text) {
    const std::lock_guard lock(mutex);
    failures.try_emplace(name, text);
  }
  void count(const std::string& name, bool with_gradients) {
    const std::lock_guard lock(mutex);
    operators.insert(name);
    ++combinations;
    if (with_gradients) ++gradients;
  }
};

// On two mesh dimensions a short run takes as many pairs as there are alternatives, each alternative once on
// each dimension, other pairs for other operators. A long one takes all.
bool of_short_run(const Operator& op, std::size_t a, std::size_t b, std::size_t n) {
  const auto shift = std::accumulate(op.name.begin(), op.name.end(), std::size_t{0});
  return long_testing::enabled() || (a + b + shift) % n == 0;
}

// The placements on one mesh dimension that the rule admits for these arguments, placed as `now`.
std::vector<Alternative> admitted(const Operator& op, const Stack& sample, const DeviceMesh& mesh,
                                  std::size_t dim, const Placement& now) {
  Placements placements(mesh.shape().size());
  placements[dim] = now;
  std::vector<at::Tensor> given;
  for (const auto& tensor : tensors_in(sample)) given.push_back(placed(tensor, mesh, placements));
  const auto arguments = with_tensors(sample, given);
  const OpCall probe(op, arguments.data());
  std::vector<Sizes> sizes;
  std::vector<std::vector<bool>> uneven;
  for (const auto& input : probe.inputs()) {
    sizes.push_back(input.sizes.vec());
    uneven.emplace_back(input.sizes.size(), false);
  }
  const auto decision = decide(probe);
  return alternatives_of(probe, {dim, mesh.shape()[dim], sizes, uneven, decision->result_sizes});
}

// All of them: what is admitted for replicas, and on meshes of one dimension the partials of other kinds, which
// a rule admits where an input has one. Averages and maxima of numbers with a fraction.
std::vector<Alternative> admitted(const Operator& op, const Stack& sample, const DeviceMesh& mesh,
                                  std::size_t dim) {
  auto all = admitted(op, sample, mesh, dim, Replicate());
  const bool fractions =
      std::ranges::all_of(tensors_in(sample), [](const at::Tensor& t) { return t.is_floating_point(); });
  if (op.writes || op.is_view || !fractions || mesh.ndim() > 1) return all;
  for (const auto kind : {ReduceOp::kAvg, ReduceOp::kMax}) {
    for (auto& alternative : admitted(op, sample, mesh, dim, Partial(kind))) {
      if (std::ranges::find(alternative.inputs, Placement(Partial(kind))) != alternative.inputs.end())
        all.push_back(std::move(alternative));
    }
  }
  return all;
}

std::string text_of(const Operator& op, const std::vector<Placements>& inputs) {
  std::string text = op.name + "(";
  for (const auto& placements : inputs) text += (text.back() == '(' ? "" : ", ") + to_string(placements);
  return text + ")";
}

// What the operator does with plain tensors.
struct Expected {
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> arguments;  // after the call: some are written
  std::vector<at::Tensor> gradients;  // per argument; none at all where the operator has no derivative
};

void expect_same(const Operator& op, const at::Tensor& actual, const at::Tensor& expected,
                 const std::string& what, Tally& tally) {
  const auto whole = is_sharded(actual) ? full_tensor(actual.detach()) : actual;
  if (kUninitialised.contains(op.name) || same(whole, expected)) return;
  tally.fail(op.name, base::cat(what, " ", describe(actual), " got\n", whole, "\nexpected\n", expected));
}

// Runs the operator with the inputs placed so and compares; `results`, when given, are the placements it must
// have.
void compare(const Operator& op, const Stack& sample, const Expected& expected, const DeviceMesh& mesh,
             const std::vector<Placements>& inputs, const Placements* results, Tally& tally) {
  std::vector<at::Tensor> tensors;
  const auto plain = tensors_in(sample);
  for (std::size_t i = 0; i < plain.size(); ++i) tensors.push_back(placed(plain[i], mesh, inputs[i]));
  const auto actual = call(op, with_tensors(sample, tensors));
  if (actual.size() != expected.results.size())
    tally.fail(op.name, text_of(op, inputs) + ": results missing");
  for (std::size_t r = 0; r < actual.size(); ++r) {
    const auto what = base::cat(text_of(op, inputs), " result ", r);
    expect_same(op, actual[r], expected.results[r], what, tally);
    if (results && r < results->size() && !op.rule->finish && !op.writes &&
        lockstep::placements(actual[r]) != Placements{(*results)[r]}) {
      tally.fail(op.name, base::cat(what, " is ", describe(actual[r]), ", the rule says ", (*results)[r]));
    }
  }
  for (std::size_t i = 0; op.writes && i < tensors.size(); ++i) {
    expect_same(op, tensors[i], expected.arguments[i], base::cat(text_of(op, inputs), " argument ", i),
                tally);
  }
}

at::Tensor loss_of(const std::vector<at::Tensor>& results) {
  at::Tensor loss;
  double factor = 1;
  for (const auto& result : results) {
    if (!result.requires_grad() || !result.is_floating_point()) continue;
    const auto term = (result * result).sum() * factor;
    factor += 0.5;
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

Expected expected_of(const Operator& op, const Stack& sample) {
  Expected expected;
  for (const auto& tensor : tensors_in(sample)) expected.arguments.push_back(tensor.clone());
  expected.results = call(op, with_tensors(sample, expected.arguments));
  if (op.writes) return expected;
  std::vector<at::Tensor> leaves;
  for (const auto& tensor : tensors_in(sample)) {
    leaves.push_back(tensor.detach().clone().set_requires_grad(tensor.is_floating_point()));
  }
  try {
    const auto loss = loss_of(call(op, with_tensors(sample, leaves)));
    if (!loss.defined()) return expected;
    loss.backward();
  } catch (const std::exception&) {
    return expected;  // no derivative
  }
  for (const auto& leaf : leaves) expected.gradients.push_back(leaf.grad());
  return expected;
}

void compare_gradients(const Operator& op, const Stack& sample, const Expected& expected,
                       const DeviceMesh& mesh, const std::vector<Placements>& inputs, Tally& tally) {
  const auto plain = tensors_in(sample);
  std::vector<at::Tensor> sharded;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    sharded.push_back(placed(plain[i], mesh, inputs[i]).set_requires_grad(plain[i].is_floating_point()));
  }
  loss_of(call(op, with_tensors(sample, sharded))).backward();
  for (std::size_t i = 0; i < plain.size(); ++i) {
    if (!expected.gradients[i].defined()) continue;
    const auto what = base::cat(text_of(op, inputs), " gradient ", i);
    if (sharded[i].grad().defined()) {
      expect_same(op, sharded[i].grad(), expected.gradients[i], what, tally);
    } else {
      tally.fail(op.name, what + " is missing");
    }
  }
}

// Of operators on lists: the i-th tensors of all lists placed alike, the first ones and the others each in every
// way. Tensors that are no items are replicated.
std::vector<Alternative> list_placements(const Operator& op, const Stack& sample, bool partial) {
  const auto choices = [&](const at::Tensor& tensor) {
    Placements all{Replicate()};
    for (std::int64_t d = 0; d < tensor.dim(); ++d) all.push_back(Shard(d));
    if (partial) all.push_back(Partial());
    return all;
  };
  const auto list = std::ranges::find(op.arguments, ArgumentKind::kTensors) - op.arguments.begin();
  const auto first = sample[static_cast<std::size_t>(list)].toTensorVector();
  std::vector<Alternative> found;
  for (const auto& a : choices(first[0])) {
    for (const auto& b : choices(first[1])) {
      Alternative alternative;
      for (std::size_t v = 0; v < sample.size(); ++v) {
        const auto tensors = tensors_in({sample[v]});
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          const bool item = op.arguments[v] == ArgumentKind::kTensors && tensors[i].dim() > 0;
          alternative.inputs.push_back(!item ? Placement() : i == 0 ? a : b);
        }
      }
      found.push_back(std::move(alternative));
    }
  }
  return found;
}

std::vector<Alternative> alternatives_for(const Operator& op, const Stack& sample, const DeviceMesh& mesh,
                                          std::size_t dim) {
  if (static_cast<int>(dim) >= mesh.ndim()) return {{}};
  const bool fused = op.writes && op.arguments[0] == ArgumentKind::kTensors;
  if (op.loops || fused) return list_placements(op, sample, op.loops);
  return admitted(op, sample, mesh, dim);
}

void check_operator(const Operator& op, const DeviceMesh& mesh, int rank, Tally& tally) {
  const bool two = mesh.ndim() > 1;
  for (const auto& sample : samples_of(op)) {
    const auto expected = expected_of(op, sample);
    const auto first = alternatives_for(op, sample, mesh, 0);
    const auto second = alternatives_for(op, sample, mesh, 1);
    for (std::size_t a = 0; a < first.size(); ++a) {
      for (std::size_t b = 0; b < second.size(); ++b) {
        if (two && !of_short_run(op, a, b, std::max(first.size(), second.size()))) continue;
        std::vector<Placements> inputs;
        for (std::size_t i = 0; i < first[a].inputs.size(); ++i) {
          inputs.push_back({first[a].inputs[i]});
          if (two) inputs.back().push_back(second[b].inputs[i]);
        }
        const bool checks_placements = !two && !first[a].results.empty();
        compare(op, sample, expected, mesh, inputs, checks_placements ? &first[a].results : nullptr, tally);
        if (!expected.gradients.empty()) compare_gradients(op, sample, expected, mesh, inputs, tally);
        if (rank == 0) tally.count(op.name, !expected.gradients.empty());
      }
    }
  }
}

void check_all(const std::vector<std::int64_t>& shape, std::size_t at_least) {
  install_kernels();
  const auto operators = ruled_operators();
  Tally tally;
  const auto n = static_cast<int>(c10::multiply_integers(shape));
  world(n, [&](int rank) {
    const auto mesh = init_device_mesh("cpu", shape);
    for (const auto& op : operators) {
      try {
        check_operator(*op, mesh, rank, tally);
      } catch (const std::exception& error) {
        // Alike on every rank, or the next collective says so.
        tally.fail(op->name, std::string(error.what()).substr(0, 600));
      }
    }
  });
  for (const auto& [name, text] : tally.failures) ADD_FAILURE() << name << ": " << text;
  EXPECT_GE(tally.operators.size(), at_least);
  std::cout << "mesh " << at::IntArrayRef(shape) << ": " << tally.operators.size()
            << " operators with a rule, " << tally.combinations << " combinations of placements, "
            << tally.gradients << " of them with gradients\n";
}

TEST(Rules, EveryOperatorOverTwoRanksIsThatOfPlainTensors) {
  check_all({2}, 600);
}
TEST(Rules, EveryOperatorOverThreeRanksIsThatOfPlainTensors) {
  check_all({3}, 600);
}
TEST(Rules, EveryOperatorOverTwoDimensionsIsThatOfPlainTensors) {
  check_all({2, 2}, 600);
}

TEST(Rules, AreOfOperatorsThatExist) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto* rule : all_rules()) {
    const auto dot = rule->op.find('.');
    const c10::OperatorName name(rule->op.substr(0, dot),
                                 dot == std::string::npos ? "" : rule->op.substr(dot + 1));
    EXPECT_TRUE(dispatcher.findSchema(name).has_value()) << rule->op;
  }
}

}  // namespace
}  // namespace lockstep::dtensor_internal
