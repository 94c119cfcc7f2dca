#include "lockstep/ddp/internal/reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/ddp/internal/flat_broadcast.h"
#include "lockstep/ddp/internal/flat_views.h"
#include "lockstep/ddp/internal/gradient_pool.h"
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

// Runs on the thread that runs backward(), after the parameter's gradient was accumulated. The reducer outlives it:
// its destructor takes the hooks away.
class Reducer::Hook final : public torch::autograd::FunctionPostHook {
 public:
  Hook(Reducer& reducer, std::size_t index) : reducer_(reducer), index_(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& gradients) override {
    reducer_.on_gradient(index_, gradients.empty() ? at::Tensor() : gradients.front());
    return outputs;
  }

 private:
  Reducer& reducer_;
  const std::size_t index_;
};

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
      access_(options_.access ? options_.access : std::make_shared<GradField>()) {
  for (const at::Tensor& parameter : parameters_) {
    const bool sparse = !options_.sparse.empty() && options_.sparse[items_.size()];
    const at::ScalarType dtype = parameter.scalar_type();
    const at::ScalarType reduced =
        options_.reduce_dtype && at::isFloatingType(dtype) ? *options_.reduce_dtype : dtype;
    const auto n_elements = static_cast<std::size_t>(parameter.numel());
    items_.push_back({reduced, parameter.device(), n_elements * c10::elementSize(reduced), sparse});
    gradient_types_.push_back(dtype);
  }
  rebuilt_limits(options_.caps);  // a cap that cannot be is an error now, not in the second iteration
  static_graph_ = options_.static_graph;
  agree_on_large();
  find_large();
  build(initial_buckets(items_, options_.caps, searches()));
  const std::size_t n = parameters_.size();
  if (options_.find_unused_parameters || static_graph_) {
    const std::vector<std::int64_t> sizes{static_cast<std::int64_t>(n)};
    used_here_ = at::zeros(sizes, at::kInt);
    used_ = empty_shared(sizes, at::kInt, {.group = options_.group});
  }
  reached_.assign(n, 0);
  use_counts_.assign(n, 0);
  arrival_.reserve(parameters_.size());
  add_hooks();
}

Reducer::~Reducer() {
  remove_hooks();
}

void Reducer::add_hooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    // None for a parameter that was frozen after wrapping.
    const bool trained = parameters_[i].requires_grad();
    accumulators_.push_back(trained ? torch::autograd::impl::grad_accumulator(parameters_[i]) : nullptr);
    hook_keys_.push_back(trained ? accumulators_.back()->add_post_hook(std::make_unique<Hook>(*this, i)) : 0);
  }
}

// With two precisions they are renewed whenever parameters have been shortened.
bool Reducer::hooks_lost() const {
  if (options_.precisions) return false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto now = torch::autograd::impl::try_get_grad_accumulator(parameters_[i]);
    if (now != accumulators_[i] || (!now && parameters_[i].requires_grad())) return true;
  }
  return false;
}

void Reducer::renew_hooks() {
  std::erase_if(former_hooks_, [](const auto& former) { return former.first.expired(); });
  for (std::size_t i = 0; i < hook_keys_.size(); ++i) {
    if (!accumulators_[i]) continue;
    if (accumulators_[i] == torch::autograd::impl::try_get_grad_accumulator(parameters_[i])) {
      accumulators_[i]->del_post_hook(hook_keys_[i]);  // add_hooks comes by here again
    } else {
      former_hooks_.emplace_back(accumulators_[i], hook_keys_[i]);
    }
  }
  accumulators_.clear();
  hook_keys_.clear();
  add_hooks();
}

void Reducer::remove_hooks() noexcept {
  for (std::size_t i = 0; i < hook_keys_.size(); ++i) {
    if (accumulators_[i]) accumulators_[i]->del_post_hook(hook_keys_[i]);
  }
  for (const auto& [node, key] : former_hooks_) {
    if (const auto alive = node.lock()) alive->del_post_hook(key);
  }
  hook_keys_.clear();
  former_hooks_.clear();
}

// Ranks that differ would reduce in different steps; rank 0's word holds for all.
void Reducer::agree_on_large() {
  const auto said =
      static_cast<std::size_t>(environment_int(Var::kLockstepInPlaceBytes).value_or(128 * 1024));
  in_place_from_ = options_.in_place_bytes.value_or(said);
  if (options_.group->size() == 1) return;
  static_assert(sizeof(std::size_t) == sizeof(std::int64_t));
  const at::Tensor word = at::empty({1}, at::kLong);
  std::memcpy(word.mutable_data_ptr(), &in_place_from_, word.nbytes());
  broadcast_from(0, word, options_.group, options_.where);
  std::memcpy(&in_place_from_, word.const_data_ptr(), word.nbytes());
}

void Reducer::find_large() {
  large_.assign(parameters_.size(), 0);
  pool_ = nullptr;
  if (options_.reduce_dtype || options_.precisions || hook_.run || options_.group->size() == 1) {
    return;
  }
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool plain = !items_[i].sparse && !at::isComplexType(items_[i].dtype) &&
                       parameters_[i].is_non_overlapping_and_dense();
    if (!plain || items_[i].n_bytes < in_place_from_ || items_[i].n_bytes == 0) continue;
    large_[i] = 1;
    sizes.push_back(items_[i].n_bytes);
  }
  if (!sizes.empty()) pool_ = GradientPool::create(options_.group, sizes);
}

Reducer::Bucket Reducer::make_bucket(const std::vector<std::size_t>& indices) const {
  Bucket bucket;
  if (items_[indices.front()].sparse) {
    bucket.is_sparse = true;
    return bucket;
  }
  std::vector<at::Tensor> small;
  for (const std::size_t index : indices) {
    bucket.n_bytes += items_[index].n_bytes;
    if (large_[index] == 0) small.push_back(parameters_[index]);
  }
  bucket.views.resize(indices.size());
  if (small.empty()) return bucket;
  auto [flat, views] = flat_views(small, options_.group, items_[indices.front()].dtype);
  bucket.flat = std::move(flat);
  for (std::size_t slot = 0, next = 0; slot < indices.size(); ++slot) {
    if (large_[indices[slot]] == 0) bucket.views[slot] = std::move(views[next++]);
  }
  return bucket;
}

void Reducer::build(BucketIndices plan) {
  buckets_.clear();  // first, so that old and new memory are not held at once
  places_.assign(parameters_.size(), {});
  ready_.assign(parameters_.size(), 0);
  for (std::size_t b = 0; b < plan.size(); ++b) {
    buckets_.push_back(make_bucket(plan[b]));
    for (std::size_t slot = 0; slot < plan[b].size(); ++slot) places_[plan[b][slot]] = {b, slot};
  }
  plan_ = std::move(plan);
}

// ---- forward ----

void Reducer::prepare_for_forward() {
  check_finalized();
  check_unchanged();
  any_forward_ = true;
  if (hooks_lost()) renew_hooks();
  // Where the search may find other parameters in each pass, the order of one means little.
  if (!stats_.has_rebuilt_buckets && stats_.n_reductions != 0 && !searches()) rebuild_by_arrival();
}

void Reducer::rebuild_by_arrival() {
  // Ranks may have seen different orders; rank 0's holds for all.
  static_assert(sizeof(std::size_t) == sizeof(std::int64_t));
  at::Tensor order = at::empty({static_cast<std::int64_t>(arrival_.size())}, at::kLong);
  std::memcpy(order.mutable_data_ptr(), arrival_.data(), order.nbytes());
  try {
    broadcast_from(0, order, options_.group, options_.where);
  } catch (const Error& error) {
    raise_forward_alone(error);
  }
  std::memcpy(arrival_.data(), order.const_data_ptr(), order.nbytes());

  BucketIndices plan = rebuilt_buckets(items_, options_.caps, arrival_);
  try {
    if (plan != plan_) build(std::move(plan));
  } catch (...) {
    fail("rebuilding the gradient buckets");
  }
  stats_.has_rebuilt_buckets = true;
  if (log_enabled(LogLevel::kInfo)) {
    log(LogLevel::kInfo, cat("DistributedDataParallel: ", parameters_.size(), " parameters in ", plan_.size(),
                             " buckets by order of arrival"));
  }
}

// libtorch drops the accumulator, and our hook with it, when a parameter changes its type: gradients would silently
// no longer be averaged.
void Reducer::check_unchanged() const {
  if (options_.precisions && options_.precisions->is_short()) return;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    const std::size_t n_elements = items_[i].n_bytes / c10::elementSize(items_[i].dtype);
    const std::size_t n_bytes = n_elements * c10::elementSize(gradient_types_[i]);
    if (parameter.scalar_type() == gradient_types_[i] && parameter.nbytes() == n_bytes &&
        parameter.device() == items_[i].device) {
      continue;
    }
    raise(ErrorKind::kUsage,
          cat("DistributedDataParallel: ", describe(i), " was ", gradient_types_[i], " of ", n_bytes,
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
  mark_reached(outputs, context ? context->entry_nodes() : decltype(accumulators_){}, accumulators_, reached_);
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
  if (pool_ == nullptr) return;
  find_large();
  build(BucketIndices(plan_));
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
  if (context_ && options_.gradient_as_bucket_view) part_from_buckets();
  timer_.leave_out();
  ending_ = false;
  n_launched_ = 0;
  divisor_ = count_ ? count_() : options_.group->size();
  ++n_expected_;
  std::fill(ready_.begin(), ready_.end(), 1);
  if (!stats_.has_rebuilt_buckets && arrival_.size() != parameters_.size()) {
    // No pass of this rank's own has shown an order.
    arrival_.clear();
    for (const auto& indices : plan_) arrival_.insert(arrival_.end(), indices.begin(), indices.end());
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
  Bucket& bucket = buckets_[b];
  bucket.n_pending = 0;
  bucket.skipped = false;
  if (bucket.is_sparse) {
    bucket.flat = no_entries(parameters_[plan_[b].front()]);
    return;
  }
  if (bucket.flat.defined()) bucket.flat.zero_();
  for (std::size_t slot = 0; slot < bucket.views.size(); ++slot) {
    const std::size_t index = plan_[b][slot];
    if (large_[index] != 0) bucket.views[slot] = pool_->make(parameters_[index]).zero_();
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
  for (const Bucket& bucket : buckets_) {
    stats.bucket_bytes.push_back(bucket.n_bytes);
    if (!options_.gradient_as_bucket_view && !bucket.is_sparse && bucket.flat.defined())
      stats.held_bytes += bucket.flat.nbytes();
  }
  if (pool_) stats.held_bytes += pool_->free_bytes();
  return stats;
}

}  // namespace lockstep::internal
