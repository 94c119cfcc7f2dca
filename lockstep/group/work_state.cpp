#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/group/detail/work_state.h"
#include "lockstep/group/internal/completions.h"
#include "lockstep/group/internal/disposal.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep {
namespace {

std::int64_t now_ns() {
  return Deadline::now().monotonic_ns();
}

}  // namespace

Work::State::State(std::shared_ptr<internal::GroupState> owner, const internal::OperationRequest& request,
                   internal::HeldTensors held)
    : type_(request.ended.type),
      name_(request.name),
      where_(request.where),
      sequence_(request.ended.sequence_number),
      started_ns_(now_ns()),
      calls_back_(owner->calls_back()),
      rank_(internal::current_rank_use()),
      stream_(request.stream),
      owner_(std::move(owner)),
      held_(std::move(held)),
      // The caller's thread-local modes (no_grad, inference mode) are kept where tensors will be copied at
      // the end, which may happen on another thread.
      ended_(request.ended) {
  copy_pending_ = held_.finish || !held_.copies.empty();
  if (copy_pending_) modes_.emplace();
}

Work::State::State(const Ended& ended, std::vector<at::Tensor> results, std::optional<c10::Stream> stream)
    : type_(ended.type),
      name_(name_of(type_)),
      sequence_(ended.sequence_number),
      stream_(stream),
      over_(true),
      ended_(ended) {
  held_.results = std::move(results);
  if (!stream_) return;
  copied_.emplace(stream_->device_type());
  copied_->record(*stream_);
}

Work::State::State(OpType type, std::string why)
    : type_(type), name_(name_of(type_)), sequence_(0), unusable_(std::move(why)), over_(true) {}

void Work::State::check_usable() const {
  if (!unusable_.empty()) base::raise(ErrorKind::kUsage, unusable_);
}

//   n_calls_  1 for launching + 1 per posted part; the last one to count down sets kDone
//   flags_    kDone and kWanted meet by fetch_or: whoever comes second hands the work to a completion thread
//
// self_ keeps the state alive until the engine's last callback, even when the caller has dropped its Work.
void Work::State::arm(lockstep_op& op) {
  if (op.kind == LOCKSTEP_RECV) {
    source_ = op.root;  // of device memory it may be asked before the message has come
    op.source = &source_;
  }
  if (!calls_back_) return;
  if (!self_) self_ = shared_from_this();
  n_calls_.fetch_add(1, std::memory_order_relaxed);
  op.done = &State::on_done;
  op.done_context = this;
}

void Work::State::post_failed(lockstep_status status, std::string_view message) {
  if (calls_back_) n_calls_.fetch_sub(1, std::memory_order_relaxed);
  if (!failure_) failure_ = owner_->failure(status, message);
}

void Work::State::launched() {
  if (calls_back_) count_down();
}

void Work::State::on_done(void* context) {
  const internal::EngineCallback callback;  // this may be the last owner of much
  static_cast<State*>(context)->count_down();
}

// acq_rel: the last one sees what the others wrote, and has released its own part to them.
void Work::State::count_down() {
  if (n_calls_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  auto self = std::move(self_);
  ended_ns_.store(now_ns(), std::memory_order_relaxed);
  if ((flags_.fetch_or(kDone, std::memory_order_acq_rel) & kWanted) != 0)
    internal::hand_over(std::move(self));
}

// kWanted is set after the check with poll(), kDone by the engine's callback: fetch_or orders the two, so
// exactly one side sees both flags and hands the work over. acq_rel: that side also sees what the other wrote
// before.
void Work::State::call_me_when_over() {
  if (poll()) return resolve();
  internal::start_completions();
  const unsigned before = flags_.fetch_or(kWanted, std::memory_order_acq_rel);
  if ((before & kWanted) != 0) {
    // Asked before, but perhaps for the other future, which may have been resolved just now.
    if (poll()) resolve();
    return;
  }
  if (!calls_back_) return internal::watch(shared_from_this());
  if ((before & kDone) != 0) internal::hand_over(shared_from_this());
}

void Work::State::complete() {
  settle(Deadline::never());  // short: the engine is through
  std::optional<at::ThreadLocalState> modes;
  {
    const std::lock_guard lock(mutex_);
    modes = modes_;
  }
  const internal::RankUse::Scope rank(rank_);
  std::optional<at::ThreadLocalStateGuard> as_caller;
  if (modes) as_caller.emplace(*modes);
  resolve();
}

bool Work::State::poll() {
  check_usable();
  OwnerPtr owner;
  bool over;
  {
    const std::lock_guard lock(mutex_);
    // A thread inside the engine's wait will finish it; the handle is that thread's. Parts end in the order
    // posted; n_over_ is the first that has not.
    while (!over_ && !waiting_) {
      const auto status = handles_[n_over_].test();
      if (status == LOCKSTEP_PENDING) break;
      owner = advance(status);
    }
    over = over_ && copies_done();
  }
  announce(owner);
  return over;
}

// One thread at a time is inside the engine's wait, without the lock; others wait for it here. When its own
// deadline passes first, the next one takes over.
bool Work::State::settle(Deadline deadline) {
  OwnerPtr owner;
  std::unique_lock lock(mutex_);
  while (!over_) {
    // Woken whenever the thread inside the engine comes back, with a result or because its own time was over.
    if (waiting_) {
      changed_.wait_until(lock, deadline.time_point());
    } else {
      waiting_ = true;
      auto& handle = handles_[n_over_];
      lock.unlock();
      const auto status = handle.wait(deadline);
      lock.lock();
      waiting_ = false;
      if (status != LOCKSTEP_PENDING) owner = advance(status);
      changed_.notify_all();
    }
    if (!over_ && deadline.expired()) return false;
  }
  // A copy on the device: short, and nobody else is needed for it.
  if (copied_) copied_->synchronize();
  lock.unlock();
  announce(owner);
  return true;
}

void Work::State::order_stream() {
  const c10::Stream now = internal::current_stream(stream_->device());
  OwnerPtr owner;
  std::unique_lock lock(mutex_);
  // A handle is released by the thread that finds its operation complete; while this one is inside the engine,
  // waiting_ keeps the others away from it, as in settle().
  while (waiting_ && !over_) changed_.wait(lock);
  if (!over_) {
    waiting_ = true;
    lock.unlock();
    auto status = LOCKSTEP_OK;
    std::size_t part = n_over_;
    for (; status == LOCKSTEP_OK && part < handles_.size(); ++part)
      status = handles_[part].stream_wait(now.native_handle());
    lock.lock();
    waiting_ = false;
    if (status != LOCKSTEP_OK && !failure_) {
      failure_ = owner_->failure(status, handles_[part - 1].last_error());
      describe_failure();
    }
    changed_.notify_all();
  }
  if (failure_) return;
  try {
    if (copy_pending_) copy_back_in(now);
  } catch (...) {
    failure_ = base::current_failure();
    describe_failure();
    return;
  }
  if (copied_) copied_->block(now);
  ordered_ = true;
}

void Work::State::copy_back_in(const c10::Stream& stream) {
  copy_pending_ = false;
  std::optional<at::ThreadLocalStateGuard> as_caller;
  if (modes_) as_caller.emplace(*modes_);
  const c10::StreamGuard guard(stream);
  held_.copy_back();
  // The temporaries were allocated in the stream of the post, and may be freed while this one still reads them.
  if (stream != *stream_) {
    for (const auto& [to, from] : held_.copies) internal::record_use(from, stream);
    for (const auto& buffer : held_.buffers) internal::record_use(buffer, stream);
  }
  copied_.emplace(stream.device_type());
  copied_->record(stream);
}

Work::State::OwnerPtr Work::State::advance(lockstep_status status) {
  auto& handle = handles_[n_over_];
  if (status != LOCKSTEP_OK && !failure_) failure_ = owner_->failure(status, handle.last_error());
  handle.release();
  return ++n_over_ == handles_.size() ? finish() : nullptr;
}

// Pre: mutex_ is held. Returns the owner, so that its last reference is dropped, and the hook called, after
// the lock was released.
Work::State::OwnerPtr Work::State::finish() {
  if (!failure_ && copy_pending_) {
    try {
      if (stream_) {
        copy_back_in(*stream_);
      } else {
        copy_pending_ = false;
        std::optional<at::ThreadLocalStateGuard> as_caller;
        if (modes_) as_caller.emplace(*modes_);
        held_.copy_back();
      }
    } catch (...) {
      failure_ = base::current_failure();
    }
  }
  if (failure_) describe_failure();
  if (held_.event) held_.event->end();
  // Inputs are released here, results stay for result() and futures.
  held_ = {.results = std::move(held_.results)};
  const auto ended_ns = ended_ns_.load(std::memory_order_relaxed);
  ended_.duration_ms = static_cast<double>((ended_ns != 0 ? ended_ns : now_ns()) - started_ns_) * 1e-6;
  ended_.source_rank = owner_->world_rank(source_);
  over_ = true;
  // Under this state's mutex; the owner's is taken inside. Never the other way round.
  owner_->forget(this);
  return std::move(owner_);
}

void Work::State::announce(const OwnerPtr& owner) {
  if (!owner || !owner->shared().has_hook.load(std::memory_order_acquire)) return;
  // Over: nothing below changes any more.
  owner->shared().completed({.op = name_,
                             .sequence_number = sequence_,
                             .started = Deadline::from_monotonic_ns(started_ns_).time_point(),
                             .finished = Deadline::Clock::now(),
                             .failure = failure_ ? &*failure_ : nullptr});
}

std::string Work::State::describe() const {
  return owner_->describe(name_, sequence_, where_);
}

void Work::State::describe_failure() {
  if (!std::exchange(described_, true)) failure_->message = base::cat(describe(), ": ", failure_->message);
}

void Work::State::wait(std::optional<Milliseconds> timeout) {
  check_usable();
  if (stream_ && !timeout) {
    order_stream();
    if (const auto error = failure()) base::raise(*error);
    return;
  }
  const auto deadline = timeout ? Deadline::after(*timeout) : Deadline::never();
  if (!settle(deadline)) {
    const std::lock_guard lock(mutex_);
    if (!over_) {
      base::raise(
          ErrorKind::kTimeout,
          base::cat(describe(), ": not over after ", timeout->count(), " ms of waiting; it continues"),
          ErrorFamily::kBackend);
    }
  }
  if (const auto error = failure()) base::raise(*error);
}

std::optional<Failure> Work::State::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::vector<at::Tensor> Work::State::results() {
  {
    const std::lock_guard lock(mutex_);
    if (ordered_ && !failure_) return held_.results;
  }
  ended();
  return held_.results;
}

Work::Ended Work::State::ended() {
  if (!poll()) {
    const std::lock_guard lock(mutex_);
    // The sender that was named is known although the message may still be on its way to the device.
    if (ordered_ && !failure_ && owner_ && type_ == OpType::kRecv) {
      Ended known = ended_;
      known.source_rank = owner_->world_rank(source_);
      return known;
    }
    base::raise(ErrorKind::kUsage,
                base::cat(name_, " #", sequence_, " was asked how it ended before it is over; wait() first"));
  }
  const std::lock_guard lock(mutex_);
  if (failure_) base::raise(*failure_);
  return ended_;
}

}  // namespace lockstep
