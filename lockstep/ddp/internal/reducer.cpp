#include "lockstep/ddp/internal/reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/tensor/gradient_access.h"
#include "lockstep/base/text.h"
#include "lockstep/ddp/internal/flat_broadcast.h"
#include "lockstep/ddp/internal/graph.h"
#include "lockstep/ddp/internal/sparse.h"
#include "lockstep/ddp/mixed_precision.h"

namespace lockstep::internal {
namespace {

constexpr std::size_t kNamesInMessage = 20;

void check_parameter(const at::Tensor& parameter, const std::string& name) {
  if (parameter.device().is_cpu() && parameter.layout() == at::kStrided) return;
  raise(ErrorKind::kUnsupported,
        cat("DistributedDataParallel: parameter ", name, " is a ", parameter.layout(), " tensor on ",
            parameter.device().str(), "; only dense parameters on the CPU are supported"));
}

// Of other ranks' contexts, which this rank has no part in.
class DiscardGradients final : public GradientAccess {
 public:
  at::Tensor get(const at::Tensor&) const override { return {}; }
  void set(const at::Tensor&, at::Tensor) override {}
};

}  // namespace

std::shared_ptr<Reducer> Reducer::create(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                         ReducerOptions options) {
  if (!options.group) raise(ErrorKind::kUsage, "Reducer: a group is required");
  if (parameters.size() != names.size())
    raise(ErrorKind::kUsage, "Reducer: one name per parameter is required");
  if (!options.sparse.empty() && options.sparse.size() != parameters.size())
    raise(ErrorKind::kUsage, "Reducer: `sparse` has one entry per parameter, or none");
  for (std::size_t i = 0; i < parameters.size(); ++i) check_parameter(parameters[i], names[i]);
  return std::shared_ptr<Reducer>(new Reducer(std::move(parameters), std::move(names), std::move(options)));
}

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, ReducerOptions options)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      options_(std::move(options)),
      access_(options_.access ? options_.access : std::make_shared<GradField>()),
      buckets_(parameters_, {.group = options_.group,
                             .caps = options_.caps,
                             .sparse = options_.sparse,
                             .reduce_dtype = options_.reduce_dtype,
                             .pooled = !options_.reduce_dtype && !options_.precisions,
                             .in_place_bytes = options_.in_place_bytes,
                             .where = options_.where}),
      hooks_(parameters_,
             [this](std::size_t index, const at::Tensor& incoming) { on_gradient(index, incoming); }) {
  static_graph_ = options_.static_graph;
  buckets_.build_first(searches());
  const std::size_t n = parameters_.size();
  if (options_.find_unused_parameters || static_graph_) {
    const std::vector<std::int64_t> sizes{static_cast<std::int64_t>(n)};
    used_here_ = at::zeros(sizes, at::kInt);
    used_ = empty_shared(sizes, at::kInt, {.group = options_.group});
  }
  reached_.assign(n, 0);
  use_counts_.assign(n, 0);
  arrival_.reserve(parameters_.size());
}

// ---- forward ----

void Reducer::prepare_for_forward() {
  check_finalized();
  check_unchanged();
  any_forward_ = true;
  if (!options_.precisions) hooks_.follow();  // else renewed whenever parameters have been shortened
  // Where the search may find other parameters in each pass, the order of one means little.
  if (!buckets_.has_been_rebuilt() && stats_.n_reductions != 0 && !searches()) rebuild_by_arrival();
}

void Reducer::rebuild_by_arrival() {
  try {
    buckets_.agree_on_order(arrival_);
  } catch (const Error& error) {
    raise_forward_alone(error);
  }
  try {
    buckets_.rebuild_by_arrival(arrival_);
  } catch (...) {
    fail("rebuilding the gradient buckets");
  }
}

// libtorch drops the accumulator, and our hook with it, when a parameter changes its type: gradients would silently
// no longer be averaged.
void Reducer::check_unchanged() const {
  if (options_.precisions && options_.precisions->is_short()) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    const std::size_t n_elements = buckets_.item(i).n_bytes / c10::elementSize(buckets_.item(i).dtype);
    const std::size_t n_bytes = n_elements * c10::elementSize(buckets_.own_type(i));
    if (parameter.scalar_type() == buckets_.own_type(i) && parameter.nbytes() == n_bytes &&
        parameter.device() == buckets_.item(i).device) {
      continue;
    }
    raise(ErrorKind::kUsage,
          cat("DistributedDataParallel: ", describe(i), " was ", buckets_.own_type(i), " of ", n_bytes,
              " bytes when it was wrapped and is ", parameter.scalar_type(), " of ", parameter.nbytes(),
              " bytes on ", parameter.device().str(),
              " now; convert or resize the module first, then wrap it"));
  }
}

void Reducer::expect_backward(std::span<const at::Tensor> outputs) {
  if (backward_seen_) n_expected_ = 0;
  if (backward_seen_ || n_expected_ == 0) std::fill(reached_.begin(), reached_.end(), 0);
  backward_seen_ = false;
  ++n_expected_;
  if (searches()) search(outputs);
}

// Beyond a tensor that came from another worker nothing can be searched; its way back here leads through one of the context's
// entries. What they lead to may be more than the pass comes to: settle() takes care of the rest.
void Reducer::search(std::span<const at::Tensor> outputs) {
  const auto context = current_gradients();
  mark_reached(outputs, context ? context->entry_nodes() : std::vector<compat::NodePtr>{}, hooks_.accumulators(),
               reached_);
}

bool Reducer::wants_sink() const {
  const auto never = [](std::uint32_t n) { return n == 0; };
  // A static graph without parameters of ours has no hook to begin with.
  return searches() || learns() || (static_graph_ && std::ranges::all_of(use_counts_, never));
}

void Reducer::expect_local_backward(std::span<const at::Tensor> outputs) {
  if (backward_seen_) n_expected_ = 0;
  if (n_expected_ != 0 && searches()) search(outputs);
}

void Reducer::check_finalized() const {
  if (failure_) {
    Failure failure = *failure_;
    failure.message =
        "the last reduction of gradients failed, and this model cannot go on: " + failure.message;
    raise(std::move(failure));
  }
  if (reducing_) raise_unfinished();
}

void Reducer::register_comm_hook(CommHook hook) {
  if (!hook.run) raise(ErrorKind::kUsage, "register_comm_hook: the hook is empty");
  if (hook_.run) {
    raise(ErrorKind::kUsage, cat("register_comm_hook: ", hook_.name,
                                 " is registered already; a model has one hook, and hooks can be chained"));
  }
  if (reducing_ || stats_.n_reductions != 0)
    raise(ErrorKind::kUsage, "register_comm_hook: too late, gradients have been reduced already");
  hook_ = std::move(hook);
  buckets_.give_up_pool();
}

void Reducer::await_too(std::vector<GradFuture> futures) {
  for (auto& future : futures) {
    if (future) awaited_too_.push_back(std::move(future));
  }
}

void Reducer::set_static_graph() {
  if (static_graph_) return;
  if (any_forward_)
    raise(ErrorKind::kUsage, "set_static_graph: too late, it must come before the first forward pass");
  static_graph_ = true;
  if (!used_.defined()) {
    const std::vector<std::int64_t> sizes{static_cast<std::int64_t>(parameters_.size())};
    used_here_ = at::zeros(sizes, at::kInt);
    used_ = empty_shared(sizes, at::kInt, {.group = options_.group});
  }
}

// ---- other ranks' passes ----

void Reducer::launch_shadow(Shadow shadow) {
  const at::NoGradGuard no_grad;  // as in backward(): hooks run here as there
  check_finalized();
  find_context();
  if (shadow == Shadow::kOfAContext && !context_ && !options_.access)
    context_ = std::make_shared<DiscardGradients>();
  reducing_ = true;
  shadowing_ = true;
  if (context_ && options_.gradient_as_bucket_view) buckets_.unalias();
  timer_.leave_out();
  ending_ = false;
  n_launched_ = 0;
  divisor_ = count_ ? count_() : options_.group->size();
  ++n_expected_;
  ready_.assign(parameters_.size(), 1);
  progress_.assign(buckets_.size(), {});
  if (!buckets_.has_been_rebuilt() && arrival_.size() != parameters_.size()) {
    // No pass of this rank's own has shown an order.
    arrival_.clear();
    for (const auto& indices : buckets_.plan())
      arrival_.insert(arrival_.end(), indices.begin(), indices.end());
  }
  try {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (std::size_t b = 0; b < buckets_.size(); ++b) add_nothing(b);
  } catch (...) {
    fail("shadowing other ranks");
  }
  launch_full_buckets();
}

void Reducer::add_nothing(std::size_t b) {
  GradientBucket& bucket = buckets_[b];
  if (bucket.is_sparse) {
    bucket.flat = no_entries(parameters_[buckets_.indices(b).front()]);
    return;
  }
  if (bucket.flat.defined()) bucket.flat.zero_();
  for (std::size_t slot = 0; slot < bucket.views.size(); ++slot) {
    const std::size_t index = buckets_.indices(b)[slot];
    if (buckets_.in_place(index)) bucket.views[slot] = buckets_.make_in_place(index).zero_();
  }
}

void Reducer::finish_shadow() {
  const at::NoGradGuard no_grad;
  finalise();
  shadowing_ = false;
}

void Reducer::share_learnt(int speaker) {
  if (!static_graph_) return;
  at::Tensor use_counts = at::empty({static_cast<std::int64_t>(use_counts_.size())}, at::kInt);
  static_assert(sizeof(use_counts_.front()) == sizeof(int));
  std::memcpy(use_counts.mutable_data_ptr(), use_counts_.data(), use_counts.nbytes());
  broadcast_from(speaker, use_counts, options_.group, options_.where);
  std::memcpy(use_counts_.data(), use_counts.const_data_ptr(), use_counts.nbytes());
}

// ---- errors ----

void Reducer::fail(const std::string& doing) {
  Failure failure = current_failure();
  failure.message = cat("DistributedDataParallel, ", doing, ": ", failure.message);
  failure_ = failure;
  raise(std::move(failure));
}

std::string Reducer::describe(std::size_t index) const {
  return cat("parameter ", index, " (", names_[index], ")");
}

void Reducer::raise_marked_twice(std::size_t index) const {
  raise(ErrorKind::kUsage,
        cat(describe(index),
            " got its gradient twice before the first was averaged. Causes: the parameter is used ",
            "outside forward() in a second loss; the same layers are checkpointed more than once; or a part "
            "of the ",
            "model that two backward() calls share. Sum the losses and call backward() once, or put all but "
            "the last ",
            "pass in no_sync()."));
}

void Reducer::raise_unfinished() const {
  std::string missing;
  std::size_t n_missing = 0;
  for (std::size_t i = 0; i < ready_.size(); ++i) {
    if (ready_[i] != 0) continue;
    if (++n_missing <= kNamesInMessage) missing += cat(n_missing == 1 ? "" : ", ", i, " (", names_[i], ")");
  }
  if (n_missing == 0) {
    raise(ErrorKind::kUsage,
          "DistributedDataParallel: the last backward() ended with an error before its gradients were "
          "averaged; other "
          "ranks may hold other values now. Start again from a checkpoint.");
  }
  if (n_missing > kNamesInMessage) missing += cat(" and ", n_missing - kNamesInMessage, " more");
  raise(ErrorKind::kUsage,
        cat("DistributedDataParallel: the last backward() did not reach every parameter, so its gradients "
            "were not ",
            "averaged. Without a gradient on rank ", options_.group->rank(), ": ", missing,
            ". Set find_unused_parameters if parameters may go unused, and use all outputs of forward() in "
            "the loss; "
            "or switch requires_grad off for these parameters before wrapping, or name them in `ignored`.",
            static_graph_ ? " With static_graph every pass must use the parameters that the first one used."
                          : "",
            " If backward() raised an error, that one is the cause."));
}

ReducerStats Reducer::stats() const {
  ReducerStats stats = stats_;
  stats.has_rebuilt_buckets = buckets_.has_been_rebuilt();
  stats.bucket_bytes = buckets_.bucket_bytes();
  stats.held_bytes = buckets_.held_bytes(options_.gradient_as_bucket_view);
  return stats;
}

}  // namespace lockstep::internal
