// Softmax and losses. A softmax over a sharded dimension exchanges one maximum and one sum per row instead of
// gathering the row, and the negative log-likelihood of sharded classes is found by the rank that has the
// class: cross entropy over a sharded vocabulary (loss_parallel) is these operators, nothing more.
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "lockstep/dtensor/internal/local_help.h"
#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal::rules {
namespace {

// Losses that compare two tensors element by element. reduction: none, or a sum (also of a mean, see below).
void loss_letters(const OpCall& call, Letters& letters) {
  elementwise(call, letters);
  if (call.integer("reduction", at::Reduction::Mean) == at::Reduction::None) return;
  for (auto& dims : letters.results) dims.clear();
  for (auto& reduce : letters.reduce) reduce = ReduceOp::kSum;
}
double loss_count(const OpCall& call) {
  std::size_t ndim = 0;
  for (const auto& input : call.inputs()) ndim = std::max(ndim, input.sizes.size());
  double count = 1;
  for (std::size_t d = 0; d < ndim; ++d) {
    std::int64_t size = 1;
    for (const auto& input : call.inputs()) {
      const auto lead = ndim - input.sizes.size();
      if (d >= lead && input.sizes[d - lead] != 1) size = input.sizes[d - lead];
    }
    count *= static_cast<double>(size);
  }
  return count;
}
// A mean over the whole is not the mean of ranks' means: the sum, divided by the number of all elements.
void local_loss(LocalCall& local) {
  const auto at = local.call.op().argument("reduction");
  const bool mean = local.call.integer("reduction", at::Reduction::Mean) == at::Reduction::Mean;
  if (mean) local.arguments()[at] = static_cast<std::int64_t>(at::Reduction::Sum);
  local.run();
  if (mean) local.stack.back() = local.stack.back().toTensor().div(loss_count(local.call));
}

// The dimension a softmax normalises over, counted from the front.
std::int64_t softmax_dim(const OpCall& call) {
  const auto dim = call.integer("dim");
  return dim < 0 ? dim + call.inputs()[0].ndim() : dim;
}

// A row of nothing but minus infinity becomes zeros (attention whose mask leaves nothing): rows stay whole.
void whole_rows(const OpCall& call, Letters& letters) {
  elementwise(call, letters);
  const auto dim = static_cast<std::size_t>(softmax_dim(call));
  letters.inputs[0][dim] = letters.results[0][dim] = Letters::kNone;
}

void local_softmax(LocalCall& local) {
  const auto dim = softmax_dim(local.call);
  const auto& layout = *local.decision.inputs[0];
  if (!shards(layout, dim)) return local.run();
  const bool logarithm = local.call.op().name == "aten::_log_softmax";
  const auto x = local.arguments()[0].toTensor();
  auto sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = 1;
  // The row's maximum is subtracted so that exp() cannot overflow; with the global maximum, every rank's
  // powers are of one scale.
  // A rank without elements has no maximum; it must not be anybody's.
  auto most = x.size(dim) > 0 ? x.amax(dim, true)
                              : at::full(sizes, -std::numeric_limits<double>::infinity(), x.options());
  reduce_over(layout, dim, most, ReduceOp::kMax);
  const auto shifted = x - most;
  const auto powers = shifted.exp();
  auto sum = powers.sum(dim, true);
  reduce_over(layout, dim, sum, ReduceOp::kSum);
  give(local, logarithm ? shifted - sum.log() : powers / sum);
}

// grad - exp(output) * sum(grad), and output * (grad - sum(grad * output)).
void local_softmax_backward(LocalCall& local) {
  const auto dim = softmax_dim(local.call);
  const auto& layout = *local.decision.inputs[0];
  if (!shards(layout, dim)) return local.run();
  const bool logarithm = local.call.op().name == "aten::_log_softmax_backward_data";
  const auto gradient = local.arguments()[0].toTensor();
  const auto output = local.arguments()[1].toTensor();
  auto sum = (logarithm ? gradient : gradient * output).sum(dim, true);
  reduce_over(layout, dim, sum, ReduceOp::kSum);
  give(local, logarithm ? gradient - output.exp() * sum : output * (gradient - sum));
}

// self [n, c], target [n]: the losses of rows, weighted by class. c sharded: a row counts on the rank that
// has its class.
void nll_letters(const OpCall& call, Letters& letters) {
  if (call.inputs()[0].sizes.size() != 2) return;
  letters.inputs[0] = {'n', 'c'};
  letters.one_range = 'c';
  letters.inputs[1][0] = 'n';
  if (call.integer("reduction", at::Reduction::Mean) == at::Reduction::None) letters.results[0] = {'n'};
  for (auto& reduce : letters.reduce) reduce = ReduceOp::kSum;
}

// Which rows have a class of this rank, and which of its classes.
struct Owned {
  at::Tensor rows;     // bool [n]
  at::Tensor classes;  // long [n]; 0 where the row is another rank's
  at::Tensor weights;  // [n]: of the row's class; 0 where it is another rank's
};
Owned owned_rows(const LocalCall& local, const at::Tensor& self, const at::Tensor& target,
                 const c10::IValue& weight) {
  const auto input = static_cast<std::size_t>(local.call.input_of("self"));
  const auto& layout = *local.decision.inputs[input];
  const auto offset = offset_of(layout, local.call.inputs()[input].sizes.vec(), 1);
  const auto own = target.sub(offset);
  const auto rows = own.ge(0)
                        .logical_and_(own.lt(self.size(1)))
                        .logical_and_(target.ne(local.call.integer("ignore_index")));
  const auto classes = own.masked_fill(rows.logical_not(), 0);
  const bool weighted = weight.isTensor() && weight.toTensor().defined();
  auto weights = !weighted
                     ? at::ones_like(target, self.options())
                     : weight.toTensor().index_select(0, target.clamp(0, weight.toTensor().size(0) - 1));
  return {rows, classes, weights.masked_fill(rows.logical_not(), 0)};
}

void local_nll(LocalCall& local) {
  const auto reduction = local.call.integer("reduction", at::Reduction::Mean);
  const auto at = local.call.op().argument("reduction");
  if (!shards(*local.decision.inputs[0], 1)) {
    if (reduction == at::Reduction::Mean)
      local.arguments()[at] = static_cast<std::int64_t>(at::Reduction::Sum);
    return local.run();
  }
  const auto self = local.arguments()[0].toTensor();
  const auto found = owned_rows(local, self, local.arguments()[1].toTensor(), local.arguments()[2]);
  auto losses = self.size(1) == 0
                    ? at::zeros_like(found.weights)
                    : self.gather(1, found.classes.unsqueeze(1)).squeeze(1).neg() * found.weights;
  losses = losses.masked_fill(found.rows.logical_not(), 0);  // a row of another rank may hold infinity here
  auto total = found.weights.sum();
  if (reduction == at::Reduction::None) total = at::zeros_like(total);
  give(local, reduction == at::Reduction::None ? losses : losses.sum());
  local.stack.emplace_back(std::move(total));
}

// The weight of all rows is known only now.
void finish_nll(const OpCall& call, std::vector<at::Tensor>& results) {
  if (call.integer("reduction", at::Reduction::Mean) == at::Reduction::Mean)
    results[0] = results[0].div(results[1]);
}

void nll_backward_letters(const OpCall& call, Letters& letters) {
  const auto self = static_cast<std::size_t>(call.input_of("self"));
  if (call.inputs()[self].sizes.size() != 2) return;
  letters.inputs[self] = {'n', 'c'};
  letters.one_range = 'c';
  letters.inputs[static_cast<std::size_t>(call.input_of("target"))][0] = 'n';
  if (call.inputs()[0].sizes.size() == 1) letters.inputs[0][0] = 'n';
  letters.results[0] = {'n', 'c'};
}

void local_nll_backward(LocalCall& local) {
  const auto input = static_cast<std::size_t>(local.call.input_of("self"));
  if (!shards(*local.decision.inputs[input], 1)) return local.run();
  const auto* arguments = local.arguments();
  const auto self = arguments[1].toTensor();
  const auto found = owned_rows(local, self, arguments[2].toTensor(), arguments[3]);
  auto slopes = arguments[0].toTensor().neg() * found.weights;
  if (local.call.integer("reduction") == at::Reduction::Mean) slopes = slopes / arguments[6].toTensor();
  auto result = at::zeros_like(self);
  if (self.size(1) > 0) {
    // Rows of other ranks add zero to class 0.
    result.scatter_add_(1, found.classes.unsqueeze(1),
                        slopes.masked_fill(found.rows.logical_not(), 0).unsqueeze(1));
  }
  give(local, std::move(result));
}

}  // namespace

std::vector<Rule> loss_rules() {
  std::vector<Rule> rules{
      {.op = "aten::_softmax", .letters = elementwise, .local = local_softmax},
      {.op = "aten::_log_softmax", .letters = elementwise, .local = local_softmax},
      {.op = "aten::_safe_softmax", .letters = whole_rows},
      {.op = "aten::_softmax_backward_data", .letters = elementwise, .local = local_softmax_backward},
      {.op = "aten::_log_softmax_backward_data", .letters = elementwise, .local = local_softmax_backward},
      {.op = "aten::nll_loss_forward", .letters = nll_letters, .local = local_nll, .finish = finish_nll},
      {.op = "aten::nll_loss_backward", .letters = nll_backward_letters, .local = local_nll_backward},
  };
  for (const char* op :
       {"aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss", "aten::binary_cross_entropy",
        "aten::binary_cross_entropy_with_logits", "aten::soft_margin_loss"}) {
    rules.push_back({.op = op, .letters = loss_letters, .local = local_loss});
  }
  for (const char* op :
       {"aten::mse_loss_backward", "aten::smooth_l1_loss_backward", "aten::huber_loss_backward",
        "aten::binary_cross_entropy_backward", "aten::soft_margin_loss_backward"}) {
    rules.push_back({.op = op, .letters = elementwise, .local = local_loss});
  }
  return rules;
}

}  // namespace lockstep::dtensor_internal::rules
