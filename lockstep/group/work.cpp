#include "lockstep/group/work.h"

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/detail/timeout.h"
#include "lockstep/base/log.h"
#include "lockstep/group/detail/work_state.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep {
namespace {

// torch's WorkResult. Numbers that programs written for torch compare with.
constexpr std::int64_t kSuccess = 0, kTimedOut = 1, kCommError = 2, kUnknownError = 100;

// Kinds that are not listed have no number of their own in torch.
std::int64_t result_number(const std::optional<Failure>& failure) {
  if (!failure) return kSuccess;
  switch (failure->kind) {
    case ErrorKind::kTimeout:
      return kTimedOut;
    case ErrorKind::kPeerLost:
    case ErrorKind::kAborted:
    case ErrorKind::kSystem:
      return kCommError;
    default:
      return kUnknownError;
  }
}

// raise() picks the exception class by the failure's family; throwing is the only way to get a pointer to
// that class.
std::exception_ptr to_exception(const Failure& failure) {
  try {
    base::raise(failure);
  } catch (...) {
    return std::current_exception();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> new_future(c10::TypePtr type, std::vector<c10::Device> devices = {}) {
  return c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::move(devices));
}

c10::intrusive_ptr<c10::ivalue::Future> new_tensors_future(std::vector<c10::Device> devices = {}) {
  return new_future(c10::ListType::create(c10::TensorType::get()), std::move(devices));
}

c10::List<at::Tensor> to_list(const std::vector<at::Tensor>& tensors) {
  c10::List<at::Tensor> list;
  list.reserve(tensors.size());
  for (const auto& tensor : tensors) list.push_back(tensor);
  return list;
}

bool is_message(OpType type) {
  return type == OpType::kSend || type == OpType::kRecv || type == OpType::kRecvAnySource;
}

void check_has_future(OpType type) {
  if (is_message(type)) {
    base::raise(ErrorKind::kUsage, base::cat("get_future() of a ", name_of(type),
                                             ": only collectives have futures; use wait()"));
  }
}

void check_received(OpType type) {
  if (!is_message(type) || type == OpType::kSend) {
    base::raise(ErrorKind::kUsage,
                base::cat("source_rank() of a ", name_of(type), ": only receives have a source"));
  }
}

void check_timed(const Work::Ended& ended) {
  if (ended.duration_ms >= 0) return;
  base::raise(
      ErrorKind::kUsage,
      base::cat("duration() of ", name_of(ended.type), " #", ended.sequence_number,
                ": it was not timed; call enable_collectives_timing() of the group first, or use async_op"));
}

}  // namespace

// No default: the compiler warns when an OpType is added and not named here.
const char* name_of(OpType type) noexcept {
  switch (type) {
    case OpType::kBroadcast:
      return "broadcast";
    case OpType::kAllReduce:
    case OpType::kAllReduceSparse:
      return "all_reduce";
    case OpType::kAllReduceCoalesced:
      return "all_reduce_coalesced";
    case OpType::kReduce:
      return "reduce";
    case OpType::kAllGather:
      return "all_gather";
    case OpType::kAllGatherIntoTensor:
      return "all_gather_into_tensor";
    case OpType::kAllGatherCoalesced:
      return "all_gather_coalesced";
    case OpType::kGather:
      return "gather";
    case OpType::kScatter:
      return "scatter";
    case OpType::kReduceScatter:
      return "reduce_scatter";
    case OpType::kAllToAllSingle:
      return "all_to_all_single";
    case OpType::kAllToAll:
      return "all_to_all";
    case OpType::kSend:
      return "send";
    case OpType::kRecv:
    case OpType::kRecvAnySource:
      return "recv";
    case OpType::kBarrier:
      return "barrier";
    case OpType::kReduceScatterTensor:
      return "reduce_scatter_tensor";
    case OpType::kCoalesced:
      return "coalesced operations";
    case OpType::kUnknown:
      break;
  }
  return "unknown operation";
}

// Futures of a State: here beside those of a Work that has none.

// modes_: callbacks of the future run with the thread-local modes of whoever asked for it.
Work::State::FuturePtr Work::State::future() {
  check_has_future(type_);
  FuturePtr future;
  {
    const std::lock_guard lock(mutex_);
    // At most one of each kind per State: copies of a Work share their future.
    if (!future_)
      future_ = new_tensors_future(internal::future_devices(stream_ ? stream_->device() : c10::kCPU));
    if (!modes_) modes_.emplace();
    future = future_;
  }
  // Without the lock: when the operation is over already, this resolves the future here, which runs
  // callbacks.
  call_me_when_over();
  return future;
}

Work::State::FuturePtr Work::State::future_of_result() {
  FuturePtr future;
  {
    const std::lock_guard lock(mutex_);
    if (!result_future_) result_future_ = new_future(c10::IntType::get());
    if (!modes_) modes_.emplace();
    future = result_future_;
  }
  call_me_when_over();
  return future;
}

// The flags make each future resolve once; marking runs callbacks, so it happens without the lock.
void Work::State::resolve() {
  FuturePtr tensors, number;
  std::optional<Failure> failure;
  {
    const std::lock_guard lock(mutex_);
    if (future_ && !std::exchange(future_resolved_, true)) tensors = future_;
    if (result_future_ && !std::exchange(result_resolved_, true)) number = result_future_;
    failure = failure_;
  }
  // results of a State that is over do not change.
  if (number) number->markCompleted(result_number(failure));
  if (tensors && failure) tensors->setError(to_exception(*failure));
  if (tensors && !failure) tensors->markCompleted(to_list(held_.results));
}

Work::Work() = default;
Work::Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
Work::Work(at::Tensor result, const Ended& ended) : result_(std::move(result)), ended_(ended) {}

bool Work::wait(std::optional<Milliseconds> timeout) const {
  // Also without a state: a wrong timeout must not pass just because the operation is over.
  if (timeout) base::checked_timeout(*timeout, "Work::wait");
  if (state_) state_->wait(timeout);
  return true;
}

void Work::synchronize() const {
  wait();
}

void Work::block_current_stream() const {
  if (!state_) return;
  state_->check_usable();
  if (state_->on_device()) state_->order_stream();
}

// A Work without a state is of an operation that was over when its call returned.
bool Work::done() const {
  return !state_ || state_->poll();
}

bool Work::is_success() const {
  return !state_ || (state_->poll() && !state_->failure());
}

std::exception_ptr Work::error() const {
  // An exception per call, made of a copy of the failure: threads that rethrow it share nothing.
  if (!state_ || !state_->poll()) return nullptr;
  const auto failure = state_->failure();
  return failure ? to_exception(*failure) : nullptr;
}

std::vector<at::Tensor> Work::result() const {
  if (state_) return state_->results();
  // A barrier, or a Work that was default-constructed.
  if (!result_.defined()) return {};
  return {result_};
}

// Through the future of the result, which every operation has; exceptions of `fn` end here, since nobody
// waits for them.
void Work::on_done(std::function<void(const Work&)> fn) const {
  get_future_result()->addCallback([work = *this, fn = std::move(fn)](c10::ivalue::Future&) {
    try {
      fn(work);
    } catch (...) {
      base::log(LogLevel::kError,
                base::cat("what follows ", name_of(work.op_type()), " #", work.sequence_number(),
                          " threw: ", base::current_failure().message));
    }
  });
}

int Work::source_rank() const {
  check_received(op_type());
  return state_ ? state_->ended().source_rank : ended_.source_rank;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::get_future() const {
  if (state_) return state_->future();
  check_has_future(ended_.type);
  auto future =
      new_tensors_future(internal::future_devices(result_.defined() ? result_.device() : c10::kCPU));
  // Completed before anybody has it: callbacks added later run on the thread that adds them.
  future->markCompleted(to_list(result()));
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::get_future_result() const {
  if (state_) return state_->future_of_result();
  auto future = new_future(c10::IntType::get());
  future->markCompleted(kSuccess);
  return future;
}

double Work::duration() const {
  const Ended ended = state_ ? state_->ended() : ended_;
  check_timed(ended);
  return ended.duration_ms;
}

OpType Work::op_type() const {
  return state_ ? state_->type() : ended_.type;
}

std::uint64_t Work::sequence_number() const {
  return state_ ? state_->sequence_number() : ended_.sequence_number;
}

}  // namespace lockstep
