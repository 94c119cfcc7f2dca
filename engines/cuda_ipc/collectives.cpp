// Collectives on the progress thread: publishing what had to wait, launching on the leader, completing everywhere.
#include <algorithm>

#include "engines/cuda_ipc/communicator.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/plugin.h"

namespace lockstep::cuda_ipc {

// One collective k, as the words of the page show it (layout.h):
//
//   post      call[r][k] published, ready[r][k] enqueued in r's stream      (or deferred beyond the window: publish_deferred)
//   leader    all_called -> compare -> all_ready -> launching[k] -> kernels, done[k] enqueued -> submitted[k]
//   every r   sees submitted[k]: stream_wait may enqueue; sees done[k]: copies staged memory back, completes
//
// All of this file runs on the process's progress thread; mutex_ guards only what callers hand over.
Served::State Communicator::serve(bool slow) noexcept {
  bool moved = false;
  try {
    moved = advance(slow);
  } catch (...) {
    break_with(current_failure());
    moved = true;
  }
  if (moved) return State::kMoved;
  const bool pending = !collectives_.empty() || !sends_.empty() || !receives_.empty() || !deferred_.empty();
  return pending ? State::kPending : State::kIdle;
}

bool Communicator::advance(bool slow) {
  take_posted();
  if (page_->broken() || closed_.load(std::memory_order_acquire)) return end_all();
  bool moved = launch_collectives();
  moved = complete_collectives() || moved;
  moved = serve_receives() || moved;
  moved = serve_sends() || moved;
  moved = publish_deferred() || moved;
  if (slow) check_slowly();
  return moved;
}

void Communicator::take_posted() {
  std::vector<OperationPtr> fresh;
  {
    const base::MutexLock lock(mutex_);
    fresh.swap(posted_);
  }
  for (OperationPtr& operation : fresh) {
    if (operation->device != nullptr) {
      // This thread's calls have nothing to do with a capture of the program's.
      static thread_local const cuda::RelaxedCaptureScope relaxed(operation->device->driver());
    }
    if (operation->op.kind == LOCKSTEP_RECV) {
      receives_.push_back(std::move(operation));
    } else if (operation->op.kind == LOCKSTEP_SEND) {
      (operation->deferred ? deferred_ : sends_).push_back(std::move(operation));
    } else {
      collectives_.push_back(std::move(operation));
    }
  }
}

bool Communicator::has_reached(const Operation& operation) {
  if (!operation.announced.load(std::memory_order_acquire)) return false;
  if (!operation.on_device()) return true;
  const cuda::ContextScope scope(operation.device->context());
  const cuda::Driver& driver = operation.device->driver();
  const cuda::Result result = driver.event_query(operation.reached.get());
  if (result != cuda::kSuccess && result != cuda::kNotReady) cuda::check(driver, result, "cuEventQuery");
  return result == cuda::kSuccess;
}

// What was posted beyond the window, when it has moved and the stream has reached the post: the host stores the ready word.
bool Communicator::publish_deferred() {
  bool moved = false;
  const std::size_t n = std::min<std::size_t>(collectives_.size(), kWindow);
  for (std::size_t i = 0; i < n; ++i) {
    Operation& operation = *collectives_[i];
    if (!operation.deferred || operation.published || !has_reached(operation)) continue;
    publish_call(operation);
    page_->ready(rank_, operation.number).store(operation.number, std::memory_order_release);
    operation.published = moved = true;
  }
  while (!deferred_.empty() && has_reached(*deferred_.front())) {
    Operation& send = *deferred_.front();
    {
      const base::MutexLock lock(mutex_);
      if (!publish_message(send)) break;
      n_deferred_sends_.fetch_sub(1, std::memory_order_relaxed);
    }
    page_->message_ready(rank_, send.slot).store(send.number, std::memory_order_release);
    send.published = moved = true;
    sends_.splice(sends_.end(), deferred_, deferred_.begin());
  }
  return moved;
}

// ---- the leader ----

bool Communicator::launch_collectives() {
  if (rank_ != kLeader || collectives_.empty()) return false;
  const std::uint64_t before = next_launch_;
  while (next_launch_ - collectives_.front()->number < collectives_.size() &&
         launch_next(*collectives_[next_launch_ - collectives_.front()->number]))
    ++next_launch_;
  return next_launch_ != before;
}

bool Communicator::all_called(std::uint64_t k) {
  for (int r = 0; r < size_; ++r) {
    if (page_->call(r, k).number.load(std::memory_order_acquire) != k) return false;
  }
  return true;
}

bool Communicator::all_ready(std::uint64_t k) {
  for (int r = 0; r < size_; ++r) {
    if (page_->ready(r, k).load(std::memory_order_acquire) != k) return false;
  }
  return true;
}

// The order of checks is that of the words above; `false` leaves k for the next look. compared_ keeps the comparison, which
// reads all calls, from being made again while streams are still on their way.
bool Communicator::launch_next(Operation& own) {
  const std::uint64_t k = own.number;
  if (compared_ < k) {
    if (!all_called(k)) return false;
    if (auto failure = compare(k)) {
      break_with(std::move(*failure));
      return false;
    }
    compared_ = k;
  }
  if (!all_ready(k)) return false;
  const std::vector<Launch> launches = plan_collective(own);
  // Nothing to do on the device: over as soon as what was before it is.
  if (launches.empty() && k > 1 && ControlPage::number_in(page_->done(k - 1)) < k - 1) return false;
  // seq_cst: a rank that breaks the group stores `broken` and then reads this. Either it sees that the buffers may be
  // written to, or this sees that they must not be.
  page_->launching(k).store(k, std::memory_order_seq_cst);
  if (page_->header().broken.load(std::memory_order_seq_cst) != 0) {
    page_->launching(k).store(0, std::memory_order_release);
    return false;
  }
  if (launches.empty()) {
    ControlPage::put_number(page_->done(k), k);
  } else {
    const cuda::ContextScope scope(own.device->context());
    for (const Launch& launch : launches) own.device->launch(launch);
    page_->enqueue_own_write(own.device->stream(), page_->done(k), k);
  }
  page_->submitted(k).store(k, std::memory_order_release);
  return true;
}

std::optional<Failure> Communicator::compare(std::uint64_t k) {
  const Call& first = page_->call(0, k);
  for (int r = 1; r < size_; ++r) {
    const Call& other = page_->call(r, k);
    if (other.kind == first.kind && other.dtype == first.dtype && other.reduce == first.reduce &&
        other.root == first.root && other.count == first.count && other.tag == first.tag)
      continue;
    return Failure{.kind = ErrorKind::kUsage,
                   .message = base::cat("ranks called different operations: rank 0 called ", describe(first),
                                        ", but rank ", r, " called ", describe(other))};
  }
  return comm::is_uneven(static_cast<lockstep_op_kind>(first.kind)) ? compare_counts(k) : std::nullopt;
}

// ALL_GATHER_V: the lists are equal. ALL_TO_ALL_V: what s sends to r is what r expects from s.
std::optional<Failure> Communicator::compare_counts(std::uint64_t k) {
  const auto n = static_cast<std::size_t>(size_);
  const bool all_to_all = page_->call(0, k).kind == LOCKSTEP_ALL_TO_ALL_V;
  for (std::size_t r = 0; r < n; ++r) {
    const std::uint64_t* const expected = page_->call(static_cast<int>(r), k).counts() + n;
    for (std::size_t s = 0; s < n; ++s) {
      const std::uint64_t sent =
          all_to_all ? page_->call(static_cast<int>(s), k).counts()[r] : page_->call(0, k).counts()[n + s];
      if (sent == expected[s]) continue;
      return Failure{
          .kind = ErrorKind::kUsage,
          .message = base::cat("rank ", s, " sends ", sent, " elements to rank ", r, ", which expects ",
                               expected[s], ", in ", describe(page_->call(static_cast<int>(r), k)))};
    }
  }
  return std::nullopt;
}

std::vector<Launch> Communicator::plan_collective(Operation& own) {
  if (own.op.kind == LOCKSTEP_BARRIER) return {};
  std::vector<PlannedCall> calls;
  for (int r = 0; r < size_; ++r) {
    Call& call = page_->call(r, own.number);
    lockstep_op theirs = own.op;
    theirs.send_counts = call.counts();
    theirs.recv_counts = call.counts() + size_;
    const Extent extent = extent_of(theirs, r, size_);
    const std::size_t width = comm::size_of(own.op.dtype);
    const void* const send = locate(*own.device, r, call.device, call.send, extent.send * width);
    calls.push_back(
        {send, locate(*own.device, r, call.device, call.recv, extent.recv * width), call.counts()});
  }
  return plan({own.op.kind, own.op.dtype, own.op.reduce, own.op.root, own.op.count, own.recv_counts.data()},
              calls);
}

void* Communicator::locate(DeviceState& device, int rank, int its_device, const MemoryRef& ref,
                           std::uint64_t n_bytes) {
  if (n_bytes == 0) return nullptr;
  const cuda::ContextScope scope(device.context());
  if (same_process(rank)) {
    device.reach(its_device);
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(ref.address));
  }
  try {
    return device.open(pid(rank), ref, n_bytes);
  } catch (const cuda::Error& error) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("the memory of ", who(rank), " cannot be opened on device ",
                          device.context().device(), " of ", who(rank_), ": ", error.what()),
                ErrorFamily::kBackend);
  }
}

// ---- every rank ----

bool Communicator::complete_collectives() {
  bool moved = false;
  while (!collectives_.empty()) {
    const OperationPtr operation = collectives_.front();
    const std::uint64_t k = operation->number;
    if (ControlPage::number_in(page_->done(k)) < k || !copied_back(*operation)) break;
    collectives_.pop_front();
    // Before the callback, which may post: the slot is free.
    completed_.store(k, std::memory_order_release);
    complete(*operation, nullptr);
    moved = true;
  }
  const std::size_t n = std::min<std::size_t>(collectives_.size(), kWindow);
  for (std::size_t i = 0; i < n; ++i) {
    Operation& operation = *collectives_[i];
    if (operation.phase.load(std::memory_order_relaxed) == Operation::kPosted &&
        operation.staged_recv.memory == nullptr &&
        page_->submitted(operation.number).load(std::memory_order_acquire) >= operation.number) {
      submitted(operation);
      moved = true;
    }
  }
  return moved;
}

bool Communicator::copied_back(Operation& operation) {
  if (operation.staged_recv.memory == nullptr) return true;
  DeviceState& device = *operation.device;
  const cuda::Driver& driver = device.driver();
  const cuda::ContextScope scope(device.context());
  if (!operation.copied) {
    cuda::OwnedEvent copied = cuda::create_event(device.context());
    cuda::check(driver,
                driver.memcpy_async(reinterpret_cast<std::uintptr_t>(operation.op.recv),
                                    operation.recv.address, operation.recv_bytes(), device.stream()),
                "cuMemcpyAsync");
    cuda::check(driver, driver.event_record(copied.get(), device.stream()), "cuEventRecord");
    operation.copied = std::move(copied);
    submitted(operation);
  }
  const cuda::Result result = driver.event_query(operation.copied.get());
  if (result != cuda::kSuccess && result != cuda::kNotReady) cuda::check(driver, result, "cuEventQuery");
  return result == cuda::kSuccess;
}

}  // namespace lockstep::cuda_ipc
