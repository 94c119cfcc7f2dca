#include "lockstep/ddp/mixed_precision.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep::internal {
namespace {

void check_dtype(const std::optional<at::ScalarType>& dtype, const char* name) {
  if (!dtype || at::isFloatingType(*dtype)) return;
  base::raise(ErrorKind::kUsage,
              base::cat("MixedPrecision: ", name, " is ", c10::toString(*dtype),
                        ", which is not a floating-point type; use kBFloat16, kHalf or kFloat"));
}

}  // namespace

void check_mixed_precision(const MixedPrecision& mixed, const std::vector<at::Tensor>& parameters,
                           bool views) {
  check_dtype(mixed.param_dtype, "param_dtype");
  check_dtype(mixed.reduce_dtype, "reduce_dtype");
  check_dtype(mixed.buffer_dtype, "buffer_dtype");
  // A view of a bucket has the bucket's type, and a gradient must have its parameter's.
  const std::optional<at::ScalarType> reduced = mixed.reduced_in();
  for (const at::Tensor& parameter : parameters) {
    if (!views || !reduced || !parameter.requires_grad() || !parameter.is_floating_point()) continue;
    if (parameter.scalar_type() == *reduced) continue;
    base::raise(
        ErrorKind::kUsage,
        base::cat("MixedPrecision: with gradient_as_bucket_view buckets must have the parameters' own type, ",
                  c10::toString(parameter.scalar_type()), "; set reduce_dtype to it, or leave ",
                  "gradient_as_bucket_view off"));
  }
}

LowPrecisionParameters::LowPrecisionParameters(const std::vector<at::Tensor>& parameters,
                                               at::ScalarType dtype)
    : dtype_(dtype) {
  for (const at::Tensor& parameter : parameters) {
    if (parameter.is_floating_point() && parameter.scalar_type() != dtype) parameters_.push_back(parameter);
  }
  // short_ keeps its memory from pass to pass; full_ is set only while the parameters are short.
  full_.resize(parameters_.size());
  short_.resize(parameters_.size());
}

bool LowPrecisionParameters::shorten() {
  if (torch::autograd::get_current_graph_task_id() == -1) ends_ = false;  // left over from a pass that died
  // Since an earlier forward pass, whose graph is still to be traversed: its copies serve this one, too.
  if (short_now_) return false;
  {
    // Below autograd and version counters: nothing here is part of a graph.
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      full_[i] = parameters_[i].variable_data();
      const at::Tensor from = local_shard(full_[i]);
      at::Tensor to = short_[i].defined() ? local_shard(short_[i]) : at::Tensor();
      if (!to.defined() || to.sizes() != from.sizes() || to.strides() != from.strides()) {
        to = at::empty_like(from, from.options().dtype(dtype_));
        short_[i] = with_local_shard(full_[i], to);
      }
      to.copy_(from);
    }
  }
  // Before the first set_data(): if one throws, restore() puts all of them back, also those not replaced yet.
  short_now_ = true;
  for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].set_data(short_[i]);
  return true;
}

// Called at the end of a backward pass, by the last graph, or by the destructor, whichever comes first; the
// later ones find nothing to do.
void LowPrecisionParameters::restore() noexcept {
  ends_ = false;
  unwatched_ = false;
  if (!short_now_) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_data(full_[i]);
    full_[i].reset();
  }
  short_now_ = false;
}

void LowPrecisionParameters::on_gradient() {
  if (!ends_) restore_at_end();
}

void LowPrecisionParameters::restore_at_end() {
  ends_ = true;
  // Queued once per pass (ends_). Weak: the module may be destroyed before the engine runs it.
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->restore();
  });
}

// n_open_ counts the graphs that no accumulating backward pass has begun to traverse. While there is one, the
// end of another graph's life does not restore the parameters.
LowPrecisionParameters::Graph::Graph(std::weak_ptr<LowPrecisionParameters> of) : of_(std::move(of)) {
  if (const auto precisions = of_.lock()) ++precisions->n_open_;
}

void LowPrecisionParameters::Graph::settle() {
  const auto precisions = of_.lock();
  if (precisions && std::exchange(open_, false)) --precisions->n_open_;
}

LowPrecisionParameters::Graph::~Graph() {
  settle();
  const auto precisions = of_.lock();
  if (!precisions || precisions->n_open_ != 0 || precisions->unwatched_) return;
  // Inside a backward pass, the end of the pass restores them. A pass that failed never ends, and its graph
  // is destroyed outside of it.
  const bool inside = torch::autograd::get_current_graph_task_id() != -1;
  if (!inside || !precisions->ends_) precisions->restore();
}

bool LowPrecisionParameters::Graph::begins() {
  const auto precisions = of_.lock();
  if (!precisions) return false;
  // torch::autograd::grad leaves the graph to a backward pass still to come.
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  const bool accumulates = chosen == nullptr || chosen->empty();
  if (accumulates) settle();
  const bool was_full = precisions->shorten();
  if ((accumulates || was_full) && !precisions->ends_) precisions->restore_at_end();
  return was_full;
}

}  // namespace lockstep::internal
