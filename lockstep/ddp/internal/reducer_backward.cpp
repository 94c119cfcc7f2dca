// The reducer's part of the backward pass: gradients come, buckets fill and go, averages are handed back.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/ddp/internal/reducer.h"
#include "lockstep/ddp/mixed_precision.h"

namespace lockstep::internal {
namespace {

using Clock = std::chrono::steady_clock;

std::size_t sparse_bytes(const at::Tensor& tensor) {
  return tensor._indices().nbytes() + tensor._values().nbytes();
}

}  // namespace

void Reducer::on_gradient(std::size_t index, const at::Tensor& incoming) {
  const bool arrived = incoming.defined();
  if (options_.precisions) options_.precisions->on_gradient();
  if (searches() && arrived) used_here_.data_ptr<int>()[index] = 1;  // inside no_sync, too
  if (!reducing_) {
    find_context();
    if (n_expected_ == 0 || failure_) {
      widen(index);
      context_.reset();
      return;
    }
    begin();
  }
  if (learns()) {
    if (!arrived) return;
    if (use_counts_[index]++ == 0) arrival_.push_back(index);
    return widen(index);
  }
  if (static_graph_ && (!arrived || !counts_down(index))) return widen(index);
  mark_ready(index, incoming);
}

void Reducer::widen(std::size_t index) {
  if (!options_.precisions) return;
  const at::Tensor gradient = access().get(parameters_[index]);
  if (!gradient.defined() || gradient.scalar_type() == buckets_.own_type(index)) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  access().set(parameters_[index], gradient.to(buckets_.own_type(index)));
}

void Reducer::on_outputs_reached() {
  buckets_.open_pool();
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
  if (chosen == nullptr || chosen->empty() || std::ranges::any_of(hooks_.accumulators(), accumulates)) {
    find_context();
    begin();
  }
}

void Reducer::find_context() {
  context_ = options_.access ? nullptr : current_gradients();
}

void Reducer::begin() {
  reducing_ = true;
  // What earlier passes left in Tensor::grad() must survive one of a context, which fills the buckets with the context's.
  if (context_ && options_.gradient_as_bucket_view) buckets_.unalias();
  timer_.backward_begins(parameters_.size(), buckets_.size());
  ending_ = false;
  n_launched_ = 0;
  divisor_ = count_ ? count_() : options_.group->size();
  ready_.assign(parameters_.size(), 0);
  progress_.assign(buckets_.size(), {});
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto indices = buckets_.indices(b);
    progress_[b].n_pending = indices.size();
    // Something may be left over from no_sync.
    const auto matters = [&](std::size_t i) {
      return awaited(i) || (searches() && used_here_.const_data_ptr<int>()[i] != 0);
    };
    progress_[b].skipped =
        options_.skip_all_reduce_unused_params && !learns() && std::ranges::none_of(indices, matters);
  }
  if (learns()) {
    arrival_.clear();
    return queue(&Reducer::reduce_learnt);
  }
  to_come_ = use_counts_;
  if (!buckets_.has_been_rebuilt() && !static_graph_) arrival_.clear();
  if (searches()) queue(&Reducer::settle);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!awaited(i)) mark_ready(i);
  }
}

bool Reducer::awaited(std::size_t index) const {
  return static_graph_ ? use_counts_[index] != 0 : !searches() || reached_[index] != 0;
}

void Reducer::queue(void (Reducer::*step)()) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), step] { ((*self).*step)(); });
}

// True when this was the last time the hook fires in this pass.
bool Reducer::counts_down(std::size_t index) {
  if (use_counts_[index] == 0) {
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

void Reducer::mark_ready(std::size_t index, const at::Tensor& incoming) {
  const GradientBuckets::Place place = buckets_.place(index);
  GradientBucket& bucket = buckets_[place.bucket];
  try {
    if (ready_[index] != 0) raise_marked_twice(index);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    bucket.is_sparse ? store_sparse(index, bucket)
                     : store_gradient(index, bucket.views[place.slot], incoming);
  } catch (...) {
    fail("in backward()");
  }
  ready_[index] = 1;
  if (!buckets_.has_been_rebuilt() && !static_graph_) arrival_.push_back(index);
  const bool full = --progress_[place.bucket].n_pending == 0;
  timer_.parameter_ready(index, place.bucket, full);
  if (place.bucket == n_launched_) launch_full_buckets();
}

// The end of a backward pass with find_unused_parameters: what has not come will not. It belongs to a forward pass whose
// outputs had no part in this one.
void Reducer::settle() {
  buckets_.close_pool();
  ending_ = true;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (ready_[i] == 0) mark_ready(i);
  }
}

// The end of a static graph's first backward pass: everything is reduced now, whatever the order.
void Reducer::reduce_learnt() {
  buckets_.close_pool();
  ending_ = true;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    used_here_.data_ptr<int>()[i] = use_counts_[i] != 0 ? 1 : 0;
    if (use_counts_[i] == 0) arrival_.push_back(i);  // last
    mark_ready(i);
  }
}

void Reducer::launch_full_buckets() {
  while (n_launched_ < buckets_.size() && progress_[n_launched_].n_pending == 0) {
    try {
      timer_.bucket_started(n_launched_);
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
  for (std::size_t later = b + 1; later < buckets_.size(); ++later) {
    const GradientBucket& bucket = buckets_[later];
    if (!bucket.is_sparse && !progress_[later].skipped && bucket.n_bytes != 0) return false;
  }
  return true;
}

void Reducer::launch(std::size_t b) {
  GradientBucket& bucket = buckets_[b];
  Progress& progress = progress_[b];
  if (bucket.is_sparse) {
    progress.works = {
        all_reduce(bucket.flat, {.group = options_.group, .async_op = true, .where = options_.where})};
    timer_.bucket_posted(b);  // the ranks have met to count entries
    return;
  }
  if (progress.skipped || bucket.n_bytes == 0) return;
  if (!hook_.run) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (bucket.flat.defined()) start(b, bucket.flat);
    for (std::size_t slot = 0; slot < bucket.views.size(); ++slot) {
      const at::Tensor& view = bucket.views[slot];
      if (buckets_.in_place(buckets_.indices(b)[slot])) start(b, view.as_strided({view.numel()}, {1}));
    }
    return;
  }
  std::vector<at::Tensor> parameters;
  for (const std::size_t i : buckets_.indices(b)) parameters.push_back(parameters_[i]);
  GradBucket seen(b, bucket.flat, bucket.views, std::move(parameters), is_last(b));
  progress.future = hook_.run(seen);
  if (!progress.future)
    raise(ErrorKind::kUsage, cat("the communication hook ", hook_.name, " returned no future"));
  timer_.bucket_awaits(b, progress.future);
}

void Reducer::start(std::size_t b, const at::Tensor& flat) {
  // Averaging belongs to the reduction: no pass of its own, and one rounding less than dividing first.
  const bool all = divisor_ == options_.group->size();
  if (!all) flat.div_(divisor_);
  timer_.bucket_posted(b);
  progress_[b].works.push_back(all_reduce(flat, {.op = all ? ReduceOp::kAvg : ReduceOp::kSum,
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
  GradientBucket& bucket = buckets_[b];
  Progress& progress = progress_[b];
  if (!progress.future) {
    const std::vector<Work> works = std::exchange(progress.works, {});
    for (const Work& work : works) work.wait();
    if (!works.empty()) timer_.bucket_done(b, works.back());
    return;
  }
  const GradFuture future = std::exchange(progress.future, nullptr);
  await(future, options_.group->timeout(), cat("the communication hook ", hook_.name));
  timer_.bucket_done(b);
  const at::Tensor result = hook_result(*future, hook_.name, bucket.flat);
  if (!result.is_alias_of(bucket.flat) || result.const_data_ptr() != bucket.flat.const_data_ptr())
    bucket.flat.copy_(result.view({-1}));
}

void Reducer::finalise() {
  buckets_.close_pool();  // what optimizers allocate is theirs
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
      if (progress_[b].skipped && !buckets_[b].is_sparse) {
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
  context_.reset();
  reducing_ = false;
  backward_seen_ = true;
  --n_expected_;
  ++stats_.n_reductions;
  stats_.n_bytes_reduced += n_bytes;
  stats_.n_buckets_reduced += n_reduced;
  stats_.last_n_buckets_reduced = n_reduced;
  stats_.last_exposed_seconds = std::chrono::duration<double>(waited).count();
  stats_.exposed_seconds += stats_.last_exposed_seconds;
  timer_.backward_ends();
}

void Reducer::note_unused() {
  if (!used_here_.defined()) return;
  int* const used = used_here_.data_ptr<int>();
  std::vector<unsigned char> unused(parameters_.size());
  stats_.unused_bytes = 0;
  for (std::size_t i = 0; i < unused.size(); ++i) {
    unused[i] = used[i] == 0;
    if (unused[i] != 0) stats_.unused_bytes += buckets_.item(i).n_bytes;
    if (searches()) used[i] = 0;
  }
  if (stats_.n_reductions != 0 && unused != unused_before_) stats_.can_set_static_graph = false;
  if (searches() && stats_.n_reductions == 0 && stats_.unused_bytes == 0) {
    log(LogLevel::kWarn,
        "DistributedDataParallel: find_unused_parameters is set and the first backward pass used every "
        "parameter; the search costs a walk over the graph in each step. Leave it off if that is always so. "
        "Said once.");
  }
  unused_before_ = std::move(unused);
}

}  // namespace lockstep::internal
