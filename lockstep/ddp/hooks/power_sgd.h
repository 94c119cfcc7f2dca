// PowerSGD (Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
// 2019): a gradient matrix M, n by m, travels as two thin factors, n by r and m by r.
//
//   auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{.matrix_approximation_rank = 2});
//   model->register_comm_hook(powerSGD_hook(state));
//
// One step of one matrix, on every rank, all sums over the ranks:
//   M <- M + error                           what earlier steps left out
//   Q <- orthogonal(Q of the last step)      or, the first time, of random normals, the same on all ranks
//   P <- orthogonal(mean of M Q)
//   Q <- mean of M^T P
//   error <- M - P Q^T;  gradient <- P Q^T
// (torch sums P instead of averaging it; the factor goes with the norm, but `epsilon` is compared with the mean here.)
//
// The two exchanges of a bucket and those of other buckets must come in one order on all ranks, and only the thread
// that runs backward() knows one. So a bucket's second exchange starts there, too: when the next bucket is full, or at
// once for the last bucket, whose first exchange is waited for. In between the first exchange runs beside backward();
// the product P Q^T is made on "ls-completion". A rank whose first exchange is late holds up its own backward() there.
//
// A column of Q that has become zero, as after a step without gradients, is drawn anew; torch's stays zero for ever. A
// NaN or an infinity in one rank's gradients makes all ranks' gradients of the bucket NaN in that step, and error and Q
// are then forgotten: the next step is whole again.
// All ranks compute P Q^T for themselves: the same bits on equal machines with equal numbers of threads.
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
  // Plain averaging for so many steps: early gradients are not of low rank. At least 2 with error feedback or warm
  // start, since DistributedDataParallel rebuilds its buckets after the first step.
  std::int64_t start_powerSGD_iter = 1000;
  // A matrix is compressed when (n + m) r * rate < n m; others, such as biases, are averaged as they are.
  double min_compression_rate = 2;
  // Adds to each gradient what earlier steps left out. Off: smaller steps, worse models, one gradient copy less.
  bool use_error_feedback = true;
  // Begins with the last Q: half the iterations of the power method. Off: a new random one each step.
  bool warm_start = true;
  // Added to norms in Gram-Schmidt (r <= 2, half types). Columns of zeros do no harm without it, either.
  double orthogonalization_epsilon = 0;
  std::uint32_t random_seed = 0;  // the same on all ranks
  // Steps between two lines on the compression in the log (level info).
  std::int64_t compression_stats_logging_frequency = 10'000;
  // Matrices of one shape in a bucket are multiplied in one call: quicker for many small ones, one more copy.
  bool batch_tensors_with_same_shape = false;
};

struct CompressionStats {
  double compress_rate = 0;  // numel_before / numel_after; 0 before the first compressed step
  std::uint64_t numel_before = 0;
  std::uint64_t numel_after = 0;
};

// What the hook keeps between steps. One model each; held by shared_ptr, since callbacks may outlive the model.
// Thread safety: backward() uses it; call nothing here meanwhile.
class PowerSGDState final : public std::enable_shared_from_this<PowerSGDState> {
 public:
  // Raises kUsage for a rank, frequency or rate that is not positive, a negative epsilon, and a start that is too early.
  explicit PowerSGDState(PowerSGDOptions options = {});
  ~PowerSGDState();
  PowerSGDState(const PowerSGDState&) = delete;
  PowerSGDState& operator=(const PowerSGDState&) = delete;

  const PowerSGDOptions& options() const { return options_; }  // the group filled in
  // Steps taken: backward passes that were reduced.
  std::int64_t iter() const { return iter_; }
  // Elements handed over and elements sent, since the compression began.
  CompressionStats compression_stats() const;
  // Of a bucket, 1-D: what the last step left out, and its Q, all matrices one after the other. Undefined before.
  at::Tensor error(std::size_t bucket) const;
  at::Tensor q(std::size_t bucket) const;

  // Everything but the group, as bytes (lockstep/object). Each rank saves its own: errors differ.
  Bytes save() const;
  // A null group is the default one, and a warning says so. Raises kUsage for other or damaged bytes.
  static std::shared_ptr<PowerSGDState> load(std::span<const std::uint8_t> bytes, Group group = {});

 private:
  friend CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);
  friend CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state);
  friend class internal::PowerSGDExchange;
  enum class Form : std::uint8_t { kPerMatrix, kBatched };
  struct Memory {
    at::Tensor error, q;
    at::Tensor p, padded;  // room for the first exchange and for the square matrix
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
  std::map<std::size_t, Memory> memory_;                 // by bucket; nodes stay where they are
  std::shared_ptr<internal::PowerSGDExchange> pending_;  // between its two exchanges
};

// Per parameter: each gradient, its first dimension by all others, is a matrix.
CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state);
// Per bucket: all its elements, filled up with zeros, are one square matrix. Quicker and worse: it has no structure, so a
// low rank fits it badly. For trying; min_compression_rate and batch_tensors_with_same_shape mean nothing here.
CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state);

}  // namespace lockstep
