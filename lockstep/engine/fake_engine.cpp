#include "lockstep/engine/fake_engine.h"

#include <algorithm>
#include <optional>
#include <string>

#include "lockstep/base/detail/mutex.h"
#include "lockstep/engine/plugin.h"

namespace lockstep::comm {
namespace {

// Broken by abort or left: the only two things that can happen to it.
struct Comm {
  base::Mutex mutex;
  std::optional<std::string> ended LOCKSTEP_GUARDED_BY(mutex);  // the message
};

Comm& of(lockstep_comm* comm) {
  return *reinterpret_cast<Comm*>(comm);
}

// Every operation is over when it is posted, so all handles are alike.
char g_handle;

void end(Comm& comm, std::string message) {
  const base::MutexLock lock(comm.mutex);
  if (!comm.ended) comm.ended = std::move(message);
}

lockstep_status capabilities(lockstep_capabilities* out) {
  out->op_kinds = (1u << LOCKSTEP_OP_KINDS) - 1;
  out->dtypes = (1u << LOCKSTEP_DTYPES) - 1;
  std::ranges::fill(out->reduce, (1u << LOCKSTEP_REDUCE_OPS) - 1);
  out->crosses_hosts = 1;
  out->calls_back = 1;
  return LOCKSTEP_OK;
}

lockstep_status create(const lockstep_comm_config*, lockstep_comm** out, char*, std::size_t) {
  *out = reinterpret_cast<lockstep_comm*>(new Comm);
  return LOCKSTEP_OK;
}

void destroy(lockstep_comm* comm, const char*) {
  delete &of(comm);
}

void abort(lockstep_comm* comm, const char* reason) {
  end(of(comm), std::string("the group was aborted: ") + reason);
}

void leave(lockstep_comm* comm, const char*) {
  end(of(comm), "this rank left the group");
}

lockstep_status failure(lockstep_comm* comm, char* error, std::size_t capacity, std::int32_t* rank,
                        std::int64_t* pid, char* cause, std::size_t cause_capacity) {
  *rank = -1;
  *pid = -1;
  put(cause, cause_capacity, "");
  const base::MutexLock lock(of(comm).mutex);
  if (!of(comm).ended) return LOCKSTEP_OK;
  put(error, capacity, *of(comm).ended);
  return LOCKSTEP_ABORTED;
}

lockstep_status take(lockstep_comm* comm, const lockstep_op* op) {
  {
    const base::MutexLock lock(of(comm).mutex);
    if (of(comm).ended) return LOCKSTEP_ABORTED;
  }
  if (op->kind == LOCKSTEP_RECV && op->source != nullptr) *op->source = std::max(op->root, 0);
  return LOCKSTEP_OK;
}

lockstep_status post(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  const auto status = take(comm, op);
  if (status != LOCKSTEP_OK) return status;
  *out = reinterpret_cast<lockstep_handle*>(&g_handle);
  if (op->done != nullptr) op->done(op->done_context);
  return LOCKSTEP_OK;
}

lockstep_status run(lockstep_comm* comm, const lockstep_op* op, char* error, std::size_t capacity) {
  put(error, capacity, "");
  return take(comm, op);
}

constexpr lockstep_engine kTable{
    .struct_size = sizeof(lockstep_engine),
    .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
    .name = "fake",
    .capabilities = capabilities,
    .comm_create = create,
    .comm_destroy = destroy,
    .comm_abort = abort,
    .comm_failure = failure,
    .alloc = nullptr,
    .free = nullptr,
    .post = post,
    .test = [](lockstep_handle*) { return LOCKSTEP_OK; },
    .wait = [](lockstep_handle*, std::int64_t) { return LOCKSTEP_OK; },
    .release = [](lockstep_handle*) {},
    .last_error = [](lockstep_handle*, char* error, std::size_t capacity) { put(error, capacity, ""); },
    .run = run,
    .comm_leave = leave,
};

}  // namespace

const lockstep_engine* fake_engine() noexcept {
  return &kTable;
}

}  // namespace lockstep::comm
