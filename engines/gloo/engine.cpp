// The C table over Communicator: checks calls, translates exceptions, owns what crosses the boundary as a
// pointer.
//
// Rules of the boundary. Nothing is thrown across it. A lockstep_comm lives from comm_create to comm_destroy,
// a lockstep_handle from post to release; the operation behind a handle is shared with the communicator, so a
// handle may be released while its operation runs. This file takes one lock only, an operation's mutex, for
// the moment of reading its status or error; nothing is called under it. Whoever frees an object ensures that
// no other call on it is in progress.
#include <string>

#include "engines/gloo/communicator.h"
#include "engines/gloo/reduce.h"
#include "lockstep/engine/plugin.h"

struct lockstep_comm {
  lockstep::gloo_plugin::Communicator impl;
  const lockstep_host* host;
  int rank;
};

struct lockstep_handle {
  lockstep::gloo_plugin::Communicator& owner;
  std::shared_ptr<lockstep::gloo_plugin::Operation> operation;
};

namespace lockstep::gloo_plugin {
namespace {

// The current exception as a value. Only inside a catch block.
Failure current() {
  try {
    throw;
  } catch (const Error& error) {
    return error.failure();
  } catch (const std::bad_alloc&) {
    return {.status = LOCKSTEP_RESOURCE, .message = "out of memory"};
  } catch (const std::exception& error) {
    return {.status = LOCKSTEP_INTERNAL, .message = error.what()};
  } catch (...) {
    return {.status = LOCKSTEP_INTERNAL, .message = "an unknown exception"};
  }
}

lockstep_status fail(const Failure& failure, char* error, std::size_t capacity) {
  comm::put(error, capacity, failure.message);
  return failure.status;
}

// What is thrown becomes a status, with its message in `error`.
template <class Call>
lockstep_status reported(char* error, std::size_t capacity, const Call& call) {
  return comm::guarded(call, [&] { return fail(current(), error, capacity); });
}

const lockstep_capabilities& all_capabilities() {
  static const lockstep_capabilities all = [] {
    lockstep_capabilities made = comm::all_kinds(can_reduce);
    made.crosses_hosts = 1;
    made.calls_back = 1;
    return made;
  }();
  return all;
}

// A call that is wrong by itself is refused here, before anything is sent; calls that do not fit those of
// other ranks are found by comparing them.
void check(const lockstep_op& op, int rank, int size) {
  if (const char* wrong = comm::wrong_with(op, rank, size, all_capabilities())) raise(LOCKSTEP_USAGE, wrong);
  if (op.kind == LOCKSTEP_RECV && op.root == -1 && size == 1)
    raise(LOCKSTEP_USAGE, "there is no other rank to receive from");
}

void log(const lockstep_comm* comm, const std::string& text) {
  if (comm->host->log != nullptr) comm->host->log(comm->host->context, 0, text.c_str());
}

lockstep_status capabilities(lockstep_capabilities* out) {
  return comm::give_capabilities(all_capabilities(), out);
}

lockstep_status comm_create(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                            std::size_t capacity) {
  *out = nullptr;
  return reported(error, capacity, [&] {
    if (config->size < 1 || config->rank < 0 || config->rank >= config->size) {
      raise(LOCKSTEP_USAGE, cat("rank ", config->rank, " of ", config->size, " is not possible"));
    }
    *out = new lockstep_comm{Communicator(*config), config->host, config->rank};
    return LOCKSTEP_OK;
  });
}

void comm_leave(lockstep_comm* comm, const char* cause) {
  try {
    comm->impl.leave(cause);
  } catch (...) {
    log(comm, current().message);
  }
}

void comm_destroy(lockstep_comm* comm, const char* cause) {
  comm_leave(comm, cause);
  delete comm;
}

void comm_abort(lockstep_comm* comm, const char* reason) {
  try {
    comm->impl.abort(reason != nullptr ? reason : "no reason given");
  } catch (...) {
    log(comm, current().message);
  }
}

lockstep_status comm_failure(lockstep_comm* comm, char* error, std::size_t capacity, std::int32_t* peer_rank,
                             std::int64_t* peer_pid, char* peer_cause, std::size_t peer_cause_capacity) {
  return reported(error, capacity, [&] {
    const auto failure = comm->impl.failure();
    if (peer_rank != nullptr) *peer_rank = failure ? failure->peer : -1;
    if (peer_pid != nullptr) *peer_pid = failure ? failure->pid : -1;
    comm::put(peer_cause, peer_cause_capacity, failure ? failure->cause : "");
    return failure ? fail(*failure, error, capacity) : LOCKSTEP_OK;
  });
}

// Without a buffer for a message: a usage error is logged; of other failures only the status is returned.
lockstep_status post(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  *out = nullptr;
  try {
    check(*op, comm->rank, comm->impl.size());
    *out = new lockstep_handle{comm->impl, comm->impl.post(*op)};
    return LOCKSTEP_OK;
  } catch (...) {
    const Failure failure = current();
    if (failure.status == LOCKSTEP_USAGE) log(comm, failure.message);
    return failure.status;
  }
}

lockstep_status test(lockstep_handle* handle) {
  const base::MutexLock lock(handle->operation->mutex);
  return handle->operation->status;
}

// A timeout of the wait leaves the operation running; its own deadline ends it.
lockstep_status wait(lockstep_handle* handle, std::int64_t deadline_ns) {
  return handle->owner.wait(*handle->operation, deadline_ns) ? test(handle) : LOCKSTEP_TIMEOUT;
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
    check(*op, comm->rank, comm->impl.size());
    comm->impl.run(*op);
    return LOCKSTEP_OK;
  });
}

constexpr lockstep_engine kTable = {
    .struct_size = sizeof(lockstep_engine),
    .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
    .name = "gloo",
    .capabilities = capabilities,
    .comm_create = comm_create,
    .comm_destroy = comm_destroy,
    .comm_abort = comm_abort,
    .comm_failure = comm_failure,
    // No memory of its own: gloo sends from and receives into any buffer.
    .alloc = nullptr,
    .free = nullptr,
    .post = post,
    .test = test,
    .wait = wait,
    .release = release,
    .last_error = last_error,
    .run = run,
    .comm_leave = comm_leave,
};

}  // namespace
}  // namespace lockstep::gloo_plugin

extern "C" __attribute__((visibility("default"))) const lockstep_engine* lockstep_engine_v1(void) {
  return &lockstep::gloo_plugin::kTable;
}
