// What DistributedDataParallel does before and after each forward pass of its module.
#include <ATen/core/grad_mode.h>

#include <memory>
#include <unordered_set>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/detail/ddp_core.h"
#include "lockstep/ddp/internal/backward_optimizers.h"
#include "lockstep/ddp/internal/buffer_sync.h"
#include "lockstep/ddp/internal/ddp_join.h"
#include "lockstep/ddp/internal/delayed_reduction.h"
#include "lockstep/ddp/internal/graph.h"
#include "lockstep/ddp/internal/hook_future.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/ddp/internal/reducer.h"

namespace lockstep {
namespace {

// Parameters are checked before the first forward pass and then at this interval only, since visiting all
// takes time.
constexpr std::uint64_t kForwardsPerLook = 100;

}  // namespace

void DdpCore::before_forward() {
  if (!buffers_) return;
  const bool joining = join_options() != nullptr;
  // The collectives of a forward pass, in an order that shadow_iteration() repeats on ranks without input:
  // the announcement (under join() only), the rebuilding of buckets (once), the buffers.
  if (joining) {
    check_answered();  // before anything is announced
    begin_iteration();
    announce();
  }
  if (at::GradMode::is_enabled()) {
    if (n_forwards_++ % kForwardsPerLook == 0) check_nothing_added();
    steps_->adopt(reduced_->tensors, delayed_->tensors);
    if (delayed_reduction_) delayed_reduction_->check();
    if (delayed_reduction_) delayed_reduction_->follow_parameters();
    if (reducer_) reducer_->prepare_for_forward();
  }
  wait_in_backward(buffers_->before_forward([&] { return joining ? join_->agreed().highest_active : 0; }));
  if (!reducer_ || !at::GradMode::is_enabled() || !*syncs_) return;
  log_statistics();
  reducer_->timer().forward_begins(reducer_->n_reductions() + 1);
}

// A parameter added after wrapping has no hook: its values would silently diverge between ranks.
void DdpCore::check_nothing_added() const {
  std::unordered_set<const at::TensorImpl*> known;
  for (const at::Tensor& tensor : known_) known.insert(tensor.unsafeGetTensorImpl());
  const internal::NamedTensors now = internal::parameters_of(*tensors_, options_.ignored);
  for (std::size_t i = 0; i < now.tensors.size(); ++i) {
    if (!now.tensors[i].requires_grad() || known.contains(now.tensors[i].unsafeGetTensorImpl())) continue;
    base::raise(
        ErrorKind::kUsage,
        base::cat("DistributedDataParallel: parameter ", now.names[i],
                  " was added to the module, or put in another's place, after it was wrapped: its gradients "
                  "would not be "
                  "averaged. Build the module completely, then wrap it; or name the parameter in `ignored`"));
  }
}

void DdpCore::wait_in_backward(std::vector<GradFuture> futures) {
  if (reducer_) return reducer_->also_wait_for(std::move(futures));
  for (const GradFuture& future : futures) {
    if (future) internal::await_hook(future, group_->timeout(), "the buffer hook");
  }
}

void DdpCore::after_forward(const std::function<void(const Visitor&)>& visit_outputs) {
  if (!buffers_) return;
  const bool synced = at::GradMode::is_enabled() && *syncs_;
  wait_in_backward(buffers_->after_forward(synced));
  if (!at::GradMode::is_enabled()) return;
  if (synced && delayed_reduction_) delayed_reduction_->expect();
  if (!reducer_) return;
  std::vector<at::Tensor> outputs;
  if (synced) {
    internal::StepTimer& timer = reducer_->timer();
    timer.forward_ends();
    if (timer.samples()) visit_outputs([&](at::Tensor& output) { timer.begins_at(output); });
  }
  // Visiting the outputs costs time, so they are collected only if something needs them. With mixed precision
  // passes inside no_sync are observed as well, since their parameters are in low precision, too.
  const bool sinks = precisions_ || (synced && reducer_->wants_sink());
  if (sinks || reducer_->wants_to_know() || reducer_->searches())
    visit_outputs([&](at::Tensor& output) { outputs.push_back(output); });
  if (synced && reducer_->searches() && outputs.empty()) {
    base::raise(
        ErrorKind::kUsage,
        "DistributedDataParallel: find_unused_parameters found no tensor in what forward() returned; "
        "list the members of its type in a lockstep_fields function (lockstep/tensor/visit_tensors.h)");
  }
  synced ? reducer_->expect_backward(outputs) : reducer_->expect_local_backward(outputs);
  if (outputs.empty()) {
    if (precisions_) precisions_->expect_unwatched();
  } else if (sinks) {
    watch(std::move(outputs), synced, visit_outputs);
  } else if (reducer_->wants_to_know()) {
    // The graph may outlive the model, so it holds the reducer weakly.
    internal::on_reached(outputs, [weak = std::weak_ptr(reducer_)] {
      if (const auto reducer = weak.lock()) reducer->on_outputs_reached();
    });
  }
}

// Adds a graph node at the outputs that announces the backward pass.
void DdpCore::watch(std::vector<at::Tensor> outputs, bool synced,
                    const std::function<void(const Visitor&)>& visit_outputs) {
  const bool announced = synced && reducer_->wants_sink();
  const auto graph =
      precisions_ ? std::make_shared<internal::LowPrecisionParameters::Graph>(precisions_) : nullptr;
  outputs = internal::pass_sink(
      outputs,
      [announced, graph, weak = std::weak_ptr(reducer_)] {
        const auto reducer = weak.lock();
        // What this pass recomputes is attached to new accumulators.
        if (graph && graph->begins() && reducer) reducer->renew_hooks();
        if (announced && reducer) reducer->on_backward_begins();
      },
      sink_clone_);
  std::size_t next = 0;
  visit_outputs([&](at::Tensor& output) { output = outputs[next++]; });
}

}  // namespace lockstep
