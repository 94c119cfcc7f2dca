// PowerSGD (Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
// Optimization", 2019): a gradient matrix M, n by m, is sent as two thin factors, n by r and m by r.
//
//   auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{.matrix_approximation_rank = 2});
//   model->register_comm_hook(powerSGD_hook(state));
//
// One step of one matrix, on every rank, all sums over the ranks:
//   M <- M + error                           error feedback from earlier steps
//   Q <- orthogonal(Q of the last step)      the first time: random normals, the same on all ranks
//   P <- orthogonal(mean of M Q)
//   Q <- mean of M^T P
//   error <- M - P Q^T;  gradient <- P Q^T
// (torch sums P instead of averaging it; the normalisation cancels the factor, but here `epsilon` is relative
// to the mean.)
//
// The two exchanges of all buckets must be started in the same order on all ranks, and only the thread that
// runs backward() has such an order. So a bucket's second exchange starts there, too: when the next bucket is
// full, or immediately for the last bucket, after waiting for its first exchange. In between, the first
// exchange overlaps with backward(); the product P Q^T is computed on "ls-completion". A late first exchange
// blocks backward() at that point.
//
// A column of Q that has become zero, as after a step without gradients, is redrawn; torch's stays zero
// forever. A NaN or an infinity in one rank's gradients makes the bucket's gradients NaN on all ranks in that
// step, and error and Q are reset: the next step is valid again.
// Every rank computes P Q^T itself: bitwise equal on identical machines with equal numbers of threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "lockstep/base/bytes.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/group/process_group.h"

namespace lockstep {

namespace internal {
class PowerSGDExchange;
class SeedSequence;
}  // namespace internal

// Names and defaults are torch's.
struct PowerSGDOptions {
  Group group{};  // null: the default group
  // r. 1 or 2 is usual; min(n, m) where a matrix is smaller.
  std::int64_t matrix_approximation_rank = 1;
  // Number of initial steps with plain averaging: early gradients are not of low rank. At least 2 with error
  // feedback or warm start, since DistributedDataParallel rebuilds its buckets after the first step.
  std::int64_t start_powerSGD_iter = 1000;
  // A matrix is compressed when (n + m) r * rate < n m; others, such as biases, are averaged uncompressed.
  double min_compression_rate = 2;
  // Adds the compression error of earlier steps to each gradient. Off: smaller steps, worse models, one
  // gradient copy less.
  bool use_error_feedback = true;
  // Starts from the last Q: half the iterations of the power method. Off: a new random Q each step.
  bool warm_start = true;
  // Added to norms in Gram-Schmidt (r <= 2, half types). Zero columns are harmless without it, too.
  double orthogonalization_epsilon = 0;
  std::uint32_t random_seed = 0;  // the same on all ranks
  // Steps between two log lines about the compression (level info).
  std::int64_t compression_stats_logging_frequency = 10'000;
  // Matrices of one shape in a bucket are multiplied in one call: faster for many small ones, at the cost of
  // one more copy.
  bool batch_tensors_with_same_shape = false;
};

struct CompressionStats {
  double compress_rate = 0;  // numel_before / numel_after; 0 before the first compressed step
  std::uint64_t numel_before = 0;
  std::uint64_t numel_after = 0;
};

// The hook's state between steps, one per model; held by shared_ptr, since callbacks may outlive the model.
// Thread safety: used by backward(); do not call anything here meanwhile.
class PowerSGDState final : public std::enable_shared_from_this<PowerSGDState> {
 public:
  // Raises kUsage for a rank, frequency or rate that is not positive, a negative epsilon, and a
  // start_powerSGD_iter that is too small.
  explicit PowerSGDState(PowerSGDOptions options = {});
  ~PowerSGDState();
  PowerSGDState(const PowerSGDState&) = delete;
  PowerSGDState& operator=(const PowerSGDState&) = delete;

  const PowerSGDOptions& options() const { return options_; }  // the group filled in
  // Completed steps: reduced backward passes.
  std::int64_t iter() const { return iter_; }
  // Elements before and after compression, since it started.
  CompressionStats compression_stats() const;
  // Of a bucket, 1-D: the error of the last step, and its Q, all matrices concatenated. Undefined before the
  // first.
  at::Tensor error(std::size_t bucket) const;
  at::Tensor q(std::size_t bucket) const;

  // Everything except the group, as bytes (lockstep/object). Each rank saves its own: errors differ.
  Bytes save() const;
  // A null group means the default one, with a warning. Raises kUsage for other or corrupt bytes.
  static std::shared_ptr<PowerSGDState> load(std::span<const std::uint8_t> bytes,
                                             CommHookOptions options = {});

 private:
  friend CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);
  friend CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state);
  friend class internal::PowerSGDExchange;
  enum class Form : std::uint8_t { kPerMatrix, kBatched };
  struct Memory {
    at::Tensor error, q;
    at::Tensor p, padded;  // buffers for the first exchange and for the square matrix
  };
  struct Saved;

  GradFuture run(GradBucket& bucket, Form form);
  void end_step();
  void advance_pending(std::size_t next_bucket);

  PowerSGDOptions options_;
  std::int64_t iter_ = 0;
  std::int64_t next_stats_report_ = 0;
  CompressionStats stats_;
  std::unique_ptr<internal::SeedSequence> seeds_;
  std::map<std::size_t, Memory> memory_;                 // by bucket; node addresses are stable
  std::shared_ptr<internal::PowerSGDExchange> pending_;  // between its two exchanges
};

// Per parameter: each gradient is a matrix, its first dimension by all others.
CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);
// Per bucket: all its elements, padded with zeros, form one square matrix. Faster but less accurate: the
// matrix has no structure, so a low rank approximates it badly. For experiments; min_compression_rate and
// batch_tensors_with_same_shape have no effect here.
CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state);

}  // namespace lockstep
