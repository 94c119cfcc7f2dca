#include "engines/nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::nccl_plugin {
namespace {

using base::cat;

const Library& find_nccl() {
  std::string why;
  if (const Library* const found = Library::find(&why)) return *found;
  base::raise(ErrorKind::kUnsupported, why, ErrorFamily::kBackend);
}

const cuda::Driver& find_driver() {
  std::string why;
  if (const cuda::Driver* const found = cuda::Driver::find(&why)) return *found;
  base::raise(ErrorKind::kUnsupported, cat("the CUDA driver cannot be used: ", why), ErrorFamily::kBackend);
}

const char* options_of(const lockstep_comm_config& config) {
  return config.struct_size >= sizeof(lockstep_comm_config) ? config.options : nullptr;
}

bool binds_device(const lockstep_comm_config& config) {
  return config.struct_size >= sizeof(lockstep_comm_config) && config.device_kind == LOCKSTEP_CUDA;
}

}  // namespace

Communicator::Communicator(const lockstep_comm_config& config)
    : name_(config.name != nullptr ? config.name : ""),
      nccl_(find_nccl()),
      driver_(find_driver()),
      options_(Options::parse(options_of(config))),
      peers_(config),
      messages_(peers_) {
  if (!binds_device(config)) return;
  try {
    Gpu& gpu = bind(config.device);
    gpu.collectives.connect();
    kick();
    if (options_.blocking) await_connected(gpu, Deadline::from_monotonic_ns(config.deadline_ns));
  } catch (...) {
    // The others have joined: they must hear that this rank has not.
    peers_.tell_broken(explain());
    peers_.publish();
    throw;
  }
}

// Raises why there is no communicator; then the progress thread has returned.
void Communicator::await_connected(Gpu& gpu, Deadline deadline) {
  auto pause = std::chrono::microseconds(50);
  while (!gpu.collectives.ready() && !stopped_ && !deadline.expired()) {
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(2000));
  }
  if (gpu.collectives.ready()) return;
  if (!stopped_)
    break_with({.kind = ErrorKind::kTimeout,
                .message = cat("rank ", rank(), " ran out of time while NCCL's communicator was made"),
                .family = ErrorFamily::kBackend,
                .peer = {}});
  const auto why = failure();
  leave(nullptr);
  wait_closed(Deadline::after(Milliseconds(10'000)));
  base::raise(*why);
}

Communicator::~Communicator() = default;

// ---- the device

int Communicator::device_for(const lockstep_op& op) const {
  if (op.device_kind == LOCKSTEP_CUDA) return op.device;
  // A barrier of the host: on the device that is bound, or else the caller's current one.
  if (const Gpu* const bound = gpu_now_.load(std::memory_order_acquire)) return bound->context.gpu.device();
  cuda::Device current = 0;
  if (driver_.ctx_get_device(&current) == cuda::kSuccess) return current;
  base::raise(ErrorKind::kUsage,
              "a barrier on NCCL needs a GPU, and this rank has not used one: bind a device when the group "
              "is created",
              ErrorFamily::kBackend);
}

Communicator::Gpu& Communicator::bind(const lockstep_op& op) {
  return bind(device_for(op));
}

Communicator::Gpu& Communicator::bind(int device) {
  if (Gpu* const bound = gpu_now_.load(std::memory_order_acquire)) {
    if (bound->context.gpu.device() != device)
      base::raise(ErrorKind::kUsage,
                  cat("this rank uses device ", bound->context.gpu.device(), " in group \"", name_,
                      "\", the operation is on device ", device),
                  ErrorFamily::kBackend);
    return *bound;
  }
  const auto& context = cuda::PrimaryContext::of(driver_, device);
  const base::MutexLock lock(mutex_);
  if (!gpu_) {
    std::vector<int> all(static_cast<std::size_t>(size()));
    for (int r = 0; r < size(); ++r) all[static_cast<std::size_t>(r)] = r;
    gpu_ = std::make_unique<Gpu>(LaneContext{.nccl = nccl_,
                                             .gpu = context,
                                             .events = std::make_shared<EventPool>(context),
                                             .options = options_,
                                             .peers = peers_,
                                             .stopped = stopped_},
                                 std::move(all));
    gpu_now_.store(gpu_.get(), std::memory_order_release);
  }
  return *gpu_;
}

// ---- calls

OperationPtr Communicator::make(const lockstep_op& op) {
  auto operation = std::make_shared<Operation>(op, size());
  // Messages are issued one by one, when they are matched.
  if (comm::is_point_to_point(op.kind)) operation->op.flags &= ~LOCKSTEP_OP_MORE_FOLLOW;
  return operation;
}

void Communicator::add(const OperationPtr& operation) {
  const base::MutexLock lock(mutex_);
  if (!comm::is_point_to_point(operation->op.kind)) {
    operation->sequence = ++called_;
    peers_.tell_called(called_);
  }
  operation->place = pending_.insert(pending_.end(), operation);
}

OperationPtr Communicator::post(const lockstep_op& op) {
  if (leaving_) raise_failure();
  Gpu& gpu = bind(op);
  auto operation = make(op);
  if (!stopped_ && op.device_kind == LOCKSTEP_CUDA) {
    const cuda::ContextScope scope(gpu.context.gpu);
    operation->ready = gpu.context.events->lend();
    cuda::check(driver_, driver_.event_record(operation->ready.get(), static_cast<cuda::Stream>(op.stream)),
                "cuEventRecord");
  }
  add(operation);
  enqueue(operation, gpu);
  return operation;
}

void Communicator::enqueue(const OperationPtr& operation, Gpu& gpu) {
  if (comm::is_point_to_point(operation->op.kind)) {
    const base::MutexLock lock(mutex_);
    posted_messages_.push_back(operation);
  } else if (!stopped_) {
    gpu.collectives.queue(operation);
    try {
      gpu.collectives.issue_queued();
    } catch (...) {
      break_with(explain());
    }
  }
  kick();
}

void Communicator::run(const lockstep_op& op) {
  if (stopped_) raise_failure();
  lockstep_op silent = op;
  silent.done = nullptr;
  silent.flags &= ~LOCKSTEP_OP_MORE_FOLLOW;
  Gpu& gpu = bind(op);
  if (op.device_kind != LOCKSTEP_CUDA) {
    const auto operation = post(silent);
    wait(*operation, LOCKSTEP_NEVER);
    const base::MutexLock lock(operation->mutex);
    if (operation->status == LOCKSTEP_OK) return;
  } else if (comm::is_point_to_point(op.kind)) {
    const auto operation = post(silent);
    return stream_wait(*operation, op.stream);
  } else {
    return cuda::is_capturing(driver_, static_cast<cuda::Stream>(op.stream))
               ? run_captured(silent, gpu)
               : run_in_stream(make(silent), gpu);
  }
  raise_failure();
}

void Communicator::run_in_stream(const OperationPtr& operation, Gpu& gpu) {
  const cuda::ContextScope scope(gpu.context.gpu);
  add(operation);
  bool issued = false;
  try {
    issued = gpu.collectives.try_issue(operation, false);
    if (!issued) {
      operation->ready = gpu.context.events->lend();
      cuda::check(
          driver_,
          driver_.event_record(operation->ready.get(), static_cast<cuda::Stream>(operation->op.stream)),
          "cuEventRecord");
    }
  } catch (...) {
    break_with(explain());
    raise_failure();
  }
  if (issued) {
    // The thread need not hurry: it only watches over the operation.
    const base::MutexLock lock(mutex_);
    return ensure_thread();
  }
  enqueue(operation, gpu);
  stream_wait(*operation, operation->op.stream);
}

// Connecting allocates device memory and starts threads, which a capture forbids: it must have happened before.
void Communicator::run_captured(const lockstep_op& op, Gpu& gpu) {
  if (!gpu.collectives.ready())
    base::raise(ErrorKind::kUsage,
                "a collective cannot be captured before NCCL is connected: run one first, or bind a device",
                ErrorFamily::kBackend);
  const cuda::ContextScope scope(gpu.context.gpu);
  const auto operation = make(op);
  captured_ = true;
  kick();
  const Deadline deadline = Deadline::from_monotonic_ns(op.deadline_ns);
  try {
    while (!gpu.collectives.try_issue(operation, true)) {
      if (stopped_) break;
      if (deadline.expired())
        base::raise(ErrorKind::kTimeout, "operations posted before a captured one were not issued in time",
                    ErrorFamily::kBackend);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  } catch (...) {
    break_with(explain());
  }
  if (stopped_) raise_failure();
}

// The progress thread sees to it that this ends: at the operation's deadline at the latest.
void Communicator::await_issued(Operation& operation) {
  const base::MutexLock lock(operation.mutex);
  operation.changed.wait(operation.mutex, [&]() LOCKSTEP_REQUIRES(operation.mutex) {
    return operation.stage != Operation::Stage::kQueued;
  });
}

void Communicator::stream_wait(Operation& operation, void* stream) {
  await_issued(operation);
  {
    const base::MutexLock lock(operation.mutex);
    if (operation.stage == Operation::Stage::kOver) {
      if (operation.status == LOCKSTEP_OK) return;
      base::raise({.kind = static_cast<ErrorKind>(operation.status - LOCKSTEP_USAGE),
                   .message = operation.error,
                   .family = ErrorFamily::kBackend,
                   .peer = {}});
    }
  }
  Gpu& gpu = *gpu_now_.load(std::memory_order_acquire);
  const cuda::ContextScope scope(gpu.context.gpu);
  cuda::check(driver_, driver_.stream_wait_event(static_cast<cuda::Stream>(stream), operation.done.get(), 0),
              "cuStreamWaitEvent");
}

bool Communicator::wait(Operation& operation, std::int64_t deadline_ns) {
  kick();
  const base::MutexLock lock(operation.mutex);
  return operation.changed.wait_until(
      operation.mutex, Deadline::from_monotonic_ns(deadline_ns).time_point(),
      [&]() LOCKSTEP_REQUIRES(operation.mutex) { return operation.stage == Operation::Stage::kOver; });
}

// Pre: stopped.
void Communicator::raise_failure() {
  std::optional<Failure> why;
  {
    const base::MutexLock lock(mutex_);
    why = failure_;
  }
  throw Error(why.value_or(Failure{.kind = ErrorKind::kAborted, .message = "this rank has left the group"}));
}

}  // namespace lockstep::nccl_plugin
