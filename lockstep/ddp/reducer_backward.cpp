// The reducer's part of the backward pass: gradients come, buckets fill and go, averages are handed back.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/ddp/internal/nursery.h"
#include "lockstep/ddp/internal/sparse.h"
#include "lockstep/ddp/mixed_precision.h"
#include "lockstep/ddp/reducer.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// memcpy is quicker than copy_ at every size (half a microsecond of dispatch when small, 5 to 15 % when large and cold),
// but above this size copy_ can use the threads a rank may have.
constexpr std::size_t kPlainCopyBytes = 256 * 1024;

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.strides() == b.strides();
}

// Both of the same sizes; `to` dense. Runs below autograd.
void copy_dense(const at::Tensor& to, const at::Tensor& from) {
  const std::size_t n_bytes = to.nbytes();
  const bool one_thread = n_bytes <= kPlainCopyBytes || at::get_num_threads() == 1;
  const bool same_bytes = to.scalar_type() == from.scalar_type() && to.strides() == from.strides();
  if (one_thread && same_bytes && !from.is_conj() && !from.is_neg()) {
    if (n_bytes != 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), n_bytes);
  } else {
    to.copy_(from);
  }
}

std::size_t sparse_bytes(const at::Tensor& tensor) {
  return tensor._indices().nbytes() + tensor._values().nbytes();
}

}  // namespace

void Reducer::on_gradient(std::size_t index, const at::Tensor& incoming) {
  const bool arrived = incoming.defined();
  if (options_.precisions) options_.precisions->on_gradient();
  if (searches() && arrived) used_here_.data_ptr<int>()[index] = 1;  // inside no_sync, too
  if (!reducing_) {
    if (n_expected_ == 0 || failure_) return widen(index);
    begin();
  }
  if (learns()) {
    if (!arrived) return;
    if (firings_[index]++ == 0) arrival_.push_back(index);
    return widen(index);
  }
  if (static_graph_ && (!arrived || !counts_down(index))) return widen(index);
  incoming_index_ = index;
  incoming_ = incoming;
  mark_ready(index);
  incoming_.reset();
}

void Reducer::widen(std::size_t index) {
  if (!options_.precisions) return;
  const at::Tensor gradient = access_->get(parameters_[index]);
  if (!gradient.defined() || gradient.scalar_type() == gradient_types_[index]) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  access_->set(parameters_[index], gradient.to(gradient_types_[index]));
}

void Reducer::on_outputs_reached() {
  if (nursery_) nursery_->open();
}

void Reducer::on_backward_begins() {
  on_outputs_reached();
  if (reducing_ || n_expected_ == 0 || failure_) return;
  // torch::autograd::grad comes by here as well, and accumulates nothing.
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  const auto accumulates = [&](const auto& node) {
    const auto found = chosen->find(node.get());
    return found != chosen->end() && found->second.needed_;
  };
  if (chosen == nullptr || chosen->empty() || std::ranges::any_of(accumulators_, accumulates)) begin();
}

void Reducer::begin() {
  reducing_ = true;
  clock_.backward_begins(parameters_.size(), buckets_.size());
  ending_ = false;
  n_launched_ = 0;
  divisor_ = count_ ? count_() : options_.group->size();
  std::fill(ready_.begin(), ready_.end(), 0);
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto& indices = plan_[b];
    buckets_[b].n_pending = indices.size();
    // Something may be left over from no_sync.
    const auto matters = [&](std::size_t i) {
      return awaited(i) || (searches() && used_here_.const_data_ptr<int>()[i] != 0);
    };
    buckets_[b].skipped =
        options_.skip_all_reduce_unused_params && !learns() && std::ranges::none_of(indices, matters);
  }
  if (learns()) {
    arrival_.clear();
    return queue(&Reducer::reduce_learnt);
  }
  to_come_ = firings_;
  if (!stats_.has_rebuilt_buckets && !static_graph_) arrival_.clear();
  if (searches()) queue(&Reducer::settle);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!awaited(i)) mark_ready(i);
  }
}

bool Reducer::awaited(std::size_t index) const {
  return static_graph_ ? firings_[index] != 0 : !searches() || reached_[index] != 0;
}

void Reducer::queue(void (Reducer::*step)()) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), step] { ((*self).*step)(); });
}

// True when this was the last time the hook fires in this pass.
bool Reducer::counts_down(std::size_t index) {
  if (firings_[index] == 0) {
    try {
      raise(ErrorKind::kUsage,
            cat(describe(index),
                " got a gradient, but none in the first backward pass: the graph changed, which ",
                "static_graph excludes. Leave static_graph off, or set find_unused_parameters instead."));
    } catch (...) {
      fail("in backward()");
    }
  }
  return to_come_[index] == 0 || --to_come_[index] == 0;  // 0 already: mark_ready says so
}

void Reducer::mark_ready(std::size_t index) {
  const Place place = places_[index];
  Bucket& bucket = buckets_[place.bucket];
  try {
    if (ready_[index] != 0) raise_marked_twice(index);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    bucket.is_sparse ? store_sparse(index, bucket) : store_gradient(index, bucket.views[place.slot]);
  } catch (...) {
    fail("in backward()");
  }
  ready_[index] = 1;
  if (!stats_.has_rebuilt_buckets && !static_graph_) arrival_.push_back(index);
  --bucket.n_pending;
  clock_.parameter_ready(index, place.bucket, bucket.n_pending == 0);
  if (place.bucket == n_launched_) launch_full_buckets();
}

// The end of a backward pass with find_unused_parameters: what has not come will not. It belongs to a forward pass whose
// outputs had no part in this one.
void Reducer::settle() {
  if (nursery_) nursery_->close();
  ending_ = true;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (ready_[i] == 0) mark_ready(i);
  }
}

// The end of a static graph's first backward pass: everything is reduced now, whatever the order.
void Reducer::reduce_learnt() {
  if (nursery_) nursery_->close();
  ending_ = true;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    used_here_.data_ptr<int>()[i] = firings_[i] != 0 ? 1 : 0;
    if (firings_[i] == 0) arrival_.push_back(i);  // last
    mark_ready(i);
  }
}

void Reducer::check_gradient(std::size_t index, const at::Tensor& gradient) const {
  if (gradient.layout() != at::kStrided) {
    raise(ErrorKind::kUnsupported,
          cat("the gradient of ", describe(index), " is a ", gradient.layout(),
              " tensor; sparse gradients are expected of Embedding and EmbeddingBag with sparse=true only"));
  }
  const bool other_type = gradient.scalar_type() != items_[index].dtype && !options_.reduce_dtype;
  if (other_type || gradient.sizes() != parameters_[index].sizes()) {
    raise(ErrorKind::kUsage,
          cat("the gradient of ", describe(index), " is ", gradient.scalar_type(), gradient.sizes(),
              ", its bucket holds ", items_[index].dtype, parameters_[index].sizes(),
              "; parameters must not change type or size after wrapping"));
  }
}

void Reducer::copy_into(std::size_t index, const at::Tensor& view, const at::Tensor& gradient) {
  if (gradient.strides() != view.strides() && !warned_strides_) {
    warned_strides_ = true;
    log(LogLevel::kWarn,
        cat("DistributedDataParallel: the gradient of ", describe(index), " has strides ", gradient.strides(),
            ", its bucket ", view.strides(), "; this is no error but copies slower. Said once."));
  }
  copy_dense(view, gradient);
}

void Reducer::store_gradient(std::size_t index, at::Tensor& view) {
  const at::Tensor gradient = access_->get(parameters_[index]);
  if (gradient.defined()) check_gradient(index, gradient);
  if (large_[index] != 0) return store_large(index, gradient, view);
  if (!gradient.defined()) {
    view.zero_();
    return;
  }
  // Perhaps nobody uses it: then it must come out of the reduction as it went in.
  if (options_.gradient_as_bucket_view && is_idle(index)) kept_[index] = gradient.clone();
  if (same_memory(gradient, view)) return;
  copy_into(index, view, gradient);
  if (options_.gradient_as_bucket_view) access_->set(parameters_[index], view);
}

// Where it lies, if autograd made it in the group's memory and it is nobody else's; otherwise a copy there.
void Reducer::store_large(std::size_t index, const at::Tensor& gradient, at::Tensor& piece) {
  if (!gradient.defined()) {
    piece = nursery_->make(parameters_[index]).zero_();
    return;
  }
  const bool idle = is_idle(index);
  if (!idle &&
      nursery_->bore(gradient, parameters_[index], incoming_index_ == index ? incoming_ : at::Tensor())) {
    piece = gradient.detach();
    ++stats_.n_born;
    return;
  }
  piece = nursery_->make(parameters_[index]);
  copy_into(index, piece, gradient);
  if (options_.gradient_as_bucket_view && !idle) access_->set(parameters_[index], piece);
}

// This rank did not use it in the pass: perhaps nobody did, and its gradient must stay what it was.
bool Reducer::is_idle(std::size_t index) const {
  return static_graph_ ? firings_[index] == 0 : searches() && used_here_.const_data_ptr<int>()[index] == 0;
}

// A copy, already divided: the reduction works in place, and what was accumulated must survive a failure.
void Reducer::store_sparse(std::size_t index, Bucket& bucket) {
  const at::Tensor& parameter = parameters_[index];
  const at::Tensor gradient = access_->get(parameter);
  if (!gradient.defined()) {
    if (awaited(index) && !searches()) {
      raise(ErrorKind::kUsage, cat("the gradient of ", describe(index),
                                   " is undefined; with sparse=true every backward pass must reach it, or "
                                   "find_unused_parameters be set"));
    }
    bucket.flat = internal::no_entries(parameter);
  } else if (gradient.layout() == at::kSparse) {
    bucket.flat = gradient.div(static_cast<double>(divisor_));
  } else {
    raise(ErrorKind::kUsage, cat("the gradient of ", describe(index), " is a ", gradient.layout(),
                                 " tensor, and sparse=true was said of its layer"));
  }
}

void Reducer::launch_full_buckets() {
  while (n_launched_ < buckets_.size() && buckets_[n_launched_].n_pending == 0) {
    try {
      clock_.bucket_started(n_launched_);
      launch(n_launched_);
    } catch (...) {
      fail(cat("starting to reduce bucket ", n_launched_, " of ", buckets_.size()));
    }
    ++n_launched_;
  }
  if (n_launched_ < buckets_.size()) return;
  if (used_.defined() && (searches() || learns())) reduce_used();
  if (shadowing_) return;
  ending_ ? finalise() : queue(&Reducer::finalise);
}

bool Reducer::is_last(std::size_t b) const {
  return std::none_of(
      buckets_.begin() + static_cast<std::ptrdiff_t>(b) + 1, buckets_.end(),
      [](const Bucket& later) { return !later.is_sparse && !later.skipped && later.n_bytes != 0; });
}

void Reducer::launch(std::size_t b) {
  Bucket& bucket = buckets_[b];
  if (bucket.is_sparse) {
    bucket.works = {
        all_reduce(bucket.flat, {.group = options_.group, .async_op = true, .where = options_.where})};
    clock_.bucket_posted(b);  // the ranks have met to count entries
    return;
  }
  if (bucket.skipped || bucket.n_bytes == 0) return;
  if (!hook_.run) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (bucket.flat.defined()) start(b, bucket.flat);
    for (std::size_t slot = 0; slot < bucket.views.size(); ++slot) {
      const at::Tensor& view = bucket.views[slot];
      if (large_[plan_[b][slot]] != 0) start(b, view.as_strided({view.numel()}, {1}));
    }
    return;
  }
  std::vector<at::Tensor> parameters;
  for (const std::size_t i : plan_[b]) parameters.push_back(parameters_[i]);
  GradBucket seen(b, bucket.flat, bucket.views, std::move(parameters), is_last(b));
  bucket.future = hook_.run(seen);
  if (!bucket.future)
    raise(ErrorKind::kUsage, cat("the communication hook ", hook_.name, " returned no future"));
  clock_.bucket_awaits(b, bucket.future);
}

void Reducer::start(std::size_t b, const at::Tensor& flat) {
  // Averaging belongs to the reduction: no pass of its own, and one rounding less than dividing first.
  const bool all = divisor_ == options_.group->size();
  if (!all) flat.div_(divisor_);
  clock_.bucket_posted(b);
  buckets_[b].works.push_back(all_reduce(flat, {.op = all ? ReduceOp::kAvg : ReduceOp::kSum,
                                                .group = options_.group,
                                                .async_op = true,
                                                .where = options_.where}));
}

// Every rank takes part in every pass, whether it has unused parameters or not.
void Reducer::reduce_used() {
  try {
    shadowing_ ? used_.zero_() : used_.copy_(used_here_);
    used_work_ = all_reduce(used_, {.group = options_.group, .async_op = true, .where = options_.where});
  } catch (...) {
    fail("starting to sum up which parameters were used");
  }
}

void Reducer::wait_for(std::size_t b) {
  Bucket& bucket = buckets_[b];
  if (!bucket.future) {
    const std::vector<Work> works = std::exchange(bucket.works, {});
    for (const Work& work : works) work.wait();
    if (!works.empty()) clock_.bucket_done(b, works.back());
    return;
  }
  const GradFuture future = std::exchange(bucket.future, nullptr);
  await(future, options_.group->timeout(), cat("the communication hook ", hook_.name));
  clock_.bucket_done(b);
  const at::Tensor result = hook_result(*future, hook_.name, bucket.flat);
  if (!result.is_alias_of(bucket.flat) || result.const_data_ptr() != bucket.flat.const_data_ptr())
    bucket.flat.copy_(result.view({-1}));
}

void Reducer::finalise() {
  if (nursery_) nursery_->close();  // what optimizers allocate is theirs
  Clock::duration waited{};
  std::uint64_t n_bytes = 0;
  std::size_t n_reduced = 0;
  const bool counted = searches() || learns();
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    try {
      const Clock::time_point start = Clock::now();
      wait_for(b);
      if (b == 0 && counted) std::exchange(used_work_, Work()).wait();
      waited += Clock::now() - start;
      if (buckets_[b].skipped && !buckets_[b].is_sparse) {
        let_go_of_large(b);
        continue;
      }
      n_bytes += buckets_[b].is_sparse ? sparse_bytes(buckets_[b].flat) : buckets_[b].n_bytes;
      ++n_reduced;
      hand_back(b);
      let_go_of_large(b);
    } catch (...) {
      fail(cat("reducing bucket ", b, " of ", buckets_.size()));
    }
  }
  try {
    if (on_averages_end_) on_averages_end_();
  } catch (...) {
    fail("updating parameters");
  }
  try {
    for (const GradFuture& future : std::exchange(awaited_too_, {}))
      await(future, options_.group->timeout(), "the buffer hook");
  } catch (...) {
    fail("waiting for the buffer hook");
  }
  if (!shadowing_) note_unused();
  kept_.clear();
  reducing_ = false;
  backward_seen_ = true;
  --n_expected_;
  ++stats_.n_reductions;
  stats_.n_bytes_reduced += n_bytes;
  stats_.n_buckets_reduced += n_reduced;
  stats_.last_n_buckets_reduced = n_reduced;
  stats_.last_exposed_seconds = std::chrono::duration<double>(waited).count();
  stats_.exposed_seconds += stats_.last_exposed_seconds;
  clock_.backward_ends();
}

void Reducer::note_unused() {
  if (!used_here_.defined()) return;
  int* const used = used_here_.data_ptr<int>();
  std::vector<unsigned char> unused(parameters_.size());
  stats_.unused_bytes = 0;
  for (std::size_t i = 0; i < unused.size(); ++i) {
    unused[i] = used[i] == 0;
    if (unused[i] != 0) stats_.unused_bytes += items_[i].n_bytes;
    if (searches()) used[i] = 0;
  }
  if (stats_.n_reductions != 0 && unused != unused_before_) stats_.can_set_static_graph = false;
  if (searches() && stats_.n_reductions == 0 && stats_.unused_bytes == 0) {
    log(LogLevel::kWarn,
        "DistributedDataParallel: find_unused_parameters is set and the first backward pass used every "
        "parameter; the "
        "search costs a walk over the graph in each step. Leave it off if that is always so. Said once.");
  }
  unused_before_ = std::move(unused);
}

void Reducer::hand_back(std::size_t b) {
  Bucket& bucket = buckets_[b];
  if (bucket.is_sparse) {
    const std::size_t index = plan_[b].front();
    at::Tensor reduced = std::exchange(bucket.flat, {});
    if (used_.defined() && used_.const_data_ptr<int>()[index] == 0) {
      if (shadowing_) access_->set(parameters_[index], {});
      return;
    }
    const bool used_up = on_average_ && on_average_(parameters_[index], reduced);
    return access_->set(parameters_[index], used_up ? at::Tensor() : std::move(reduced));
  }
  for (std::size_t slot = 0; slot < bucket.views.size(); ++slot)
    hand_back_one(plan_[b][slot], bucket.views[slot]);
}

void Reducer::hand_back_one(std::size_t index, const at::Tensor& view) {
  const at::Tensor& parameter = parameters_[index];
  // Used by nobody: the gradient stays what it was, none or an old one.
  if (used_.defined() && used_.const_data_ptr<int>()[index] == 0) {
    if (shadowing_) access_->set(parameter, {});
    if (const auto kept = kept_.find(index); kept != kept_.end()) view.copy_(kept->second);
    return;
  }
  at::Tensor average = view.to(gradient_types_[index]);  // the view itself, but for mixed precision
  if (on_average_ && on_average_(parameter, average)) return access_->set(parameter, {});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor gradient = access_->get(parameter);
  const bool large = large_[index] != 0;
  if (options_.gradient_as_bucket_view || (large && !gradient.defined())) {
    if (!gradient.defined() || shadowing_ || (large && is_idle(index))) {
      access_->set(parameter, view);
    } else if (!same_memory(gradient, view)) {
      raise(ErrorKind::kUsage,
            cat("the gradient of ", describe(index), " is not the view of its bucket; with ",
                "gradient_as_bucket_view nothing may replace .grad during backward()"));
    }
  } else if (gradient.defined() && gradient.scalar_type() == gradient_types_[index]) {
    if (!same_memory(gradient, view)) copy_dense(gradient, view);
  } else if (!average.is_same(view)) {
    access_->set(parameter, std::move(average));
  } else {
    at::Tensor fresh = at::empty_strided(view.sizes(), view.strides(), view.options());
    copy_dense(fresh, view);
    access_->set(parameter, std::move(fresh));
  }
}

// They belong to Tensor::grad() alone, or to the pool again.
void Reducer::let_go_of_large(std::size_t b) {
  for (std::size_t slot = 0; slot < buckets_[b].views.size(); ++slot) {
    if (large_[plan_[b][slot]] != 0) buckets_[b].views[slot].reset();
  }
}

}  // namespace lockstep
