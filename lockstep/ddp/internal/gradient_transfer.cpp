#include "lockstep/ddp/internal/gradient_transfer.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_strided.h>

#include <cstring>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/ddp/internal/sparse.h"
#include "lockstep/tensor/detail/local_shard.h"

namespace lockstep::internal {
namespace {

// memcpy is quicker than copy_ at every size (half a microsecond of dispatch when small, 5 to 15 % when large
// and cold), but above this size copy_ can use the threads a rank may have.
constexpr std::size_t kPlainCopyBytes = 256 * 1024;

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.strides() == b.strides();
}

// Of tensors of the same sizes: the stride of a dimension of size 1 is never used, and autograd makes it up.
bool same_order(const at::Tensor& a, const at::Tensor& b) {
  for (std::int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// Both of the same sizes; `to` dense. Runs below autograd.
void copy_dense(const at::Tensor& to, const at::Tensor& from) {
  const std::size_t n_bytes = to.nbytes();
  const bool one_thread = n_bytes <= kPlainCopyBytes || at::get_num_threads() == 1;
  const bool same_bytes = to.scalar_type() == from.scalar_type() && same_order(to, from);
  if (one_thread && same_bytes && !from.is_conj() && !from.is_neg()) {
    if (n_bytes != 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), n_bytes);
  } else {
    to.copy_(from);
  }
}

}  // namespace

void GradientTransfer::set(std::size_t index, at::Tensor gradient) const {
  pass_.access->set(parameters_.tensors[index], std::move(gradient));
}

void GradientTransfer::begin(const Pass& pass) {
  pass_ = pass;
  // What earlier passes left in Tensor::grad() must survive one of a context, which fills the buckets with
  // the context's.
  if (pass_.in_context && options_.views) buckets_.unalias();
  // What a pass left that failed before it started its buckets.
  into_.assign(buckets_.size(), {});
  out_ = {};
}

void GradientTransfer::copy(Copies& collected, const at::Tensor& to, const at::Tensor& from) const {
  if (to.is_cpu()) return copy_dense(to, from);
  collected.to.push_back(to);
  collected.from.push_back(from);
}

void GradientTransfer::run(Copies& collected) {
  if (collected.to.empty()) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::_foreach_copy_(collected.to, collected.from, /*non_blocking=*/true);
  collected = {};
}

void GradientTransfer::flush(std::size_t b) {
  run(into_[b]);
}

// ---- deposit ----

// Below autograd: these copies are not operations of the model, and must neither be recorded nor checked
// against its graph.
void GradientTransfer::deposit(std::size_t index, const at::Tensor& incoming, Use use) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const GradientBuckets::GradientSlot slot = buckets_.slot_of(index);
  GradientBucket& bucket = buckets_[slot.bucket];
  if (bucket.is_sparse) return deposit_sparse(index, use);
  const at::Tensor gradient = pass_.access->get(parameters_.tensors[index]);
  if (gradient.defined()) check(index, gradient);
  at::Tensor& view = bucket.views[slot.index];
  buckets_.in_place(index) ? deposit_in_place(index, view, use, gradient, incoming)
                           : deposit_dense(index, view, use, gradient);
}

void GradientTransfer::check(std::size_t index, const at::Tensor& gradient) const {
  if (gradient.layout() != at::kStrided) {
    base::raise(
        ErrorKind::kUnsupported,
        base::cat(
            "the gradient of ", describe_parameter(parameters_, index), " is a ", gradient.layout(),
            " tensor; sparse gradients are expected of Embedding and EmbeddingBag with sparse=true only"));
  }
  const at::ScalarType expected = buckets_.item(index).dtype;
  const bool other_type = gradient.scalar_type() != expected && !options_.casts;
  if (other_type || gradient.sizes() != buckets_.like(index).sizes()) {
    base::raise(ErrorKind::kUsage, base::cat("the gradient of ", describe_parameter(parameters_, index),
                                             " is ", gradient.scalar_type(), gradient.sizes(),
                                             ", its bucket holds ", expected, buckets_.like(index).sizes(),
                                             "; parameters must not change type or size after wrapping"));
  }
}

void GradientTransfer::copy_into(std::size_t index, const at::Tensor& view, const at::Tensor& gradient) {
  if (!warned_strides_ && !same_order(gradient, view)) {
    warned_strides_ = true;
    base::log(LogLevel::kWarn,
              base::cat("DistributedDataParallel: the gradient of ", describe_parameter(parameters_, index),
                        " has strides ", gradient.strides(), ", its bucket ", view.strides(),
                        "; this is not an error, but copying is slower. Logged once."));
  }
  copy(into_[buckets_.slot_of(index).bucket], view, gradient);
}

// A parameter without a gradient contributes zeros: the other ranks reduce the whole bucket in any case.
void GradientTransfer::deposit_dense(std::size_t index, at::Tensor& view, Use use,
                                     const at::Tensor& gradient) {
  if (!gradient.defined()) {
    view.zero_();
    return;
  }
  // Possibly no rank uses it: then it must be unchanged after the reduction.
  if (gives_views() && !use.here) saved_[index] = gradient.clone();
  if (same_memory(gradient, view)) return;
  copy_into(index, view, gradient);
  if (gives_views()) set(index, view);
}

// Who refers to the memory of a sharded gradient, only its implementation can tell.
bool GradientTransfer::holds_alone(std::size_t index, const at::Tensor& gradient,
                                   const at::Tensor& incoming) const {
  const at::Tensor& parameter = parameters_.tensors[index];
  if (!has_shards(parameter)) return buckets_.pool()->holds_whole(gradient, buckets_.like(index), incoming);
  return !pass_.in_context && buckets_.pool()->holds(gradient, buckets_.like(index)) &&
         sharded_tensors()->owned_by(gradient, parameter.grad(), incoming);
}

void GradientTransfer::deposit_in_place(std::size_t index, at::Tensor& place, Use use,
                                        const at::Tensor& gradient, const at::Tensor& incoming) {
  if (!gradient.defined()) {
    place = buckets_.make_in_place(index).zero_();
    return;
  }
  // If this rank did not use it, only a copy: possibly no rank did, and the gradient must stay unchanged.
  if (use.here && holds_alone(index, gradient, incoming)) {
    place = gradient.detach();
    ++n_in_place_;
    return;
  }
  place = buckets_.make_in_place(index);
  copy_into(index, place, gradient);
  if (gives_views() && use.here) set(index, place);
}

// A copy, already divided: the reduction works in place, and what was accumulated must survive a failure.
void GradientTransfer::deposit_sparse(std::size_t index, Use use) {
  const at::Tensor& parameter = parameters_.tensors[index];
  at::Tensor& flat = buckets_[buckets_.slot_of(index).bucket].flat;
  const at::Tensor gradient = pass_.access->get(parameter);
  if (!gradient.defined()) {
    if (use.required) {
      base::raise(ErrorKind::kUsage,
                  base::cat("the gradient of ", describe_parameter(parameters_, index),
                            " is undefined; with sparse=true every backward pass must reach it, or "
                            "find_unused_parameters be set"));
    }
    flat = no_entries(parameter);
  } else if (gradient.layout() == at::kSparse) {
    flat = gradient.div(static_cast<double>(pass_.divisor));
  } else {
    base::raise(ErrorKind::kUsage,
                base::cat("the gradient of ", describe_parameter(parameters_, index), " is a ",
                          gradient.layout(), " tensor, but its layer has sparse=true"));
  }
}

void GradientTransfer::fill_zeros(std::size_t b) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  GradientBucket& bucket = buckets_[b];
  if (bucket.is_sparse) {
    bucket.flat = no_entries(parameters_.tensors[buckets_.indices(b).front()]);
    return;
  }
  if (bucket.flat.defined()) bucket.flat.zero_();
  for (std::size_t slot = 0; slot < bucket.views.size(); ++slot) {
    const std::size_t index = buckets_.indices(b)[slot];
    if (buckets_.in_place(index)) bucket.views[slot] = buckets_.make_in_place(index).zero_();
  }
}

void GradientTransfer::keep_local(std::size_t index, GradientAccess& access) const {
  const at::Tensor gradient = access.get(parameters_.tensors[index]);
  if (!gradient.defined() || gradient.scalar_type() == buckets_.own_type(index)) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  access.set(parameters_.tensors[index], gradient.to(buckets_.own_type(index)));
}

// ---- deliver ----

void GradientTransfer::deliver(std::size_t index, Use use) {
  const GradientBuckets::GradientSlot slot = buckets_.slot_of(index);
  const GradientBucket& bucket = buckets_[slot.bucket];
  bucket.is_sparse ? deliver_sparse(index, use) : deliver_dense(index, bucket.views[slot.index], use);
}

void GradientTransfer::deliver_sparse(std::size_t index, Use use) {
  at::Tensor reduced = std::exchange(buckets_[buckets_.slot_of(index).bucket].flat, {});
  if (!use.anywhere) {
    if (pass_.shadow) set(index, {});
    return;
  }
  const bool used_up = on_average_ && on_average_(parameters_.tensors[index], reduced);
  set(index, used_up ? at::Tensor() : std::move(reduced));
}

void GradientTransfer::deliver_dense(std::size_t index, const at::Tensor& view, Use use) {
  // Used by no rank: the gradient stays unchanged, undefined or an old one.
  if (!use.anywhere) {
    if (pass_.shadow) set(index, {});
    if (const auto saved = saved_.find(index); saved != saved_.end()) view.copy_(saved->second);
    return;
  }
  at::Tensor average = view.to(buckets_.own_type(index));  // the view itself, but for mixed precision
  const at::Tensor& parameter = parameters_.tensors[index];
  if (on_average_ && on_average_(parameter, gradient_of_shard(parameter, average))) return set(index, {});
  hand_out(index, view, std::move(average), use);
}

//   views, or in place, no .grad .grad becomes the view, unless it is that already
//   .grad exists                 the average is copied into it: optimizers and users may hold that tensor
//   mixed precision              .grad becomes the cast copy
//   otherwise                    a fresh tensor, since the bucket is overwritten in the next pass
void GradientTransfer::hand_out(std::size_t index, const at::Tensor& view, at::Tensor average, Use use) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor gradient = pass_.access->get(parameters_.tensors[index]);
  const bool in_place = buckets_.in_place(index);
  if (gives_views() || (in_place && !gradient.defined())) {
    if (!gradient.defined() || pass_.shadow || (in_place && !use.here)) {
      set(index, view);
    } else if (!same_memory(gradient, view)) {
      base::raise(ErrorKind::kUsage,
                  base::cat("the gradient of ", describe_parameter(parameters_, index),
                            " is not the view of its bucket; with ",
                            "gradient_as_bucket_view nothing may replace .grad during backward()"));
    }
  } else if (gradient.defined() && gradient.scalar_type() == buckets_.own_type(index)) {
    if (!same_memory(gradient, view)) copy(out_, gradient, view);
  } else if (!average.is_same(view)) {
    set(index, std::move(average));
  } else {
    at::Tensor fresh = at::empty_strided(view.sizes(), view.strides(), view.options());
    copy(out_, fresh, view);
    set(index, std::move(fresh));
  }
}

// Of gradients that were reduced in place only .grad keeps the memory now; the next backward allocates from
// the pool anew.
void GradientTransfer::release(std::size_t b) {
  run(out_);
  GradientBucket& bucket = buckets_[b];
  for (std::size_t slot = 0; slot < bucket.views.size(); ++slot) {
    if (buckets_.in_place(buckets_.indices(b)[slot])) bucket.views[slot].reset();
  }
}

}  // namespace lockstep::internal
