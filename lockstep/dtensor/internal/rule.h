// The rule of an operator: which placements of its inputs give which placements of its results, for one
// dimension of the mesh; on a mesh of several the dimensions choose independently. Almost every rule is a
// naming of dimensions:
//
//   mm          "mk,kn->mn"       m sharded: rows of the result are sharded. k sharded: every rank has a partial sum.
//   softmax     pointwise, but for the dimension it normalises over, which must not be sharded
//
// From the letters follow all alternatives (letters.cpp): one per letter, all replicated, and those in which
// partial inputs give a partial result because the operator is linear in them. decide.cpp takes the cheapest.
//
// To add an operator: a row in one of the tables rules_*.cpp. dtensor_rules_test finds it there and compares
// every alternative with the operator on plain tensors; give it sample arguments in rule_samples.cpp when the
// schema is not like one that is there.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/dtensor/internal/op_call.h"
#include "lockstep/dtensor/placement.h"

namespace lockstep::dtensor_internal {

// Placements on one mesh dimension, one per OpCall::inputs() and one per result.
struct Alternative {
  Placements inputs;
  Placements results;
};

// One mesh dimension while a call is decided. Sizes are those that earlier mesh dimensions left.
struct MeshAxis {
  std::size_t dim = 0;
  std::int64_t n = 1;
  const std::vector<Sizes>& sizes;  // per input: of the largest piece
  const std::vector<std::vector<bool>>&
      uneven;                 // per input and dimension: earlier mesh dimensions cut it into unequal pieces
  const Sizes& result_sizes;  // of operators that are given their result's sizes; left by earlier dimensions
};

// Names for the dimensions of a call. The same letter: the same dimension, cut alike.
class Letters {
 public:
  static constexpr int kNone = -1;  // must not be sharded

  Letters(const OpCall& call, std::size_t n_results);

  std::vector<std::vector<int>> inputs;   // per input and dimension; kNone at first
  std::vector<std::vector<int>> results;  // per result and dimension
  // Per result: what a result without the letter is when the letter is sharded. None: then the letter must
  // not be.
  std::vector<std::optional<ReduceOp::Kind>> reduce;
  // Per input: it is added to the result (addmm's first). Where the result is partial, so must it be, or it
  // is added once per rank.
  std::vector<bool> added;
  // The letter whose pieces must be one range each: they are sharded without interleaving.
  int one_range = kNone;
};

enum class Linear : std::uint8_t {
  kNone,
  kFirst,     // in the first input while the others are fixed: div, most backward operators
  kEach,      // in each input while the others are fixed: mul, mm
  kTogether,  // in all inputs together: add, sum, cat
  kIgnored,   // the values do not matter: ones_like. Of partial inputs a result of its own
  kMove,  // values are moved and not changed: views, clone, index_select. Any partial goes through, not only sums
};

struct LocalCall;

struct Rule {
  std::string op;
  std::function<void(const OpCall&, Letters&)> letters{};
  Linear linear = Linear::kNone;
  // False: `linear` does not hold for this call.
  std::function<bool(const OpCall&)> linear_if{};
  // Instead of letters, for what they cannot say: views.
  std::function<void(const OpCall&, const MeshAxis&, std::vector<Alternative>&)> alternatives{};
  // The rule depends on the operator's Scalar (the order of a norm), which is then part of the key of its
  // decisions. Scalars of other operators are not: a factor may be another one at every call.
  bool depends_on_number = false;
  // The operator fails on tensors without elements: dimensions are sharded only where every rank gets some.
  bool needs_elements = false;
  // The argument that holds the result's sizes: ranks are given those of their piece.
  const char* sizes_argument = nullptr;
  // Instead of calling the operator on the local tensors: what local arithmetic needs of the whole (a
  // mean's count).
  std::function<void(LocalCall&)> local{};
  // Given, partial results are reduced at once and then changed by this: norms (a root), weighted means (a
  // division).
  std::function<void(const OpCall&, std::vector<at::Tensor>&)> finish{};
};

// The operator on local tensors. `run` replaces the arguments on the stack by the results.
struct LocalCall {
  const OpCall& call;
  const struct Decision& decision;
  torch::jit::Stack& stack;
  // Set by the local functions of view operators that had to copy.
  bool lost_base = false;
  // The first of the operator's arguments on the stack, which local functions may replace.
  c10::IValue* arguments() const;
  void run() const;
};

// The operator's facts and its rule: its own, or for an in-place operator that of the one that returns the
// result.
std::unique_ptr<const Operator> read_operator(const c10::OperatorHandle& handle);

// Null when the operator has none of its own. `name`: "aten::mm", "aten::add.Tensor".
const Rule* find_rule(const std::string& name);
// Those of all tables, for tests.
std::vector<const Rule*> all_rules();

// Everything the rule admits on one mesh dimension; the first one is all replicated.
std::vector<Alternative> alternatives_of(const OpCall& call, const MeshAxis& axis);

// The results a call has, lists counted once.
std::size_t count_results(const Operator& op);

// Tables and the helpers that fill them.
namespace rules {
std::vector<Rule> pointwise_rules();
std::vector<Rule> reduction_rules();
std::vector<Rule> matmul_rules();
std::vector<Rule> view_rules();
std::vector<Rule> nn_rules();
std::vector<Rule> indexing_rules();
std::vector<Rule> loss_rules();
std::vector<Rule> list_rules();

// Whether the call's conversion to argument "dtype", or to the type of its first input, is linear: not one
// that drops fractions, nor to or from bool.
bool converts_linearly(const OpCall& call);
// Elementwise with broadcasting.
void elementwise(const OpCall& call, Letters& letters);
// "mk,kn->mn": inputs in the order of the call; lower-case letters name dimensions, '.' any number of leading
// ones, '*' a dimension that must not be sharded. Results separated by commas; a result without a sharded
// letter is a partial sum.
std::function<void(const OpCall&, Letters&)> einsum(std::string spec);
}  // namespace rules

}  // namespace lockstep::dtensor_internal
