#include "lockstep/ddp/internal/step_timer.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/internal/graph.h"

namespace lockstep::internal {
namespace {

// Hooks and callbacks of several threads may come: the earliest to store wins. 0 means not yet.
void put_first(std::atomic<std::int64_t>& slot, std::int64_t stamp) {
  std::int64_t none = 0;
  slot.compare_exchange_strong(none, stamp);
}

}  // namespace

// Buckets may be under way at the same time: what two share counts once.
std::int64_t StepTimes::comm_until(std::int64_t end) const {
  std::vector<BucketTimes> sorted = buckets;
  std::ranges::sort(sorted, {}, &BucketTimes::started);
  std::int64_t sum = 0;
  std::int64_t counted_to = 0;
  for (const BucketTimes& bucket : sorted) {
    if (bucket.done == 0) continue;
    const std::int64_t from = std::max(bucket.started, counted_to);
    const std::int64_t to = std::min(bucket.done, end);
    if (to <= from) continue;
    sum += to - from;
    counted_to = to;
  }
  return sum;
}

void StepTimer::set_sample_rate(std::int64_t rate) {
  if (rate < 1) {
    base::raise(ErrorKind::kUsage, base::cat("set_ddp_runtime_logging_sample_rate: every ", rate,
                                             "th step is not possible; the rate is 1 (every step) or more"));
  }
  rate_ = static_cast<std::uint64_t>(rate);
}

// Shared with hooks of graphs that may outlive this step, or never run: a new slot per step keeps a late one
// out.
void StepTimer::open() {
  now_ = {};
  future_done_.clear();
  posted_.clear();
  backward_seen_ = std::make_shared<std::atomic<std::int64_t>>(0);
  now_.forward_start = stamp();
}

void StepTimer::begins_at(const at::Tensor& output) {
  if (!samples_) return;
  on_reached({&output, 1}, [slot = backward_seen_] { put_first(*slot, stamp()); });
}

// Without a hook at the outputs the first gradient is the best that is known.
void StepTimer::begin(std::size_t n_parameters, std::size_t n_buckets) {
  const std::int64_t seen = backward_seen_->load();
  now_.backward_start = seen != 0 ? seen : stamp();
  now_.parameter_ready.assign(n_parameters, 0);
  now_.ready_order.clear();
  now_.ready_order.reserve(n_parameters);
  now_.buckets.assign(n_buckets, {});
  future_done_.assign(n_buckets, nullptr);
  posted_.assign(n_buckets, 0);
}

void StepTimer::note_ready(std::size_t index, std::size_t bucket, bool fills_it) {
  const std::int64_t at = stamp();
  now_.parameter_ready[index] = now_.compute_end = at;
  now_.ready_order.push_back(index);
  if (fills_it) now_.buckets[bucket].ready = at;
}

void StepTimer::await_future(std::size_t b, const GradFuture& future) {
  const auto slot = std::make_shared<std::atomic<std::int64_t>>(0);
  future_done_[b] = slot;
  future->addCallback([slot](c10::ivalue::Future&) { put_first(*slot, Deadline::now().monotonic_ns()); });
}

void StepTimer::note_done(std::size_t b, const Work& work) {
  if (work.sequence_number() == 0) return;  // nothing was started
  if (!work.done()) {
    // On a GPU: a stream waits for it, not this thread, and its end is not known yet.
    now_.buckets[b].done = stamp();
    return;
  }
  double ms = 0;
  try {
    ms = work.duration();
  } catch (const Error&) {
    // A group of one times nothing: it was over at once.
  }
  now_.buckets[b].done = posted_[b] + static_cast<std::int64_t>(ms * 1e6);
}

void StepTimer::note_done(std::size_t b) {
  // Its callback may be about to run: then it is over just now.
  put_first(*future_done_[b], stamp());
  now_.buckets[b].done = future_done_[b]->load();
}

void StepTimer::close() {
  now_.backward_end = stamp();
  samples_ = false;
  last_ = std::exchange(now_, {});
  sum_.forward += last_.forward_time();
  sum_.compute += last_.compute_time();
  sum_.comm += last_.comm_time();
  sum_.overlap += last_.overlap_time();
  ++n_recorded_;
}

StepTimer::Times StepTimer::average() const {
  const auto n = static_cast<std::int64_t>(std::max<std::uint64_t>(n_recorded_, 1));
  return {sum_.forward / n, sum_.compute / n, sum_.comm / n, sum_.overlap / n};
}

}  // namespace lockstep::internal
