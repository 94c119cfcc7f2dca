#include "lockstep/ddp/hooks/internal/power_sgd_exchange.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/ddp/hooks/internal/average.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep::internal {
namespace {

bool fits(const at::Tensor& kept, std::int64_t n, at::ScalarType dtype) {
  return kept.defined() && kept.numel() == n && kept.scalar_type() == dtype;
}

// `kept` when it fits, else new memory in its place, the group's. True when it is new.
bool ensure(at::Tensor& kept, std::int64_t n, const at::Tensor& like, const Group& group) {
  if (fits(kept, n, like.scalar_type())) return false;
  kept = empty_shared({n}, like.scalar_type(), {.group = group, .device = like.device()});
  return true;
}

std::int64_t square_side(std::int64_t n) {
  auto side = static_cast<std::int64_t>(std::sqrt(static_cast<double>(n)));
  while (side * side < n) ++side;
  return side;
}

}  // namespace

PowerSGDExchange::PowerSGDExchange(std::shared_ptr<PowerSGDState> state, GradBucket& bucket,
                                   PowerSGDState::Form form)
    : state_(std::move(state)),
      memory_(state_->memory_[bucket.index()]),
      bucket_(bucket.index()),
      buffer_(bucket.buffer()),
      whole_(buffer_),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(),
                                                       future_devices(buffer_.device()))) {
  form == PowerSGDState::Form::kPerMatrix ? lay_out(bucket) : lay_out_square();
  count();
}

// ---- what is compressed ----

void PowerSGDExchange::lay_out(const GradBucket& bucket) {
  const PowerSGDOptions& options = state_->options_;
  std::int64_t at = 0;  // gradients are contiguous, in order
  for (const at::Tensor& gradient : bucket.gradients()) {
    const MatrixShape shape = matrix_shape(gradient);
    const std::int64_t n = shape.rows * shape.columns;
    const std::int64_t rank = std::min({shape.rows, shape.columns, options.matrix_approximation_rank});
    if (worth_compressing(shape, rank, options.min_compression_rate)) {
      add_matrix(shape, rank, at);
    } else if (n != 0) {
      plain_.push_back({at, n});
      n_plain_ += n;
    }
    at += n;
  }
}

void PowerSGDExchange::add_matrix(MatrixShape shape, std::int64_t rank, std::int64_t at) {
  n_p_ += shape.rows * rank;
  n_q_ += shape.columns * rank;
  // Those of one shape stand together, as in torch: the order in which random numbers are drawn.
  const auto last = std::find_if(matrices_.rbegin(), matrices_.rend(),
                                 [&](const Batch& batch) { return batch.shape == shape; });
  if (last != matrices_.rend() && state_->options_.batch_tensors_with_same_shape)
    return last->at.push_back(at);
  matrices_.insert(last == matrices_.rend() ? matrices_.end() : last.base(),
                   Batch{.shape = shape, .rank = rank, .at = {at}});
}

void PowerSGDExchange::lay_out_square() {
  const std::int64_t n = buffer_.numel();
  const std::int64_t side = square_side(n);
  if (n == 0) return;
  if (side * side != n) {
    if (!fits(memory_.padded, side * side, buffer_.scalar_type()))
      memory_.padded = at::empty({side * side}, buffer_.options());
    whole_ = memory_.padded;
    whole_.narrow(0, 0, n).copy_(buffer_);
    whole_.narrow(0, n, side * side - n).zero_();
  }
  add_matrix({side, side}, std::min(side, state_->options_.matrix_approximation_rank), 0);
}

void PowerSGDExchange::count() const {
  state_->stats_.numel_before += static_cast<std::uint64_t>(buffer_.numel());
  state_->stats_.numel_after += static_cast<std::uint64_t>(n_p_ + n_q_ + n_plain_);
}

// ---- the first exchange ----

// One matrix is a view of the flat tensor; several are not contiguous.
at::Tensor PowerSGDExchange::slice(const at::Tensor& flat, const Batch& batch, std::size_t i) const {
  return flat.narrow(0, batch.at[i], batch.shape.rows * batch.shape.columns)
      .view({batch.shape.rows, batch.shape.columns});
}

// From here on the error's memory holds M, of which decompress takes off what was sent.
void PowerSGDExchange::add_error() {
  if (!state_->options_.use_error_feedback) return;
  at::Tensor& error = memory_.error;
  if (fits(error, whole_.numel(), whole_.scalar_type())) {
    whole_.add_(error);
  } else {
    error = at::empty_like(whole_);
  }
  error.copy_(whole_);
  for (const Stretch& stretch : plain_) error.narrow(0, stretch.at, stretch.n).zero_();  // sent as it is
}

void PowerSGDExchange::make_room() {
  const Group& group = state_->options_.group;
  ensure(memory_.p, n_p_ + n_plain_, whole_, group);
  const bool new_q = ensure(memory_.q, n_q_, whole_, group);
  std::int64_t p_at = 0, q_at = 0;
  for (Batch& batch : matrices_) {
    const auto n = static_cast<std::int64_t>(batch.at.size());
    const std::int64_t p_n = n * batch.shape.rows * batch.rank, q_n = n * batch.shape.columns * batch.rank;
    batch.p = memory_.p.narrow(0, p_at, p_n).view({n, batch.shape.rows, batch.rank});
    batch.q = memory_.q.narrow(0, q_at, q_n).view({n, batch.shape.columns, batch.rank});
    p_at += p_n;
    q_at += q_n;
    if (n == 1) {
      batch.m = slice(whole_, batch, 0).unsqueeze(0);
    } else {
      std::vector<at::Tensor> parts;
      for (std::size_t i = 0; i < batch.at.size(); ++i) parts.push_back(slice(whole_, batch, i));
      batch.m = at::stack(parts);
    }
  }
  const bool fresh = new_q || !state_->options_.warm_start;
  const auto is_dead = [](const Batch& batch) { return has_dead_columns(batch.q); };
  if (fresh || std::ranges::any_of(matrices_, is_dead)) draw(fresh);
}

// All ranks come here together: Q is the same everywhere.
void PowerSGDExchange::draw(bool fresh) {
  const at::Generator generator = at::detail::createCPUGenerator(state_->seeds_->next());
  for (Batch& batch : matrices_) {
    // Drawn on the CPU, wherever they are used: the same numbers on every device.
    const at::Tensor random =
        at::randn(batch.q.sizes(), generator, batch.q.options().device(c10::kCPU)).to(batch.q.device());
    fresh ? void(batch.q.copy_(random)) : replace_dead_columns(batch.q, random);
  }
}

void PowerSGDExchange::start() {
  add_error();
  make_room();
  for (Batch& batch : matrices_) {
    orthogonalise(batch.q, state_->options_.orthogonalization_epsilon);
    at::bmm_out(batch.p, batch.m, batch.q);
  }
  std::int64_t at = n_p_;
  for (const Stretch& stretch : plain_) {
    memory_.p.narrow(0, at, stretch.n).copy_(whole_.narrow(0, stretch.at, stretch.n));
    at += stretch.n;
  }
  work_ = all_reduce(memory_.p, {.op = ReduceOp::kAvg, .group = state_->options_.group, .async_op = true});
}

// ---- the second ----

void PowerSGDExchange::advance() {
  try {
    std::exchange(work_, Work()).wait();
    std::int64_t at = n_p_;
    for (const Stretch& stretch : plain_) {
      whole_.narrow(0, stretch.at, stretch.n).copy_(memory_.p.narrow(0, at, stretch.n));
      at += stretch.n;
    }
    for (Batch& batch : matrices_) {
      orthogonalise(batch.p, state_->options_.orthogonalization_epsilon);
      at::bmm_out(batch.q, batch.m.transpose(1, 2), batch.p);
    }
    average(memory_.q, state_->options_.group)
        ->addCallback([self = shared_from_this()](const c10::ivalue::Future& exchanged) {
          try {
            rethrow_error(exchanged);
            self->decompress();
          } catch (...) {
            return self->future_->setError(std::current_exception());
          }
          self->future_->markCompleted(c10::IValue(self->buffer_));
        });
  } catch (...) {
    future_->setErrorIfNeeded(std::current_exception());
    throw;
  }
}

void PowerSGDExchange::decompress() {
  for (Batch& batch : matrices_) {
    at::bmm_out(batch.m, batch.p, batch.q.transpose(1, 2));
    for (std::size_t i = 0; i < batch.at.size(); ++i) {
      const at::Tensor sent = batch.m.select(0, static_cast<std::int64_t>(i));
      if (batch.at.size() != 1) slice(whole_, batch, i).copy_(sent);  // else it is there
      if (state_->options_.use_error_feedback) slice(memory_.error, batch, i).sub_(sent);
    }
  }
  if (!whole_.is_same(buffer_)) buffer_.copy_(whole_.narrow(0, 0, buffer_.numel()));
  if (memory_.q.isfinite().all().item<bool>()) return;
  // An infinity or a NaN on some rank reaches all of them in this step; nothing of it may live on.
  memory_.q.reset();
  memory_.error.reset();
}

void PowerSGDExchange::abandon(const std::string& why) {
  memory_.p.reset();  // the first exchange may still write there
  try {
    base::raise(ErrorKind::kAborted, why);
  } catch (...) {
    future_->setErrorIfNeeded(std::current_exception());
  }
}

}  // namespace lockstep::internal
