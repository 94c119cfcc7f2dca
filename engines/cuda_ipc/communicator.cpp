// Joining, posting and waiting: what runs on callers' threads.
#include "engines/cuda_ipc/communicator.h"

#include <sched.h>

#include <chrono>
#include <cstring>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/local/wake.h"

namespace lockstep::cuda_ipc {
namespace {

constexpr std::chrono::microseconds kSpin{60};

bool binds_device(const lockstep_comm_config& config) {
  return config.struct_size > offsetof(lockstep_comm_config, device) && config.device_kind == LOCKSTEP_CUDA;
}

cuda::Stream stream_of(const lockstep_op& op) {
  return static_cast<cuda::Stream>(op.stream);
}

}  // namespace

Communicator::Communicator(const lockstep_comm_config& config, Communicator* parent)
    : rank_(config.rank),
      size_(config.size),
      name_(config.name != nullptr ? config.name : "group"),
      host_(config.host),
      progress_(Progress::of_process()),
      slot_numbers_(kMessages),
      published_(static_cast<std::size_t>(config.size)) {
  // What can be set up before any stream waits is set up now.
  const auto prepare = [&](ControlPage& page) {
    if (!binds_device(config)) return;
    DeviceState& device = DeviceState::of(config.device);
    const cuda::ContextScope scope(device.context());
    page.attach(device.context());
  };
  std::optional<Parent> relatives;
  if (parent != nullptr) relatives = Parent{parent->family_, parent->ranks_};
  Joined joined = join(config, relatives ? &*relatives : nullptr, prepare);
  family_ = std::move(joined.family);
  ranks_ = std::move(joined.ranks);
  page_ = std::move(joined.page);
  family_->add(*this);
  progress_->add(*this);
}

Communicator::~Communicator() {
  leave(nullptr);
  while (ended_.load(std::memory_order_acquire) == 0) {
    progress_->wake();
    local::futex_sleep(ended_, 0, Deadline::after(Milliseconds(10)));
  }
  progress_->remove(*this);
  family_->remove(*this);
  ControlPage::retire(std::move(page_));
}

// ---- posting ----

std::shared_ptr<Operation> Communicator::post(const lockstep_op& op) {
  auto operation = std::make_shared<Operation>(op, size_);
  operation->extent = extent_of(operation->op, rank_, size_);
  const bool stopped = closed_.load() || page_->broken();
  // What is wrong here is wrong before the others see the call.
  if (!stopped && operation->on_device()) bind(*operation);
  try {
    bool at_once = false;
    {
      const base::MutexLock lock(mutex_);
      const bool message = comm::is_point_to_point(op.kind);
      at_once = message ? enqueue_message(operation) : enqueue_collective(operation);
      if (stopped) at_once = true;
      operation->deferred = !at_once;
      posted_.push_back(operation);
    }
    if (!stopped) announce(*operation);
    operation->announced.store(true, std::memory_order_release);
  } catch (...) {
    // The ranks' queues would differ by this one.
    break_with(current_failure());
    throw;
  }
  progress_->wake();
  return operation;
}

void Communicator::bind(Operation& operation) {
  DeviceState& device = DeviceState::of(operation.op.device);
  const cuda::ContextScope scope(device.context());
  if (cuda::is_capturing(device.driver(), stream_of(operation.op)))
    base::raise(ErrorKind::kUnsupported,
                "the stream is being captured into a graph, which cuda_ipc does not support");
  operation.device = &device;
  page_->attach(device.context());
  describe_buffers(operation);
}

// Where the buffers are for the process that launches: the leader's, or of a message the receiver's. Memory that cannot be
// exported is staged: copied in the caller's stream before "ready", and back after "done" (copied_back).
void Communicator::describe_buffers(Operation& operation) {
  DeviceState& device = *operation.device;
  const lockstep_op& op = operation.op;
  const int launcher = op.kind == LOCKSTEP_SEND ? op.root : op.kind == LOCKSTEP_RECV ? rank_ : kLeader;
  const bool exports = !same_process(launcher);
  const auto stage = [&](std::uint64_t n_bytes, MemoryRef& ref) {
    const Stage made{&device, device.allocate(n_bytes)};
    if (!device.describe(made.memory, true, ref))
      base::raise(ErrorKind::kSystem, "CUDA does not export memory");
    return made;
  };
  if (operation.extent.send > 0 && !device.describe(op.send, exports, operation.send)) {
    const std::uint64_t n_bytes = operation.send_bytes();
    operation.staged_send = stage(n_bytes, operation.send);
    cuda::check(
        device.driver(),
        device.driver().memcpy_async(operation.send.address, reinterpret_cast<std::uintptr_t>(op.send),
                                     n_bytes, stream_of(op)),
        "cuMemcpyAsync");
  }
  if (operation.extent.recv > 0 && !device.describe(op.recv, exports, operation.recv))
    operation.staged_recv = stage(operation.recv_bytes(), operation.recv);
}

bool Communicator::enqueue_collective(const OperationPtr& operation) {
  operation->number = ++last_number_;
  return operation->number <= completed_.load(std::memory_order_acquire) + kWindow;
}

// A receive is known to this rank alone. Sends are published in their order, so behind one that waits all wait.
bool Communicator::enqueue_message(const OperationPtr& operation) {
  if (operation->op.kind == LOCKSTEP_RECV) return false;
  if (n_deferred_sends_.load(std::memory_order_relaxed) == 0 && publish_message(*operation)) return true;
  n_deferred_sends_.fetch_add(1, std::memory_order_relaxed);
  return false;
}

// A slot whose ready word was not written yet still belongs to a stream, also when its message was withdrawn.
bool Communicator::publish_message(Operation& operation) {
  for (std::size_t turn = 0; turn < kMessages; ++turn) {
    const std::size_t slot = (last_message_ + turn) % kMessages;
    Message& message = page_->message(rank_, slot);
    if (message.state.load(std::memory_order_acquire) != Message::kFree ||
        page_->message_ready(rank_, slot).load(std::memory_order_acquire) != slot_numbers_[slot])
      continue;
    operation.slot = slot;
    operation.number = slot_numbers_[slot] = ++last_message_;
    message.to = operation.op.root;
    message.tag = operation.op.tag;
    message.device = operation.op.device;
    message.dtype = operation.op.dtype;
    message.count = operation.op.count;
    message.number = operation.number;
    message.send = operation.send;
    comm::put(message.where, sizeof message.where, operation.where);
    message.state.store(Message::kPosted, std::memory_order_release);
    // A receiver that has read this number finds every message up to it: it takes them in order.
    page_->rank(rank_).published.store(operation.number, std::memory_order_release);
    return true;
  }
  return false;
}

void Communicator::publish_call(Operation& operation) {
  Call& call = page_->call(rank_, operation.number);
  const lockstep_op& op = operation.op;
  call.kind = op.kind;
  call.dtype = op.dtype;
  call.reduce = op.reduce;
  call.root = op.root;
  call.tag = op.tag;
  call.device = operation.on_device() ? op.device : -1;
  call.count = op.count;
  call.send = operation.send;
  call.recv = operation.recv;
  comm::put(call.where, sizeof call.where, operation.where);
  const auto n = static_cast<std::size_t>(size_);
  if (!operation.send_counts.empty()) std::memcpy(call.counts(), operation.send_counts.data(), n * 8);
  if (!operation.recv_counts.empty()) std::memcpy(call.counts() + n, operation.recv_counts.data(), n * 8);
  call.number.store(operation.number, std::memory_order_release);
}

// The stream says when it has reached the post: through the page, or with an event where there is no word for it yet.
void Communicator::announce(Operation& operation) {
  const bool message = comm::is_point_to_point(operation.op.kind);
  if (operation.deferred) {
    if (!operation.on_device()) return;
    const cuda::ContextScope scope(operation.device->context());
    const cuda::Driver& driver = operation.device->driver();
    cuda::OwnedEvent reached = cuda::create_event(operation.device->context());
    cuda::check(driver, driver.event_record(reached.get(), stream_of(operation.op)), "cuEventRecord");
    operation.reached = std::move(reached);
    return;
  }
  if (!message) publish_call(operation);
  Word& ready = message ? page_->message_ready(rank_, operation.slot) : page_->ready(rank_, operation.number);
  if (!operation.on_device()) return ready.store(operation.number, std::memory_order_release);
  const cuda::ContextScope scope(operation.device->context());
  page_->enqueue_write(operation.device->context(), stream_of(operation.op), ready, operation.number);
}

// ---- waiting ----

bool Communicator::wait(Operation& operation, Deadline deadline) {
  for (;;) {
    const std::uint32_t phase = operation.phase.load(std::memory_order_acquire);
    if (phase == Operation::kOver) return true;
    if (deadline.expired()) return false;
    local::futex_sleep(operation.phase, phase, deadline);
  }
}

std::optional<Failure> Communicator::stream_wait(Operation& operation, void* stream) {
  const lockstep_op& op = operation.op;
  const bool message = comm::is_point_to_point(op.kind);
  const int launcher = op.kind == LOCKSTEP_SEND ? op.root : op.kind == LOCKSTEP_RECV ? rank_ : kLeader;
  const bool staged = operation.staged_recv.memory != nullptr;
  std::uint32_t phase = operation.phase.load(std::memory_order_acquire);
  // A deferred one has no slot yet, one that was posted when the group was broken never will. The operation's own deadline
  // ends the wait.
  const bool submitted_here =
      same_process(launcher) || staged || operation.deferred || operation.device == nullptr;
  // Submitted within microseconds when the others are there: waking up takes longer than that.
  for (const Deadline spin = Deadline::after(kSpin);
       submitted_here && phase == Operation::kPosted && !spin.expired();) {
    ::sched_yield();
    phase = operation.phase.load(std::memory_order_acquire);
  }
  while (submitted_here && phase == Operation::kPosted) {
    local::futex_sleep(operation.phase, Operation::kPosted, Deadline::never());
    phase = operation.phase.load(std::memory_order_acquire);
  }
  if (phase == Operation::kOver) {
    if (operation.status == LOCKSTEP_OK) return std::nullopt;
    return Failure{.kind = ErrorKind::kInternal, .message = operation.error};  // the caller reads the status
  }
  const cuda::ContextScope scope(operation.device->context());
  if (staged) {
    const cuda::Driver& driver = operation.device->driver();
    cuda::check(driver,
                driver.stream_wait_event(static_cast<cuda::Stream>(stream), operation.copied.get(), 0),
                "cuStreamWaitEvent");
    return std::nullopt;
  }
  const int table = op.kind == LOCKSTEP_RECV ? operation.source : rank_;
  Word& done = message ? page_->message_done(table, operation.slot) : page_->done(operation.number);
  operation.in_stream.store(true, std::memory_order_release);
  page_->enqueue_wait(operation.device->context(), static_cast<cuda::Stream>(stream), done, operation.number);
  return std::nullopt;
}

}  // namespace lockstep::cuda_ipc
