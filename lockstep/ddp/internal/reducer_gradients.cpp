// What goes into a bucket and what comes out of it: gradients stored, averages handed back.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>

#include <cstring>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/ddp/internal/reducer.h"
#include "lockstep/ddp/internal/sparse.h"

namespace lockstep::internal {
namespace {

// memcpy is quicker than copy_ at every size (half a microsecond of dispatch when small, 5 to 15 % when large and cold),
// but above this size copy_ can use the threads a rank may have.
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

void Reducer::check_gradient(std::size_t index, const at::Tensor& gradient) const {
  if (gradient.layout() != at::kStrided) {
    raise(ErrorKind::kUnsupported,
          cat("the gradient of ", describe(index), " is a ", gradient.layout(),
              " tensor; sparse gradients are expected of Embedding and EmbeddingBag with sparse=true only"));
  }
  const bool other_type = gradient.scalar_type() != buckets_.item(index).dtype && !options_.reduce_dtype;
  if (other_type || gradient.sizes() != parameters_[index].sizes()) {
    raise(ErrorKind::kUsage,
          cat("the gradient of ", describe(index), " is ", gradient.scalar_type(), gradient.sizes(),
              ", its bucket holds ", buckets_.item(index).dtype, parameters_[index].sizes(),
              "; parameters must not change type or size after wrapping"));
  }
}

void Reducer::copy_into(std::size_t index, const at::Tensor& view, const at::Tensor& gradient) {
  if (!warned_strides_ && !same_order(gradient, view)) {
    warned_strides_ = true;
    log(LogLevel::kWarn,
        cat("DistributedDataParallel: the gradient of ", describe(index), " has strides ", gradient.strides(),
            ", its bucket ", view.strides(), "; this is no error but copies slower. Said once."));
  }
  copy_dense(view, gradient);
}

void Reducer::store_gradient(std::size_t index, at::Tensor& view, const at::Tensor& incoming) {
  const at::Tensor gradient = access().get(parameters_[index]);
  if (gradient.defined()) check_gradient(index, gradient);
  if (buckets_.in_place(index)) return store_large(index, gradient, view, incoming);
  if (!gradient.defined()) {
    view.zero_();
    return;
  }
  // Perhaps nobody uses it: then it must come out of the reduction as it went in.
  if (gives_views() && is_idle(index)) kept_[index] = gradient.clone();
  if (same_memory(gradient, view)) return;
  copy_into(index, view, gradient);
  if (gives_views()) access().set(parameters_[index], view);
}

// Where it lies, if autograd made it in the group's memory and it is nobody else's; otherwise a copy there.
void Reducer::store_large(std::size_t index, const at::Tensor& gradient, at::Tensor& piece,
                          const at::Tensor& incoming) {
  if (!gradient.defined()) {
    piece = buckets_.make_in_place(index).zero_();
    return;
  }
  const bool idle = is_idle(index);
  if (!idle && buckets_.pool()->holds_whole(gradient, parameters_[index], incoming)) {
    piece = gradient.detach();
    ++stats_.n_in_place;
    return;
  }
  piece = buckets_.make_in_place(index);
  copy_into(index, piece, gradient);
  if (gives_views() && !idle) access().set(parameters_[index], piece);
}

// This rank did not use it in the pass: perhaps nobody did, and its gradient must stay what it was.
bool Reducer::is_idle(std::size_t index) const {
  return static_graph_ ? use_counts_[index] == 0 : searches() && used_here_.const_data_ptr<int>()[index] == 0;
}

// A copy, already divided: the reduction works in place, and what was accumulated must survive a failure.
void Reducer::store_sparse(std::size_t index, GradientBucket& bucket) {
  const at::Tensor& parameter = parameters_[index];
  const at::Tensor gradient = access().get(parameter);
  if (!gradient.defined()) {
    if (awaited(index) && !searches()) {
      raise(ErrorKind::kUsage, cat("the gradient of ", describe(index),
                                   " is undefined; with sparse=true every backward pass must reach it, or "
                                   "find_unused_parameters be set"));
    }
    bucket.flat = no_entries(parameter);
  } else if (gradient.layout() == at::kSparse) {
    bucket.flat = gradient.div(static_cast<double>(divisor_));
  } else {
    raise(ErrorKind::kUsage, cat("the gradient of ", describe(index), " is a ", gradient.layout(),
                                 " tensor, and sparse=true was said of its layer"));
  }
}

void Reducer::hand_back(std::size_t b) {
  GradientBucket& bucket = buckets_[b];
  if (bucket.is_sparse) {
    const std::size_t index = buckets_.indices(b).front();
    at::Tensor reduced = std::exchange(bucket.flat, {});
    if (used_.defined() && used_.const_data_ptr<int>()[index] == 0) {
      if (shadowing_) access().set(parameters_[index], {});
      return;
    }
    const bool used_up = on_average_ && on_average_(parameters_[index], reduced);
    return access().set(parameters_[index], used_up ? at::Tensor() : std::move(reduced));
  }
  for (std::size_t slot = 0; slot < bucket.views.size(); ++slot)
    hand_back_one(buckets_.indices(b)[slot], bucket.views[slot]);
}

void Reducer::hand_back_one(std::size_t index, const at::Tensor& view) {
  const at::Tensor& parameter = parameters_[index];
  // Used by nobody: the gradient stays what it was, none or an old one.
  if (used_.defined() && used_.const_data_ptr<int>()[index] == 0) {
    if (shadowing_) access().set(parameter, {});
    if (const auto kept = kept_.find(index); kept != kept_.end()) view.copy_(kept->second);
    return;
  }
  at::Tensor average = view.to(buckets_.own_type(index));  // the view itself, but for mixed precision
  if (on_average_ && on_average_(parameter, average)) return access().set(parameter, {});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor gradient = access().get(parameter);
  const bool large = buckets_.in_place(index);
  if (gives_views() || (large && !gradient.defined())) {
    if (!gradient.defined() || shadowing_ || (large && is_idle(index))) {
      access().set(parameter, view);
    } else if (!same_memory(gradient, view)) {
      raise(ErrorKind::kUsage,
            cat("the gradient of ", describe(index), " is not the view of its bucket; with ",
                "gradient_as_bucket_view nothing may replace .grad during backward()"));
    }
  } else if (gradient.defined() && gradient.scalar_type() == buckets_.own_type(index)) {
    if (!same_memory(gradient, view)) copy_dense(gradient, view);
  } else if (!average.is_same(view)) {
    access().set(parameter, std::move(average));
  } else {
    at::Tensor fresh = at::empty_strided(view.sizes(), view.strides(), view.options());
    copy_dense(fresh, view);
    access().set(parameter, std::move(fresh));
  }
}

// They belong to Tensor::grad() alone, or to the pool again.
void Reducer::let_go_of_large(std::size_t b) {
  for (std::size_t slot = 0; slot < buckets_[b].views.size(); ++slot) {
    if (buckets_.in_place(buckets_.indices(b)[slot])) buckets_[b].views[slot].reset();
  }
}

}  // namespace lockstep::internal
