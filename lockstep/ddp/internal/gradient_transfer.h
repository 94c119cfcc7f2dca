// What goes into a bucket and what comes out of it: gradients are deposited, averages delivered.
//
// The way of one gradient through a pass:
//
//   deposit     in place    autograd made it in a block of the pool, and nobody else refers to it: it is its own place
//               copied      into its view of the bucket, or into a block of the pool
//               a view      gradient_as_bucket_view: from then on the gradient is its place in the bucket
//               zeros       there is no gradient
//   (the bucket is reduced)
//   deliver     where the gradient is not in its place already: copied back, or the view handed out, or cast to the
//               parameter's own type; not at all where nobody used the parameter
//   release     places in the pool belong to the gradients alone, or to the pool again
//
// Gradients are read and written through the GradientAccess of the pass only. Buckets serve one pass after the other, but
// gradients of a context must outlive its pass: those never lie in buckets.
// Later, a device's gradients: copies and casts run here only, so that a DeviceStreams& handed to the constructor orders
// them with what computes gradients and with the reduction.
// Thread safety: none; on the thread that runs backward().
// Ownership: refers to buckets, parameters and the pass's access, which must outlive it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>

#include "lockstep/ddp/internal/gradient_buckets.h"
#include "lockstep/ddp/internal/module_state.h"
#include "lockstep/ddp/internal/readiness_policies.h"
#include "lockstep/tensor/gradient_access.h"

namespace lockstep::internal {

// Called for each parameter that takes part, as soon as its average is there and while later buckets are still being
// reduced; in the same order on all ranks. True: the average is used up, and the gradient is left undefined.
using OnAverage = std::function<bool(const at::Tensor& parameter, const at::Tensor& average)>;

class GradientTransfer final {
 public:
  struct Options {
    bool views = false;  // gradient_as_bucket_view
    bool casts = false;  // gradients may have another type than their bucket
  };
  // Of the pass under way.
  struct Pass {
    GradientAccess* access = nullptr;
    bool in_context = false;  // of distributed autograd: its gradients outlive the pass
    bool shadow = false;      // other ranks' pass: what nobody used has no gradient afterwards
    int divisor = 1;          // of sparse gradients
  };
  GradientTransfer(const NamedTensors& parameters, GradientBuckets& buckets, Options options)
      : parameters_(parameters), buckets_(buckets), options_(options) {}

  void on_average(OnAverage call) { on_average_ = std::move(call); }

  void begin(const Pass& pass);
  // `incoming` is what autograd gave the hook, if one runs. Raises kUsage or kUnsupported for a gradient of another type,
  // size or layout than its bucket's.
  void deposit(std::size_t index, const at::Tensor& incoming, Use use);
  // This rank adds nothing to bucket b.
  void fill_zeros(std::size_t b);
  // The average in the parameter's bucket becomes its gradient. Raises kUsage when a view was replaced meanwhile.
  void deliver(std::size_t index, Use use);
  void release(std::size_t b);
  void end() { saved_.clear(); }

  // A gradient that stays this rank's: in the parameter's own type, though it was computed in a shorter one.
  void keep_local(std::size_t index, GradientAccess& access) const;
  // Gradients that were reduced where autograd had made them, so far.
  std::uint64_t n_in_place() const { return n_in_place_; }

 private:
  bool gives_views() const { return options_.views && !pass_.in_context; }
  void deposit_sparse(std::size_t index, Use use);
  void deposit_dense(std::size_t index, at::Tensor& view, Use use, const at::Tensor& gradient);
  void deposit_in_place(std::size_t index, at::Tensor& place, Use use, const at::Tensor& gradient,
                        const at::Tensor& incoming);
  void copy_into(std::size_t index, const at::Tensor& view, const at::Tensor& gradient);
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
  // Gradients that lie in a bucket and may be nobody's: what they were before the reduction.
  std::map<std::size_t, at::Tensor> saved_;
  std::uint64_t n_in_place_ = 0;
  bool warned_strides_ = false;
};

}  // namespace lockstep::internal
