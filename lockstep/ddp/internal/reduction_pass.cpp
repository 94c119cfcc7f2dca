#include "lockstep/ddp/internal/reduction_pass.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/internal/hook_future.h"

namespace lockstep::internal {
namespace {

std::size_t sparse_bytes(const at::Tensor& tensor) {
  return tensor._indices().nbytes() + tensor._values().nbytes();
}

[[noreturn]] void raise_marked_twice(const NamedTensors& parameters, std::size_t index) {
  base::raise(
      ErrorKind::kUsage,
      base::cat(
          describe_parameter(parameters, index),
          " got its gradient twice before the first was averaged. Causes: the parameter is used ",
          "outside forward() in a second loss; the same layers are checkpointed more than once; or a part "
          "of the ",
          "model that two backward() calls share. Sum the losses and call backward() once, or put all but "
          "the last ",
          "pass in no_sync()."));
}

}  // namespace

void raise_while(const std::string& doing) {
  Failure failure = base::current_failure();
  failure.message = base::cat("DistributedDataParallel, ", doing, ": ", failure.message);
  base::raise(std::move(failure));
}

// A shadowing rank has no gradients of its own: all count as ready, no bucket waits for one, and
// start_zeros() follows.
void ReductionPass::begin(Begin begin) {
  active_ = true;
  begin_ = std::move(begin);
  parts_.transfer.begin({.access = begin_.access.get(),
                         .in_context = begin_.in_context,
                         .shadow = begin_.shadow,
                         .divisor = begin_.divisor});
  const GradientBuckets& buckets = parts_.buckets;
  n_started_ = 0;
  ready_.assign(buckets.n_parameters(), begin_.shadow ? 1 : 0);
  progress_.assign(buckets.size(), {});
  if (begin_.shadow) return parts_.timer.leave_out();
  parts_.timer.backward_begins(buckets.n_parameters(), buckets.size());
  const auto contributes = [&](std::size_t i) { return parts_.readiness.contributes(i); };
  for (std::size_t b = 0; b < progress_.size(); ++b) {
    progress_[b].n_pending = buckets.indices(b).size();
    // The option demands that all ranks leave the same parameters unused: a bucket that is skipped here must
    // be skipped everywhere.
    progress_[b].skipped =
        begin_.skip_unused && !buckets[b].is_sparse && std::ranges::none_of(buckets.indices(b), contributes);
  }
}

// Deposited at once, whichever bucket it is in; only starting buckets waits for those before.
void ReductionPass::mark_ready(std::size_t index, const at::Tensor& incoming) {
  try {
    if (is_ready(index)) raise_marked_twice(parts_.parameters, index);
    parts_.transfer.deposit(index, incoming, parts_.readiness.use(index));
  } catch (...) {
    raise_while("in backward()");
  }
  ready_[index] = 1;
  const std::size_t b = parts_.buckets.slot_of(index).bucket;
  const bool full = --progress_[b].n_pending == 0;
  parts_.timer.parameter_ready(index, b, full);
  if (b == n_started_) start_full_buckets();
}

void ReductionPass::start_zeros() {
  try {
    for (std::size_t b = 0; b < progress_.size(); ++b) parts_.transfer.fill_zeros(b);
  } catch (...) {
    raise_while("shadowing other ranks");
  }
  start_full_buckets();
}

// Buckets are started strictly in order, whichever is full first: every rank must post the same collectives
// in the same order. The usage map goes out once the last bucket has been started, for the same reason.
// Invariant: buckets below n_started_ have been handed to the exchange (or are skipped), none above it.
void ReductionPass::start_full_buckets() {
  while (n_started_ < progress_.size() && progress_[n_started_].n_pending == 0) {
    const std::size_t b = n_started_;
    try {
      parts_.timer.bucket_started(b);
      parts_.transfer.flush(b);
      if (!progress_[b].skipped) parts_.exchange.start(b, begin_.divisor, is_last_for_hook(b));
    } catch (...) {
      raise_while(base::cat("starting to reduce bucket ", b, " of ", progress_.size()));
    }
    ++n_started_;
  }
  if (!all_started() || !parts_.readiness.exchanges_usage()) return;
  try {
    parts_.readiness.start_usage(begin_.shadow);
  } catch (...) {
    raise_while("starting to sum up which parameters were used");
  }
}

// A hook sees which bucket is the last of the pass. Buckets that it never sees (sparse, skipped, empty) do
// not count.
bool ReductionPass::is_last_for_hook(std::size_t b) const {
  for (std::size_t later = b + 1; later < progress_.size(); ++later) {
    const GradientBucket& bucket = parts_.buckets[later];
    if (!bucket.is_sparse && !progress_[later].skipped && bucket.n_bytes != 0) return false;
  }
  return true;
}

std::vector<std::size_t> ReductionPass::missing() const {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < ready_.size(); ++i) {
    if (ready_[i] == 0) indices.push_back(i);
  }
  return indices;
}

// Of the buffer hook: what it started ends with the pass.
void ReductionPass::also_wait_for(std::vector<GradFuture> futures) {
  for (GradFuture& future : futures) {
    if (future) also_awaited_.push_back(std::move(future));
  }
}

// Waits in the order of starting. What raises leaves the pass active: gradients may be half averaged, and the
// next forward pass must say so. active_ is therefore the last thing to change.
ReductionPass::Totals ReductionPass::finish() {
  parts_.buckets.close_pool();  // what optimizers allocate is theirs
  Totals totals;
  for (std::size_t b = 0; b < progress_.size(); ++b) {
    try {
      finish_bucket(b, totals);
    } catch (...) {
      raise_while(base::cat("reducing bucket ", b, " of ", progress_.size()));
    }
  }
  try {
    if (on_delivered_) on_delivered_();
  } catch (...) {
    raise_while("updating parameters");
  }
  try {
    for (const GradFuture& future : std::exchange(also_awaited_, {}))
      await_hook(future, timeout_, "the buffer hook");
  } catch (...) {
    raise_while("waiting for the buffer hook");
  }
  parts_.transfer.end();
  begin_.access.reset();
  active_ = false;
  return totals;
}

// Delivered bucket by bucket, while later ones may still be reduced: only the time spent in wait() is
// exposed.
void ReductionPass::finish_bucket(std::size_t b, Totals& totals) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  parts_.exchange.wait(b);
  // Who used what decides what is delivered, from the first bucket on.
  if (b == 0 && parts_.readiness.exchanges_usage()) parts_.readiness.wait_usage();
  totals.waited_seconds += std::chrono::duration<double>(Clock::now() - start).count();
  if (!progress_[b].skipped) {
    const GradientBucket& bucket = parts_.buckets[b];
    totals.n_bytes += bucket.is_sparse ? sparse_bytes(bucket.flat) : bucket.n_bytes;
    ++totals.n_buckets;
    for (const std::size_t index : parts_.buckets.indices(b))
      parts_.transfer.deliver(index, parts_.readiness.use(index));
  }
  parts_.transfer.release(b);
}

}  // namespace lockstep::internal
