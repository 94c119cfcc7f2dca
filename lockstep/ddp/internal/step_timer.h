// Timestamps of one training step, and the timer that records them.
//
// Reading the clock for every gradient of every step would cost more than computing some of them, so steps
// are sampled: the first ten, to see how training starts, then one in a hundred. In all others every call
// here is one test of a flag. Thread safety: the calls of a step are sequential, like its gradients.
// Callbacks of a communication hook's future and of the graph may run on other threads and write their
// timestamps to separate atomics.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/logging_data.h"
#include "lockstep/group/work.h"

namespace lockstep::internal {

// One bucket of one step. 0: did not happen.
struct BucketTimes {
  std::int64_t ready = 0;    // the last gradient was copied into it
  std::int64_t started = 0;  // passed to the group, or to the communication hook
  std::int64_t done = 0;     // the group or the hook's future completed it, waited for or not
};

// Stamps are nanoseconds of CLOCK_MONOTONIC, which all ranks of a host share.
struct StepTimes {
  std::int64_t forward_start = 0;
  std::int64_t forward_end = 0;
  // backward() reached an output of forward(); if no tensor was found in these, the first gradient arrived.
  std::int64_t backward_start = 0;
  std::int64_t compute_end = 0;                 // the last gradient arrived
  std::int64_t backward_end = 0;                // the averages were delivered
  std::vector<std::int64_t> parameter_ready{};  // by parameter
  std::vector<std::size_t> ready_order{};       // parameters in order of arrival
  std::vector<BucketTimes> buckets{};

  std::int64_t forward_time() const { return forward_end - forward_start; }
  std::int64_t compute_time() const { return compute_end - backward_start; }
  // While any bucket was being reduced; and the part of it before compute_end, overlapped with computation.
  std::int64_t comm_time() const { return comm_until(backward_end); }
  std::int64_t overlap_time() const { return comm_until(compute_end); }

 private:
  std::int64_t comm_until(std::int64_t end) const;
};

class StepTimer final {
 public:
  static constexpr std::uint64_t kFirstSteps = 10;

  // Every rate-th step after the first ten. Raises kUsage below 1.
  void set_sample_rate(std::int64_t rate);
  std::int64_t sample_rate() const { return static_cast<std::int64_t>(rate_); }
  // True from forward_begins() to backward_ends() of a sampled step.
  bool samples() const { return samples_; }

  // `step` is the number of the backward pass to be reduced, from 1. Decides whether it is sampled.
  void forward_begins(std::uint64_t step) {
    samples_ = step <= kFirstSteps || step % rate_ == 0;
    if (samples_) open();
  }
  void forward_ends() {
    if (samples_) now_.forward_end = stamp();
  }
  // Records the begin of the backward pass when it reaches `output`. Only while samples().
  void begins_at(const at::Tensor& output);
  void backward_begins(std::size_t n_parameters, std::size_t n_buckets) {
    if (samples_) begin(n_parameters, n_buckets);
  }
  void parameter_ready(std::size_t index, std::size_t bucket, bool fills_it) {
    if (samples_) note_ready(index, bucket, fills_it);
  }
  void bucket_started(std::size_t b) {
    if (samples_) now_.buckets[b].started = posted_[b] = stamp();
  }
  // When starting took long: the Work's duration counts from here.
  void bucket_posted(std::size_t b) {
    if (samples_) posted_[b] = stamp();
  }
  void bucket_awaits(std::size_t b, const GradFuture& future) {
    if (samples_) await_future(b, future);
  }
  // After a successful wait: `work` for a bucket without a future.
  void bucket_done(std::size_t b, const Work& work) {
    if (samples_) note_done(b, work);
  }
  void bucket_done(std::size_t b) {
    if (samples_) note_done(b);
  }
  // Discards the current step, if any.
  void leave_out() { samples_ = false; }
  void backward_ends() {
    if (samples_) close();
  }

  // The last completely recorded step; all zero before the first.
  const StepTimes& last() const { return last_; }
  struct Times {
    std::int64_t forward = 0, compute = 0, comm = 0, overlap = 0;
  };
  // Means over all recorded steps.
  Times average() const;
  std::uint64_t n_recorded() const { return n_recorded_; }

 private:
  static std::int64_t stamp() { return Deadline::now().monotonic_ns(); }
  void open();
  void begin(std::size_t n_parameters, std::size_t n_buckets);
  void note_ready(std::size_t index, std::size_t bucket, bool fills_it);
  void await_future(std::size_t b, const GradFuture& future);
  void note_done(std::size_t b, const Work& work);
  void note_done(std::size_t b);
  void close();

  using Slot =
      std::shared_ptr<std::atomic<std::int64_t>>;  // shared with the callback that writes the timestamp
  std::uint64_t rate_ = kDefaultLoggingSampleRate;
  bool samples_ = false;
  StepTimes now_, last_;
  Slot backward_seen_;
  std::vector<Slot> future_done_;     // by bucket; null without a future
  std::vector<std::int64_t> posted_;  // by bucket
  Times sum_;
  std::uint64_t n_recorded_ = 0;
};

}  // namespace lockstep::internal
