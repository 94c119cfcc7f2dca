// Moves gradients into buckets (deposit) and averages out of them (deliver).
//
// One gradient in a pass:
//
//   deposit     in place    autograd allocated it in a block of the pool, and nothing else refers to it: it is its own place
//               copied      into its view of the bucket, or into a block of the pool
//               a view      gradient_as_bucket_view: from then on the gradient is its slot in the bucket
//               zeros       there is no gradient
//   (the bucket is reduced)
//   deliver     if the gradient is not already in place: copied back, or replaced by the view, or cast to the
//               parameter's own type; skipped when no rank used the parameter
//   release     pool blocks are owned by the gradients alone, or returned to the pool
//
// Gradients are accessed only through the GradientAccess of the pass, which gives this rank's piece where the
// parameter is sharded. Buckets are reused by every pass, but
// gradients of a context must outlive its pass: those are never views of buckets.
// On a GPU copies are collected and made by one kernel per bucket: those into it when it is started (flush), those
// out of it when it has been delivered (release). They run in the stream that autograd computed the gradient in,
// which is current in its hooks, and in that of backward()'s caller, which is current at the end of the pass.
// Thread safety: none; on the thread that runs backward().
// Ownership: refers to buckets, parameters and the pass's access, which must outlive it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "lockstep/ddp/internal/gradient_buckets.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/ddp/internal/readiness_policies.h"
#include "lockstep/tensor/gradient_access.h"

namespace lockstep::internal {

// Called for each participating parameter, as soon as its average is available and while later buckets are
// still being reduced; in the same order on all ranks. True: the average is consumed, and the gradient is
// left undefined.
using OnAverage = std::function<bool(const at::Tensor& parameter, const at::Tensor& average)>;

class GradientTransfer final {
 public:
  struct Options {
    bool views = false;  // gradient_as_bucket_view
    bool casts = false;  // gradients may have another type than their bucket
  };
  // The current pass.
  struct Pass {
    GradientAccess* access = nullptr;
    bool in_context = false;  // of distributed autograd: its gradients outlive the pass
    bool shadow = false;      // other ranks' pass: parameters no rank used have no gradient afterwards
    int divisor = 1;          // of sparse gradients
  };
  GradientTransfer(const NamedTensors& parameters, GradientBuckets& buckets, Options options)
      : parameters_(parameters), buckets_(buckets), options_(options) {}

  void on_average(OnAverage call) { on_average_ = std::move(call); }

  void begin(const Pass& pass);
  // `incoming` is what autograd passed to the hook, if called from one. Raises kUsage or kUnsupported for a
  // gradient whose type, size or layout differs from its bucket's.
  void deposit(std::size_t index, const at::Tensor& incoming, Use use);
  // Bucket b is about to be reduced: every copy into it is made or enqueued.
  void flush(std::size_t b);
  // This rank contributes zeros to bucket b.
  void fill_zeros(std::size_t b);
  // The average in the parameter's bucket becomes its gradient. Raises kUsage when a view was replaced
  // meanwhile.
  void deliver(std::size_t index, Use use);
  void release(std::size_t b);
  void end() { saved_.clear(); }

  // A gradient that stays local: converted to the parameter's own type if it was computed in lower precision.
  void keep_local(std::size_t index, GradientAccess& access) const;
  // Gradients reduced in place, where autograd allocated them, so far.
  std::uint64_t n_in_place() const { return n_in_place_; }

 private:
  bool gives_views() const { return options_.views && !pass_.in_context; }
  void deposit_sparse(std::size_t index, Use use);
  void deposit_dense(std::size_t index, at::Tensor& view, Use use, const at::Tensor& gradient);
  void deposit_in_place(std::size_t index, at::Tensor& place, Use use, const at::Tensor& gradient,
                        const at::Tensor& incoming);
  bool holds_alone(std::size_t index, const at::Tensor& gradient, const at::Tensor& incoming) const;
  void copy_into(std::size_t index, const at::Tensor& view, const at::Tensor& gradient);
  // Now, or collected on a GPU. `to` is dense.
  struct Copies {
    std::vector<at::Tensor> to, from;
  };
  void copy(Copies& collected, const at::Tensor& to, const at::Tensor& from) const;
  static void run(Copies& collected);
  void check(std::size_t index, const at::Tensor& gradient) const;
  void deliver_sparse(std::size_t index, Use use);
  void deliver_dense(std::size_t index, const at::Tensor& view, Use use);
  void hand_out(std::size_t index, const at::Tensor& view, at::Tensor average, Use use);
  void set(std::size_t index, at::Tensor gradient) const;

  const NamedTensors& parameters_;
  GradientBuckets& buckets_;
  const Options options_;
  OnAverage on_average_;
  Pass pass_;
  // Gradients that are views of a bucket and may be unused on all ranks: their values before the reduction.
  std::map<std::size_t, at::Tensor> saved_;
  std::vector<Copies> into_;  // by bucket; a GPU's only
  Copies out_;                // of the bucket that is being delivered; a GPU's only
  std::uint64_t n_in_place_ = 0;
  bool warned_strides_ = false;
};

}  // namespace lockstep::internal
