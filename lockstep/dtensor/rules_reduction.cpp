// Reductions over some dimensions, and operators that work along one dimension and must see all of it.
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sum.h>

#include <cmath>

#include "lockstep/dtensor/internal/decide.h"
#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal::rules {
namespace {

using LettersFn = std::function<void(const OpCall&, Letters&)>;

// The dimensions of argument "dim" (all when it has none) disappear, or stay with size 1; `op` joins what
// ranks have of them. Without `op` they must not be sharded.
LettersFn reducing(std::optional<ReduceOp::Kind> op) {
  return [op](const OpCall& call, Letters& letters) {
    const auto ndim = call.inputs()[0].ndim();
    const auto reduced = call.dims("dim", ndim);
    const bool keep = call.flag("keepdim");
    // Letters are the input's dimensions by number. A reduced one has no place in the result: when it is
    // sharded, the result is partial with `op`.
    std::vector<int> result;
    for (std::size_t d = 0; d < reduced.size(); ++d) {
      const int letter = reduced[d] && !op ? Letters::kNone : static_cast<int>(d);
      letters.inputs[0][d] = letter;
      if (!reduced[d]) result.push_back(letter);
      if (reduced[d] && keep) result.push_back(Letters::kNone);
    }
    for (auto& dims : letters.results) dims = result;
    for (auto& reduce : letters.reduce) reduce = op;
  };
}

// Elementwise, but for the dimensions of an argument, along which the operator works.
LettersFn along(const char* argument) {
  return [argument](const OpCall& call, Letters& letters) {
    elementwise(call, letters);
    const auto chosen = call.dims(argument, call.inputs()[0].ndim());
    const auto lock = [&](std::vector<int>& dims) {
      for (std::size_t d = 0; d < dims.size() && d < chosen.size(); ++d) {
        if (chosen[d]) dims[d] = Letters::kNone;
      }
    };
    for (auto& dims : letters.inputs) lock(dims);
    for (auto& dims : letters.results) lock(dims);
  };
}

// The number of elements of the whole tensor that one element of the result stands for. Of the global sizes:
// the same on every rank, whatever its piece holds.
double reduced_count(const OpCall& call) {
  const auto& input = call.inputs()[0];
  const auto reduced = call.dims("dim", input.ndim());
  double count = 1;
  for (std::size_t d = 0; d < reduced.size(); ++d) {
    if (reduced[d]) count *= static_cast<double>(input.sizes[d]);
  }
  return count;
}

std::optional<at::ScalarType> dtype_of(const OpCall& call) {
  const auto at = call.op().argument("dtype");
  if (at < 0 || call.value(at).isNone()) return std::nullopt;
  return call.value(at).toScalarType();
}

// Ranks may hold different numbers of rows: each adds up its own and divides by the number of all.
void local_mean(LocalCall& local) {
  const auto& call = local.call;
  const auto input = local.arguments()[0].toTensor();
  const auto dims = call.integers("dim");
  const bool keep = call.flag("keepdim");
  const auto dtype = dtype_of(call);
  auto mean = dims.empty() && !keep ? at::sum(input, dtype) : at::sum(input, dims, keep, dtype);
  mean.div_(reduced_count(call));
  torch::jit::drop(local.stack, call.op().arguments.size());
  local.stack.emplace_back(std::move(mean));
}

double norm_order(const OpCall& call) {
  auto at = call.op().argument("ord");
  if (at < 0) at = call.op().argument("p");
  if (at < 0 || call.value(at).isNone()) return 2;
  return call.value(at).toScalar().toDouble();
}

// A norm is the root of a sum of powers, a maximum or a minimum: ranks compute the part before the root.
std::optional<ReduceOp::Kind> norm_reduction(double order) {
  if (std::isinf(order)) return order > 0 ? ReduceOp::kMax : ReduceOp::kMin;
  return ReduceOp::kSum;
}

void norm_letters(const OpCall& call, Letters& letters) {
  reducing(norm_reduction(norm_order(call)))(call, letters);
}

void local_norm(LocalCall& local) {
  const auto& call = local.call;
  const auto order = norm_order(call);
  const auto input = local.arguments()[0].toTensor();
  const auto dims = call.integers("dim");
  auto norm = at::linalg_vector_norm(input, order,
                                     dims.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims),
                                     call.flag("keepdim"), dtype_of(call));
  // Order 0 counts elements, which is a sum already; infinite orders are an extremum and have no root.
  if (!std::isinf(order) && order != 0) norm.pow_(order);
  torch::jit::drop(local.stack, call.op().arguments.size());
  local.stack.emplace_back(std::move(norm));
}

void finish_norm(const OpCall& call, std::vector<at::Tensor>& results) {
  const auto order = norm_order(call);
  if (!std::isinf(order) && order != 0) results[0] = results[0].pow(1.0 / order);
}

Rule reduction(const char* op, ReduceOp::Kind kind) {
  return {.op = op,
          .letters = reducing(kind),
          .linear = kind == ReduceOp::kSum ? Linear::kTogether : Linear::kNone,
          .linear_if = converts_linearly};
}

}  // namespace

std::vector<Rule> reduction_rules() {
  std::vector<Rule> rules{
      reduction("aten::sum", ReduceOp::kSum),
      reduction("aten::sum.dim_IntList", ReduceOp::kSum),
      reduction("aten::nansum", ReduceOp::kSum),
      reduction("aten::count_nonzero.dim_IntList", ReduceOp::kSum),
      reduction("aten::amax", ReduceOp::kMax),
      reduction("aten::amin", ReduceOp::kMin),
      reduction("aten::max", ReduceOp::kMax),
      reduction("aten::min", ReduceOp::kMin),
      reduction("aten::prod", ReduceOp::kProduct),
      reduction("aten::prod.dim_int", ReduceOp::kProduct),
      reduction("aten::any", ReduceOp::kBor),
      reduction("aten::any.dim", ReduceOp::kBor),
      reduction("aten::any.dims", ReduceOp::kBor),
      reduction("aten::all", ReduceOp::kBand),
      reduction("aten::all.dim", ReduceOp::kBand),
      reduction("aten::all.dims", ReduceOp::kBand),
  };
  // Not linear: how many elements of a sum are not zero is not the sum of how many are not zero.
  for (auto& rule : rules) {
    if (rule.op.find("nonzero") != std::string::npos || rule.op == "aten::nansum")
      rule.linear = Linear::kNone;
  }
  for (const char* op : {"aten::mean", "aten::mean.dim"}) {
    rules.push_back({.op = op,
                     .letters = reducing(ReduceOp::kSum),
                     .linear = Linear::kTogether,
                     .linear_if = converts_linearly,
                     .local = local_mean});
  }
  for (const char* op : {"aten::linalg_vector_norm", "aten::norm.Scalar", "aten::norm.ScalarOpt_dim",
                         "aten::norm.ScalarOpt_dim_dtype"}) {
    rules.push_back({.op = op,
                     .letters = norm_letters,
                     .depends_on_number = true,
                     .local = local_norm,
                     .finish = finish_norm});
  }
  // Each needs its dimensions whole.
  for (const char* op :
       {"aten::argmax", "aten::argmin", "aten::max.dim", "aten::min.dim", "aten::median.dim",
        "aten::nanmedian.dim", "aten::mode", "aten::kthvalue", "aten::var.correction", "aten::std.correction",
        "aten::var_mean.correction", "aten::std_mean.correction", "aten::logsumexp", "aten::aminmax"}) {
    rules.push_back({.op = op, .letters = reducing(std::nullopt)});
  }
  rules.push_back({.op = "aten::cumsum", .letters = along("dim"), .linear = Linear::kTogether});
  for (const char* op : {"aten::cumprod", "aten::logcumsumexp", "aten::cummax", "aten::cummin", "aten::sort",
                         "aten::sort.stable", "aten::topk"}) {
    rules.push_back({.op = op, .letters = along("dim")});
  }
  rules.push_back({.op = "aten::flip", .letters = along("dims"), .linear = Linear::kMove});
  rules.push_back({.op = "aten::roll", .letters = along("dims"), .linear = Linear::kMove});
  return rules;
}

}  // namespace lockstep::dtensor_internal::rules
