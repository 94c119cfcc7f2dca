// One backward pass, from the first gradient to the last average.
//
//   idle --begin()--> filling --last bucket started--> reducing --finish()--> idle
//                        |                                 |
//                        +------ an exception ------------ +--> stays as it is: active(), and missing() says what did not come
//
// While filling, mark_ready() deposits one gradient; full buckets are started strictly in order, so that all
// ranks agree in whatever order their gradients arrive. finish() waits for the buckets in the same order and
// delivers each while later ones are still being reduced.
//
// A pass that this rank only shadows (join) has nothing to deposit: every parameter is ready when it begins,
// and start_zeros() fills and starts all buckets.
//
// Thread safety: none; on the thread that runs backward(). Ownership: refers to its parts, which must outlive
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/internal/bucket_exchange.h"
#include "lockstep/ddp/internal/gradient_buckets.h"
#include "lockstep/ddp/internal/gradient_transfer.h"
#include "lockstep/ddp/internal/readiness.h"
#include "lockstep/ddp/internal/step_timer.h"
#include "lockstep/tensor/gradient_access.h"

namespace lockstep::internal {

class ReductionPass final {
 public:
  struct Parts {
    const NamedTensors& parameters;
    GradientBuckets& buckets;
    Readiness& readiness;
    GradientTransfer& transfer;
    BucketExchange& exchange;
    StepTimer& timer;
  };
  struct Begin {
    std::shared_ptr<GradientAccess> access;  // where the gradients of this pass are stored
    bool in_context = false;                 // of distributed autograd
    bool shadow = false;                     // other ranks' pass, to which this rank contributes zeros
    int divisor = 1;                         // of sums over the ranks
    bool skip_unused = false;  // buckets to which this rank contributes nothing are skipped, on all ranks
  };
  // What a finished pass did.
  struct Totals {
    std::uint64_t n_bytes = 0;
    std::size_t n_buckets = 0;
    double waited_seconds = 0;  // communication not overlapped with computation
  };
  ReductionPass(Parts parts, Milliseconds timeout) : parts_(parts), timeout_(timeout) {}

  bool active() const { return active_; }
  bool is_shadow() const { return begin_.shadow; }
  // Where the gradients of the current pass are stored.
  GradientAccess& access() const { return *begin_.access; }

  void begin(Begin begin);
  // Raises kUsage when it is already ready; the error of the deposit or of starting a bucket.
  void mark_ready(std::size_t index, const at::Tensor& incoming = {});
  // This rank's whole contribution to a shadowed pass.
  void start_zeros();
  bool all_started() const { return n_started_ == progress_.size(); }
  // Indices of parameters that are not ready.
  std::vector<std::size_t> missing() const;
  bool is_ready(std::size_t index) const { return ready_[index] != 0; }
  // Blocks until every bucket is reduced and delivered. Raises the first failure.
  Totals finish();

  // finish() waits for these as well, once.
  void also_wait_for(std::vector<GradFuture> futures);
  // Called in finish() after the last average was delivered.
  void on_delivered(std::function<void()> call) { on_delivered_ = std::move(call); }

 private:
  struct Progress {
    std::size_t n_pending = 0;
    bool skipped = false;
  };
  void start_full_buckets();
  bool is_last_for_hook(std::size_t b) const;
  void finish_bucket(std::size_t b, Totals& totals);

  const Parts parts_;
  const Milliseconds timeout_;
  std::function<void()> on_delivered_;
  std::vector<GradFuture> also_awaited_;

  bool active_ = false;
  Begin begin_;
  std::vector<unsigned char> ready_;  // by parameter
  std::vector<Progress> progress_;    // by bucket
  std::size_t n_started_ = 0;         // buckets before this one are started, none after it
};

// Rethrows the current exception prefixed by "DistributedDataParallel, <doing>: ". Call inside a catch block.
[[noreturn]] void raise_while(const std::string& doing);

}  // namespace lockstep::internal
