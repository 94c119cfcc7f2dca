// The C table over Communicator. Nothing is thrown across it.
#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "engines/gloo/communicator.h"
#include "engines/gloo/reduce.h"

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

// Elements of one buffer, so that byte counts cannot overflow.
constexpr std::uint64_t kMaxCount = 1ull << 48;

void put(char* to, std::size_t capacity, std::string_view text) {
  if (to == nullptr || capacity == 0) return;
  const std::size_t n = std::min(text.size(), capacity - 1);
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

// The failure in flight, as a value.
Failure current() {
  try {
    throw;
  } catch (const Error& error) {
    return error.failure();
  } catch (const std::bad_alloc&) {
    return {.status = LOCKSTEP_RESOURCE, .words = "out of memory"};
  } catch (const std::exception& error) {
    return {.status = LOCKSTEP_INTERNAL, .words = error.what()};
  } catch (...) {
    return {.status = LOCKSTEP_INTERNAL, .words = "an unknown exception"};
  }
}

lockstep_status fail(const Failure& failure, char* error, std::size_t capacity) {
  put(error, capacity, failure.words);
  return failure.status;
}

// Whether this rank reads or writes the buffer.
bool uses_send(const lockstep_op& op, int rank) {
  if (op.kind == LOCKSTEP_RECV) return false;
  if (op.kind == LOCKSTEP_BROADCAST || op.kind == LOCKSTEP_SCATTER) return op.root == rank;
  return true;
}
bool uses_recv(const lockstep_op& op, int rank) {
  if (op.kind == LOCKSTEP_SEND) return false;
  if (op.kind == LOCKSTEP_REDUCE || op.kind == LOCKSTEP_GATHER) return op.root == rank;
  return true;
}

const char* wrong_with_counts(const lockstep_op& op, int rank, int size) {
  const bool sends = op.kind == LOCKSTEP_ALL_TO_ALL_V;
  if (op.recv_counts == nullptr || (sends && op.send_counts == nullptr)) return "counts are missing";
  std::uint64_t out = 0, in = 0;
  for (int r = 0; r < size; ++r) {
    if (op.recv_counts[r] >= kMaxCount || (sends && op.send_counts[r] >= kMaxCount))
      return "too many elements";
    in += op.recv_counts[r];
    out += sends ? op.send_counts[r] : 0;
  }
  if (!sends) out = op.recv_counts[rank];
  if (in >= kMaxCount || out >= kMaxCount) return "too many elements";
  if (sends && op.send_counts[rank] != op.recv_counts[rank])
    return "a rank sends itself as much as it receives from itself";
  if ((out > 0 && op.send == nullptr) || (in > 0 && op.recv == nullptr)) return "a buffer is null";
  return nullptr;
}

const char* wrong_with_message(const lockstep_op& op, int size) {
  if (op.tag < 0) return "the tag is negative";
  const bool any = op.kind == LOCKSTEP_RECV && op.root == -1;
  if (!any && (op.root < 0 || op.root >= size)) return "the peer is not a rank of the group";
  if (any && size == 1) return "there is no other rank to receive from";
  return nullptr;
}

// What is wrong with the call, or null.
const char* wrong_with(const lockstep_op& op, int rank, int size) {
  if (op.struct_size < sizeof(lockstep_op)) return "the operation's struct_size is too small";
  if (op.kind < 0 || op.kind >= LOCKSTEP_OP_KINDS) return "unknown operation";
  if (op.kind == LOCKSTEP_BARRIER) return nullptr;
  if (op.dtype < 0 || op.dtype >= LOCKSTEP_DTYPES) return "unknown element type";
  if (reduces(op.kind) && !can_reduce(op.dtype, op.reduce))
    return "this element type cannot be reduced with this operation";
  if (has_root(op.kind) && (op.root < 0 || op.root >= size)) return "the root is not a rank of the group";
  if (op.kind == LOCKSTEP_ALL_TO_ALL_V || op.kind == LOCKSTEP_ALL_GATHER_V)
    return wrong_with_counts(op, rank, size);
  if (is_point_to_point(op.kind)) {
    if (const char* wrong = wrong_with_message(op, size)) return wrong;
  }
  if (op.count >= kMaxCount / static_cast<std::uint64_t>(size)) return "too many elements";
  if (op.count > 0 && uses_send(op, rank) && op.send == nullptr) return "a buffer is null";
  if (op.count > 0 && uses_recv(op, rank) && op.recv == nullptr) return "a buffer is null";
  return nullptr;
}

void log(const lockstep_comm* comm, const std::string& words) {
  if (comm->host->log != nullptr) comm->host->log(comm->host->context, 0, words.c_str());
}

lockstep_status capabilities(lockstep_capabilities* out) {
  lockstep_capabilities all{};
  all.struct_size = sizeof all;
  all.op_kinds = (1u << LOCKSTEP_OP_KINDS) - 1;
  all.dtypes = (1u << LOCKSTEP_DTYPES) - 1;
  for (int d = 0; d < LOCKSTEP_DTYPES; ++d) {
    for (int r = 0; r < LOCKSTEP_REDUCE_OPS; ++r) {
      if (can_reduce(static_cast<lockstep_dtype>(d), static_cast<lockstep_reduce_op>(r)))
        all.reduce[d] |= 1u << r;
    }
  }
  all.crosses_hosts = 1;
  all.calls_back = 1;
  const std::size_t n = std::min(out->struct_size, sizeof all);
  std::memcpy(out, &all, n);
  out->struct_size = n;
  return LOCKSTEP_OK;
}

lockstep_status comm_create(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                            std::size_t capacity) {
  *out = nullptr;
  try {
    if (config->size < 1 || config->rank < 0 || config->rank >= config->size) {
      raise(LOCKSTEP_USAGE, cat("rank ", config->rank, " of ", config->size, " is not possible"));
    }
    *out = new lockstep_comm{Communicator(*config), config->host, config->rank};
    return LOCKSTEP_OK;
  } catch (...) {
    return fail(current(), error, capacity);
  }
}

void comm_leave(lockstep_comm* comm, const char* cause) {
  try {
    comm->impl.leave(cause);
  } catch (...) {
    log(comm, current().words);
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
    log(comm, current().words);
  }
}

lockstep_status comm_failure(lockstep_comm* comm, char* error, std::size_t capacity, std::int32_t* peer_rank,
                             std::int64_t* peer_pid, char* peer_cause, std::size_t peer_cause_capacity) {
  try {
    const auto failure = comm->impl.failure();
    if (peer_rank != nullptr) *peer_rank = failure ? failure->peer : -1;
    if (peer_pid != nullptr) *peer_pid = failure ? failure->pid : -1;
    put(peer_cause, peer_cause_capacity, failure ? failure->cause : "");
    return failure ? fail(*failure, error, capacity) : LOCKSTEP_OK;
  } catch (...) {
    return fail(current(), error, capacity);
  }
}

lockstep_status post(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  *out = nullptr;
  try {
    if (const char* wrong = wrong_with(*op, comm->rank, comm->impl.size())) raise(LOCKSTEP_USAGE, wrong);
    auto handle = std::make_unique<lockstep_handle>(comm->impl, comm->impl.post(*op));
    *out = handle.release();
    return LOCKSTEP_OK;
  } catch (...) {
    const Failure failure = current();
    if (failure.status == LOCKSTEP_USAGE) log(comm, failure.words);
    return failure.status;
  }
}

lockstep_status test(lockstep_handle* handle) {
  const std::lock_guard lock(handle->operation->mutex);
  return handle->operation->status;
}

lockstep_status wait(lockstep_handle* handle, std::int64_t deadline_ns) {
  return handle->owner.wait(*handle->operation, deadline_ns) ? test(handle) : LOCKSTEP_TIMEOUT;
}

void release(lockstep_handle* handle) {
  delete handle;
}

void last_error(lockstep_handle* handle, char* error, std::size_t capacity) {
  const std::lock_guard lock(handle->operation->mutex);
  put(error, capacity, handle->operation->error);
}

lockstep_status run(lockstep_comm* comm, const lockstep_op* op, char* error, std::size_t capacity) {
  try {
    if (const char* wrong = wrong_with(*op, comm->rank, comm->impl.size())) raise(LOCKSTEP_USAGE, wrong);
    comm->impl.run(*op);
    return LOCKSTEP_OK;
  } catch (...) {
    return fail(current(), error, capacity);
  }
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
