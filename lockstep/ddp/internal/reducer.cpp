#include "lockstep/ddp/internal/reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/ddp/internal/flat_broadcast.h"
#include "lockstep/ddp/mixed_precision.h"
#include "lockstep/tensor/detail/local_shard.h"
#include "lockstep/tensor/gradient_access.h"

namespace lockstep::internal {
namespace {

constexpr std::size_t kNamesInMessage = 20;

void check_parameter(const at::Tensor& parameter, const std::string& name, c10::Device device) {
  const bool usable = device.is_cpu() || device.is_cuda();
  if (!usable || parameter.layout() != at::kStrided) {
    base::raise(
        ErrorKind::kUnsupported,
        base::cat("DistributedDataParallel: parameter ", name, " is a ", parameter.layout(), " tensor on ",
                  parameter.device().str(), "; only dense parameters on the CPU or a GPU are supported"));
  }
  if (parameter.device() == device) return;
  const bool one_type = parameter.device().type() == device.type();
  base::raise(one_type ? ErrorKind::kUnsupported : ErrorKind::kUsage,
              base::cat("DistributedDataParallel: parameter ", name, " is on ", parameter.device().str(),
                        ", others are on ", device.str(), "; all parameters must be on one device"));
}

// Of other ranks' contexts, which this rank has no part in.
class DiscardGradients final : public GradientAccess {
 public:
  at::Tensor get(const at::Tensor&) const override { return {}; }
  void set(const at::Tensor&, at::Tensor) override {}
};

Readiness make_readiness(std::size_t n_parameters, const ReducerOptions& options) {
  if (options.static_graph) return Readiness(StaticGraph(n_parameters, options.group, options.where));
  if (options.find_unused_parameters)
    return Readiness(SearchedParameters(n_parameters, options.group, options.where));
  return Readiness(AllParameters(n_parameters));
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                         ReducerOptions options) {
  if (!options.group) base::raise(ErrorKind::kUsage, "Reducer: a group is required");
  if (parameters.size() != names.size())
    base::raise(ErrorKind::kUsage, "Reducer: one name per parameter is required");
  if (!options.sparse.empty() && options.sparse.size() != parameters.size())
    base::raise(ErrorKind::kUsage, "Reducer: `sparse` has one entry per parameter, or none");
  for (std::size_t i = 0; i < parameters.size(); ++i)
    check_parameter(parameters[i], names[i], parameters.front().device());
  return std::shared_ptr<Reducer>(new Reducer({std::move(names), std::move(parameters)}, std::move(options)));
}

// Order of members is order of dependence: each refers to those before it. The hooks come last, since a
// gradient may arrive as soon as they exist, and go first.
Reducer::Reducer(NamedTensors parameters, ReducerOptions options)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      sharded_(std::ranges::any_of(parameters_.tensors, has_shards)),
      access_(of_shards(options_.access ? options_.access : std::make_shared<GradField>())),
      buckets_(parameters_.tensors, {.group = options_.group,
                                     .caps = options_.caps,
                                     .sparse = options_.sparse,
                                     .reduce_dtype = options_.reduce_dtype,
                                     .pooled = !options_.reduce_dtype && !options_.precisions,
                                     .in_place_bytes = options_.in_place_bytes,
                                     .where = options_.where}),
      readiness_(make_readiness(parameters_.tensors.size(), options_)),
      transfer_(parameters_, buckets_,
                {.views = options_.gradient_as_bucket_view, .casts = options_.reduce_dtype.has_value()}),
      exchange_(buckets_, timer_, options_.group, options_.where),
      pass_({parameters_, buckets_, readiness_, transfer_, exchange_, timer_}, options_.group->timeout()),
      hooks_(parameters_.tensors,
             [this](std::size_t index, const at::Tensor& incoming) { on_gradient(index, incoming); }) {
  buckets_.build_first(/*for_good=*/!readiness_.has_one_order());
}

// ---- forward ----

// One step, as calls of this class:
//
//   forward    prepare_for_forward()       after the first backward: rebuild the buckets by order of arrival
//              expect_backward(outputs)    count it; search the graph where that is asked for
//   backward   on_backward_begins(), or the first on_gradient(): begin() the pass
//              on_gradient()               per parameter: deposit; buckets that are full start, in order
//   its end    finish()                    queued with libtorch: wait, deliver bucket by bucket, count it off
void Reducer::prepare_for_forward() {
  check_finalized();
  check_unchanged();
  any_forward_ = true;
  if (!options_.precisions) hooks_.follow();  // else renewed whenever parameters have been shortened
  if (!buckets_.has_been_rebuilt() && stats_.n_reductions != 0 && readiness_.has_one_order())
    rebuild_by_arrival();
}

// Collective: all ranks rebuild in the same forward pass, in rank 0's order. A rank that shadows has no order
// of its own and gives the current one.
void Reducer::rebuild_by_arrival() {
  std::vector<std::size_t> order(readiness_.arrival().begin(), readiness_.arrival().end());
  if (order.size() != parameters_.tensors.size()) {
    // No pass of this rank's own has shown an order.
    order.clear();
    for (const auto& indices : buckets_.plan()) order.insert(order.end(), indices.begin(), indices.end());
  }
  try {
    buckets_.agree_on_order(order);
  } catch (const Error& error) {
    raise_forward_alone(error);
  }
  guarded([&] {
    try {
      buckets_.rebuild_by_arrival(order);
    } catch (...) {
      raise_while("rebuilding the gradient buckets");
    }
  });
  readiness_.stop_recording();
}

// libtorch drops the accumulator, and our hook with it, when a parameter changes its type: gradients would
// silently no longer be averaged.
void Reducer::check_unchanged() const {
  if (options_.precisions && options_.precisions->is_short()) return;
  for (std::size_t i = 0; i < parameters_.tensors.size(); ++i) {
    const at::Tensor parameter = local_shard(parameters_.tensors[i]);
    const BucketItem& item = buckets_.item(i);
    const at::ScalarType own_type = buckets_.own_type(i);
    const std::size_t n_bytes = item.n_bytes / c10::elementSize(item.dtype) * c10::elementSize(own_type);
    if (parameter.scalar_type() == own_type && parameter.nbytes() == n_bytes &&
        parameter.device() == item.device) {
      continue;
    }
    base::raise(ErrorKind::kUsage,
                base::cat("DistributedDataParallel: ", describe_parameter(parameters_, i), " was ", own_type,
                          " of ", n_bytes, " bytes when it was wrapped and is ", parameter.scalar_type(),
                          " of ", parameter.nbytes(), " bytes on ", parameter.device().str(),
                          " now; convert or resize the module first, then wrap it"));
  }
}

// n_expected_ counts forward passes whose backward has not come yet. The first forward pass after a backward
// begins a new count: outputs that no backward has used by then will not be used.
void Reducer::expect_backward(std::span<const at::Tensor> outputs) {
  if (backward_seen_) n_expected_ = 0;
  const bool first = n_expected_ == 0;
  backward_seen_ = false;
  ++n_expected_;
  if (readiness_.searches()) search(outputs, first);
}

void Reducer::expect_local_backward(std::span<const at::Tensor> outputs) {
  if (backward_seen_) n_expected_ = 0;
  if (n_expected_ != 0 && readiness_.searches()) search(outputs, false);
}

// Beyond a tensor that came from another worker nothing can be searched; its way back here leads through one
// of the context's entries. What they lead to may be more than the pass comes to: on_graph_end() takes care
// of the rest.
void Reducer::search(std::span<const at::Tensor> outputs, bool first) {
  const auto context = current_gradients();
  const auto entries = context ? context->entry_nodes() : std::vector<compat::NodePtr>{};
  readiness_.on_forward(
      {.outputs = outputs, .entries = entries, .accumulators = hooks_.accumulators(), .first = first});
}

// Before the first reduction only: ranks that changed the reduction in different steps would call different
// collectives.
void Reducer::register_comm_hook(CommHook hook) {
  if (!hook.run) base::raise(ErrorKind::kUsage, "register_comm_hook: the hook is empty");
  if (exchange_.hook().run) {
    base::raise(ErrorKind::kUsage,
                base::cat("register_comm_hook: ", exchange_.hook().name,
                          " is registered already; a model has one hook, and hooks can be chained"));
  }
  if (pass_.active() || stats_.n_reductions != 0)
    base::raise(ErrorKind::kUsage, "register_comm_hook: too late, gradients have been reduced already");
  exchange_.set_hook(std::move(hook));
  buckets_.give_up_pool();
}

void Reducer::set_static_graph() {
  if (readiness_.static_graph() != nullptr) return;
  if (any_forward_)
    base::raise(ErrorKind::kUsage, "set_static_graph: too late, it must come before the first forward pass");
  readiness_ = Readiness(StaticGraph(parameters_.tensors.size(), options_.group, options_.where));
  buckets_.build_first(/*for_good=*/false);
}

void Reducer::on_average(OnAverage call, std::function<void()> end) {
  transfer_.on_average(std::move(call));
  pass_.on_delivered(std::move(end));
}

// ---- backward ----

void Reducer::on_backward_begins() {
  on_outputs_reached();
  if (pass_.active() || n_expected_ == 0 || failure_) return;
  // torch::autograd::grad runs this as well, and accumulates nothing.
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  const auto accumulates = [&](const auto& node) {
    const auto found = chosen->find(node.get());
    return found != chosen->end() && found->second.needed_;
  };
  if (chosen == nullptr || chosen->empty() || std::ranges::any_of(hooks_.accumulators(), accumulates))
    guarded([&] { begin(find_context()); });
}

// Called by a hook on libtorch's accumulator, on the thread that runs backward(). The first gradient of a
// pass begins it, unless a node at the outputs did. Outside a pass that is expected (no_sync, another model's
// loss) the gradient stays as it is.
void Reducer::on_gradient(std::size_t index, const at::Tensor& incoming) {
  const bool arrived = incoming.defined();
  if (options_.precisions) options_.precisions->on_gradient();
  if (arrived) readiness_.note_use(index);  // inside no_sync, too
  if (!pass_.active()) {
    const std::shared_ptr<GradientAccess> context = find_context();
    if (n_expected_ == 0 || failure_) return keep_local(index, context ? *context : *access_);
    guarded([&] { begin(context); });
  }
  switch (readiness_.on_gradient(index, arrived)) {
    case GradientState::kReady:
      return guarded([&] { mark_ready(index, incoming); });
    case GradientState::kMoreToCome:
      return keep_local(index, pass_.access());
    case GradientState::kUnexpected:
      break;
  }
  guarded([&] {
    base::raise(
        ErrorKind::kUsage,
        base::cat("DistributedDataParallel, in backward(): ", describe_parameter(parameters_, index),
                  " got a gradient, but none in the first backward pass: the graph changed, which ",
                  "static_graph excludes. Leave static_graph off, or set find_unused_parameters instead."));
  });
}

std::shared_ptr<GradientAccess> Reducer::find_context() const {
  return options_.access ? nullptr : of_shards(current_gradients());
}

std::shared_ptr<GradientAccess> Reducer::of_shards(std::shared_ptr<GradientAccess> whole) const {
  return whole && sharded_ ? std::make_shared<ShardGradients>(std::move(whole)) : whole;
}

void Reducer::keep_local(std::size_t index, GradientAccess& access) {
  if (options_.precisions) transfer_.keep_local(index, access);
}

// Some parameters are ready before any gradient comes: those that the search has not reached. They may fill
// whole buckets, which then start at once.
void Reducer::begin(std::shared_ptr<GradientAccess> context) {
  const bool in_context = context != nullptr;
  ending_ = false;
  pass_.begin({.access = in_context ? std::move(context) : access_,
               .in_context = in_context,
               .divisor = divisor(),
               .skip_unused = options_.skip_all_reduce_unused_params});
  readiness_.begin();
  if (readiness_.waits_for_end()) queue(&Reducer::on_graph_end);
  for (std::size_t i = 0; i < parameters_.tensors.size(); ++i) {
    if (readiness_.ready_at_once(i)) mark_ready(i);
  }
}

// The last one ends the pass, but not here: hooks of the same pass may still run. libtorch calls finish()
// when the graph is done, unless this is that call already (ending_).
void Reducer::mark_ready(std::size_t index, const at::Tensor& incoming) {
  pass_.mark_ready(index, incoming);
  if (!pass_.all_started()) return;
  ending_ ? finish() : queue(&Reducer::finish);
}

// What has not come will not: it belongs to a forward pass whose outputs had no part in this one. Or this is
// a static graph's first pass, and everything is reduced now, whatever the order.
void Reducer::on_graph_end() {
  guarded([&] {
    buckets_.close_pool();
    ending_ = true;
    readiness_.at_end();
    for (std::size_t i = 0; i < parameters_.tensors.size(); ++i) {
      if (!pass_.is_ready(i)) mark_ready(i);
    }
  });
}

void Reducer::finish() {
  guarded([&] {
    const bool own = !pass_.is_shadow();
    const ReductionPass::Totals totals = pass_.finish();
    readiness_.end(buckets_.items(), own);
    backward_seen_ = true;
    if (own) --n_expected_;
    ++stats_.n_reductions;
    stats_.n_bytes_reduced += totals.n_bytes;
    stats_.n_buckets_reduced += totals.n_buckets;
    stats_.last_n_buckets_reduced = totals.n_buckets;
    stats_.last_exposed_seconds = totals.waited_seconds;
    stats_.exposed_seconds += totals.waited_seconds;
    timer_.backward_ends();
  });
}

void Reducer::queue(void (Reducer::*step)()) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), step] { ((*self).*step)(); });
}

// ---- other ranks' passes ----

// The same collectives in the same order as a rank that trains, with zeros.
void Reducer::shadow(Shadow kind) {
  const at::NoGradGuard no_grad;  // as in backward(): hooks run here as there
  check_finalized();
  guarded([&] {
    std::shared_ptr<GradientAccess> context = find_context();
    if (kind == Shadow::kOfAContext && !context && !options_.access)
      context = std::make_shared<DiscardGradients>();
    const bool in_context = context != nullptr;
    pass_.begin({.access = in_context ? std::move(context) : access_,
                 .in_context = in_context,
                 .shadow = true,
                 .divisor = divisor()});
    pass_.start_zeros();
    finish();
  });
}

void Reducer::share_learnt(int root) {
  if (StaticGraph* const graph = readiness_.static_graph())
    graph->share(root, options_.group, options_.where);
}

// ---- errors ----

// A pass that failed half-way cannot be repeated: other ranks may have averages already. The failure stays,
// and every later call raises it.
template <class Step>
void Reducer::guarded(Step step) {
  try {
    step();
  } catch (...) {
    failure_ = base::current_failure();
    throw;
  }
}

void Reducer::check_finalized() const {
  if (failure_) {
    Failure failure = *failure_;
    failure.message =
        "the last reduction of gradients failed, and this model cannot go on: " + failure.message;
    base::raise(std::move(failure));
  }
  if (pass_.active()) raise_unfinished();
}

void Reducer::raise_unfinished() const {
  const std::vector<std::size_t> missing = pass_.missing();
  if (missing.empty()) {
    base::raise(ErrorKind::kUsage,
                "DistributedDataParallel: the last backward() ended with an error before its gradients were "
                "averaged; other "
                "ranks may hold other values now. Start again from a checkpoint.");
  }
  std::string names;
  for (const std::size_t i : std::span(missing).first(std::min(missing.size(), kNamesInMessage)))
    names += base::cat(names.empty() ? "" : ", ", i, " (", parameters_.names[i], ")");
  if (missing.size() > kNamesInMessage)
    names += base::cat(" and ", missing.size() - kNamesInMessage, " more");
  base::raise(
      ErrorKind::kUsage,
      base::cat(
          "DistributedDataParallel: the last backward() did not reach every parameter, so its gradients "
          "were not ",
          "averaged. Without a gradient on rank ", options_.group->rank(), ": ", names,
          ". Set find_unused_parameters if parameters may go unused, and use all outputs of forward() in "
          "the loss; "
          "or switch requires_grad off for these parameters before wrapping, or name them in `ignored`.",
          readiness_.static_graph() != nullptr
              ? " With static_graph every pass must use the parameters that the first one used."
              : "",
          " If backward() raised an error, that one is the cause."));
}

ReducerStats Reducer::stats() const {
  ReducerStats stats = stats_;
  stats.has_rebuilt_buckets = buckets_.has_been_rebuilt();
  stats.bucket_bytes = buckets_.bucket_bytes();
  stats.held_bytes = buckets_.held_bytes(options_.gradient_as_bucket_view);
  stats.n_in_place = transfer_.n_in_place();
  if (const UsageExchange* const usage = readiness_.usage()) {
    stats.unused_bytes = usage->unused_bytes();
    stats.can_set_static_graph = !usage->has_changed();
  }
  return stats;
}

}  // namespace lockstep::internal
