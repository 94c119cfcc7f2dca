// Lists of tensors of which the i-th ones belong together: _foreach_* in place and the fused optimizers. Where
// they are placed alike the operator runs once on the lists of local tensors, without communication. Otherwise
// _foreach_* work item by item (Operator::loops), and so do always those that return lists; a fused optimizer,
// which has no such loop, is refused.
#include <algorithm>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal::rules {
namespace {

// The tensor at the same place of the first list. Tensors that are no lists (a learning rate, a scale) have
// none and are replicated.
const Input* model_of(const OpCall& call, const Input& input) {
  if (call.op().arguments[static_cast<std::size_t>(input.argument)] != ArgumentKind::kTensors) return nullptr;
  const auto at = call.input_of(call.inputs()[0].argument, input.item);
  return at < 0 ? nullptr : &call.inputs()[static_cast<std::size_t>(at)];
}

void item_by_item(const OpCall& call, const MeshAxis& axis, std::vector<Alternative>& alternatives) {
  Alternative alternative;
  for (const auto& input : call.inputs()) {
    const auto* model = model_of(call, input);
    const auto& placement = model ? model->layout->placements[axis.dim] : Placement();
    // An item that is broadcast would have to be cut otherwise, and a partial sum is not to be squared.
    if (placement.is_partial() || (model && !input.sizes.empty() && input.sizes != model->sizes)) return;
    alternative.inputs.push_back(input.sizes.empty() ? Placement() : placement);
  }
  alternative.results.resize(count_results(call.op()));
  alternatives.push_back(std::move(alternative));
}

// A fused optimizer writes to all its lists, so that none can be moved.
void alike(const OpCall& call, const MeshAxis& axis, std::vector<Alternative>& alternatives) {
  for (const auto& input : call.inputs()) {
    const auto* model = model_of(call, input);
    if (!model || input.sizes.empty()) continue;
    if (input.layout == model->layout && !input.layout->has_partial && input.sizes == model->sizes) continue;
    const auto& schema = call.op().handle.schema().arguments();
    const auto name = [&](const Input& of) { return schema[static_cast<std::size_t>(of.argument)].name(); };
    base::raise(
        ErrorKind::kUsage,
        base::cat(call.op().name, ": ", name(input), "[", input.item, "] is ",
                  to_string(input.layout->placements), " ", input.sizes, ", ", name(*model), "[", input.item,
                  "] is ", to_string(model->layout->placements), " ", model->sizes,
                  "; parameters, gradients and state of a fused optimizer must be placed alike and not be "
                  "partial. Redistribute the gradient to the placements of its parameter first"));
  }
  item_by_item(call, axis, alternatives);
}

constexpr const char* kFused[] = {"aten::_fused_adam_",    "aten::_fused_adam_.tensor_lr",
                                  "aten::_fused_adamw_",   "aten::_fused_adamw_.tensor_lr",
                                  "aten::_fused_sgd_",     "aten::_fused_sgd_.tensor_lr",
                                  "aten::_fused_adagrad_", "aten::_fused_adagrad_.tensor_lr"};

// In place, of one list.
constexpr const char* kUnary[] = {
    "abs",     "acos", "asin",   "atan", "ceil",  "cos",   "cosh", "erf",   "erfc",       "exp",   "expm1",
    "floor",   "frac", "lgamma", "log",  "log10", "log1p", "log2", "neg",   "reciprocal", "round", "rsqrt",
    "sigmoid", "sign", "sin",    "sinh", "sqrt",  "tan",   "tanh", "trunc", "zero"};

// In place, of lists and lists, numbers, or lists of numbers.
constexpr const char* kBinary[] = {"add",       "sub",     "mul",     "div",  "clamp_max",
                                   "clamp_min", "maximum", "minimum", "lerp", "pow"};

}  // namespace

std::vector<Rule> list_rules() {
  std::vector<Rule> rules;
  const auto in_place = [&](const std::string& name, const char* overload) {
    rules.push_back({.op = "aten::_foreach_" + name + "_" + overload, .alternatives = item_by_item});
  };
  for (const char* name : kUnary) in_place(name, "");
  for (const char* name : kBinary) {
    for (const char* overload : {".Scalar", ".List", ".ScalarList"}) in_place(name, overload);
  }
  for (const char* name : {"add", "mul", "div"}) in_place(name, ".Tensor");
  for (const char* name : {"addcmul", "addcdiv"}) {
    for (const char* overload : {".Scalar", ".ScalarList", ".Tensor"}) in_place(name, overload);
  }
  in_place("copy", "");
  for (const char* op : kFused) rules.push_back({.op = op, .alternatives = alike});
  return rules;
}

}  // namespace lockstep::dtensor_internal::rules
