// The C table over Communicator. Nothing is thrown across it. A lockstep_comm lives from comm_create to comm_destroy, a
// lockstep_handle from post to release; the operation behind a handle is shared with the communicator.
//
// In a process that was forked after comm_create nothing of the communicator is touched: NCCL's threads and the CUDA context
// are the parent's. Calls fail with LOCKSTEP_USAGE, and destroying it leaves everything alone.
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "engines/cuda/identity.h"
#include "engines/nccl/communicator.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/plugin.h"

using lockstep::nccl_plugin::Communicator;
using lockstep::nccl_plugin::OperationPtr;

struct lockstep_comm {
  std::unique_ptr<Communicator> impl;
};

struct lockstep_handle {
  Communicator& owner;
  OperationPtr operation;
};

namespace lockstep::nccl_plugin {
namespace {

// How long comm_destroy waits for NCCL to free a communicator.
constexpr Milliseconds kCloseTime{10'000};

lockstep_status status_of(const Failure& failure) {
  return static_cast<lockstep_status>(static_cast<int>(failure.kind) + LOCKSTEP_USAGE);
}

lockstep_status fail(const Failure& failure, char* error, std::size_t capacity) {
  comm::put(error, capacity, failure.message);
  return status_of(failure);
}

template <class Call>
lockstep_status reported(char* error, std::size_t capacity, const Call& call) {
  return comm::guarded(call, [&] { return fail(base::current_failure(), error, capacity); });
}

const lockstep_capabilities& all_capabilities() {
  static const lockstep_capabilities all = [] {
    lockstep_capabilities made = comm::all_kinds(can_reduce);
    made.crosses_hosts = 1;
    made.calls_back = 1;
    made.device_kinds = 1u << LOCKSTEP_CUDA;
    made.captures = 1;
    return made;
  }();
  return all;
}

// A barrier of the host has no memory: it is taken although the engine takes none of the host's.
void check(const lockstep_op& op, const Communicator& comm) {
  if (!comm.made_here())
    base::raise(ErrorKind::kUsage,
                "this process was forked after the group was created: NCCL cannot be used in it");
  lockstep_op asked = op;
  if (op.struct_size >= sizeof op && op.kind == LOCKSTEP_BARRIER) asked.device_kind = LOCKSTEP_CUDA;
  if (const char* wrong = comm::wrong_with(asked, comm.rank(), comm.size(), all_capabilities()))
    base::raise(ErrorKind::kUsage, wrong);
  if (op.kind == LOCKSTEP_RECV && op.root == -1 && comm.size() == 1)
    base::raise(ErrorKind::kUsage, "there is no other rank to receive from");
}

lockstep_status capabilities(lockstep_capabilities* out) {
  return comm::give_capabilities(all_capabilities(), out);
}

lockstep_status comm_create(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                            std::size_t capacity) {
  *out = nullptr;
  return reported(error, capacity, [&] {
    if (config->size < 1 || config->rank < 0 || config->rank >= config->size)
      base::raise(ErrorKind::kUsage,
                  base::cat("rank ", config->rank, " of ", config->size, " is not possible"));
    *out = new lockstep_comm{std::make_unique<Communicator>(*config)};
    return LOCKSTEP_OK;
  });
}

void comm_leave(lockstep_comm* comm, const char* cause) {
  try {
    if (comm->impl->made_here()) comm->impl->leave(cause);
  } catch (...) {
    comm->impl->log(0, base::current_failure().message);
  }
}

// Communicators that NCCL did not free in time, each with a thread inside NCCL that cannot be ended.
void keep_for_ever(std::unique_ptr<Communicator> stuck) {
  static base::Mutex mutex;
  static auto& all = *new std::vector<std::unique_ptr<Communicator>>;
  const base::MutexLock lock(mutex);
  all.push_back(std::move(stuck));
}

void comm_destroy(lockstep_comm* comm, const char* cause) {
  comm_leave(comm, cause);
  try {
    if (!comm->impl->made_here()) {
      static_cast<void>(comm->impl.release());  // a forked child: see above
    } else if (!comm->impl->wait_closed(Deadline::after(kCloseTime))) {
      comm->impl->log(
          1, "NCCL has not freed a communicator within 10 s; its memory is kept until the process ends");
      keep_for_ever(std::move(comm->impl));
    }
  } catch (...) {
    static_cast<void>(comm->impl.release());
  }
  delete comm;
}

void comm_abort(lockstep_comm* comm, const char* reason) {
  try {
    if (comm->impl->made_here()) comm->impl->abort(reason != nullptr ? reason : "no reason given");
  } catch (...) {
    comm->impl->log(0, base::current_failure().message);
  }
}

lockstep_status comm_failure(lockstep_comm* comm, char* error, std::size_t capacity, std::int32_t* peer_rank,
                             std::int64_t* peer_pid, char* peer_cause, std::size_t peer_cause_capacity) {
  return reported(error, capacity, [&] {
    const auto failure = comm->impl->failure();
    const LostPeer peer = failure ? failure->peer.value_or(LostPeer{}) : LostPeer{};
    if (peer_rank != nullptr) *peer_rank = peer.rank.value_or(-1);
    if (peer_pid != nullptr) *peer_pid = peer.pid.value_or(-1);
    comm::put(peer_cause, peer_cause_capacity, peer.cause);
    return failure ? fail(*failure, error, capacity) : LOCKSTEP_OK;
  });
}

// Without a buffer for a message: a usage error is logged; of other failures only the status is returned.
lockstep_status post(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  *out = nullptr;
  try {
    check(*op, *comm->impl);
    *out = new lockstep_handle{*comm->impl, comm->impl->post(*op)};
    return LOCKSTEP_OK;
  } catch (...) {
    const Failure failure = base::current_failure();
    if (failure.kind == ErrorKind::kUsage) comm->impl->log(0, failure.message);
    return status_of(failure);
  }
}

lockstep_status test(lockstep_handle* handle) {
  const base::MutexLock lock(handle->operation->mutex);
  return handle->operation->status;
}

lockstep_status wait(lockstep_handle* handle, std::int64_t deadline_ns) {
  return comm::guarded(
      [&] { return handle->owner.wait(*handle->operation, deadline_ns) ? test(handle) : LOCKSTEP_TIMEOUT; },
      [] { return status_of(base::current_failure()); });
}

void release(lockstep_handle* handle) {
  delete handle;
}

void last_error(lockstep_handle* handle, char* error, std::size_t capacity) {
  const base::MutexLock lock(handle->operation->mutex);
  comm::put(error, capacity, handle->operation->error);
}

lockstep_status run(lockstep_comm* comm, const lockstep_op* op, char* error, std::size_t capacity) {
  return reported(error, capacity, [&] {
    check(*op, *comm->impl);
    comm->impl->run(*op);
    return LOCKSTEP_OK;
  });
}

lockstep_status stream_wait(lockstep_handle* handle, void* stream) {
  return comm::guarded(
      [&] {
        handle->owner.stream_wait(*handle->operation, stream);
        return LOCKSTEP_OK;
      },
      [] { return status_of(base::current_failure()); });
}

// A rank whose process has no NCCL must not be taken for one that can use it.
lockstep_status device_identity(lockstep_device_kind kind, std::int32_t device, char* out,
                                std::size_t capacity) {
  std::string why;
  if (Library::find(&why) == nullptr) return LOCKSTEP_UNSUPPORTED;
  return cuda::device_identity(kind, device, out, capacity);
}

constexpr lockstep_engine kTable = {
    .struct_size = sizeof(lockstep_engine),
    .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
    .name = "nccl",
    .capabilities = capabilities,
    .comm_create = comm_create,
    .comm_destroy = comm_destroy,
    .comm_abort = comm_abort,
    .comm_failure = comm_failure,
    // No memory of its own: NCCL takes any device memory.
    .alloc = nullptr,
    .free = nullptr,
    .post = post,
    .test = test,
    .wait = wait,
    .release = release,
    .last_error = last_error,
    .run = run,
    .comm_leave = comm_leave,
    .stream_wait = stream_wait,
    .alloc_on = nullptr,
    .device_identity = device_identity,
};

}  // namespace
}  // namespace lockstep::nccl_plugin

extern "C" __attribute__((visibility("default"))) const lockstep_engine* lockstep_engine_v1(void) {
  return &lockstep::nccl_plugin::kTable;
}
