// The C table over HostCommunicator. Nothing is thrown across it.
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/engine/detail/table_calls.h"
#include "lockstep/engine/engine.h"
#include "lockstep/engine/plugin.h"
#include "lockstep/host/host.h"
#include "lockstep/host/internal/host_communicator.h"
#include "lockstep/host/kernels.h"

// rank and size are copies: checking a call reads no shared state.
struct lockstep_comm {
  lockstep::comm::internal::HostCommunicator impl;
  int rank, size;
};

// `posted` is shared with the communicator's queue: a handle may be released while its operation is in
// progress. `comm` must outlive it: handles are released before comm_destroy.
struct lockstep_handle {
  lockstep_comm* comm;
  std::shared_ptr<lockstep::comm::internal::Posted> posted;
};

namespace lockstep::comm {
namespace {

// Fields that do not matter for the kind are made equal on all ranks, which compare the whole call.
lockstep_op normal(lockstep_op op, int size) {
  if (op.kind == LOCKSTEP_SEND || op.kind == LOCKSTEP_RECV) return op;
  if (!has_root(op.kind)) op.root = 0;
  if (!has_reduce(op.kind)) op.reduce = LOCKSTEP_SUM;
  if (op.kind == LOCKSTEP_BARRIER) op.dtype = LOCKSTEP_U8;
  if (op.kind == LOCKSTEP_BARRIER || op.kind == LOCKSTEP_ALL_TO_ALL_V) op.count = 0;
  // The total takes the place of the count: ranks that disagree about one length differ in the fingerprint
  // too, except when the sums are equal; those are found when the counts per rank are compared.
  if (op.kind == LOCKSTEP_ALL_GATHER_V)
    op.count = std::accumulate(op.recv_counts, op.recv_counts + size, std::uint64_t{0});
  return op;
}

const lockstep_capabilities& all_capabilities() {
  // Computed once: every reduction with every dtype is tried.
  static const lockstep_capabilities all = [] {
    lockstep_capabilities made = all_kinds(can_reduce);
    made.shared_memory = 1;
    made.calls_back = 1;
    made.compares_members = 1;
    made.takes_rows = 1;
    return made;
  }();
  return all;
}

lockstep_status capabilities(lockstep_capabilities* out) {
  return give_capabilities(all_capabilities(), out);
}

// Whether the caller's struct has the field and sets it. Raises kUsage for ranks that cannot be.
bool has_parent(const lockstep_comm_config& config) {
  // A caller built against an older header has a shorter struct: `parent` and parent_ranks must be inside
  // it.
  if (config.struct_size < offsetof(lockstep_comm_config, engine) || config.parent == nullptr) return false;
  const int n_parent = config.parent->size;
  for (int r = 0; r < config.size; ++r) {
    const int rank = config.parent_ranks[r];
    if (rank < 0 || rank >= n_parent)
      base::raise(ErrorKind::kUsage,
                  base::cat("rank ", rank, " is not one of the parent's ", n_parent, " ranks"));
  }
  if (config.parent_ranks[config.rank] != config.parent->rank)
    base::raise(ErrorKind::kUsage, "parent_ranks does not name this rank where it should");
  return true;
}

lockstep_status comm_create(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                            std::size_t capacity) {
  *out = nullptr;
  return reported(error, capacity, [&] {
    if (config->size < 1 || config->size > internal::kMaxRanks || config->rank < 0 ||
        config->rank >= config->size) {
      base::raise(ErrorKind::kUsage,
                  base::cat("rank ", config->rank, " of ", config->size,
                            " is not possible; the host engine takes 1 to ", internal::kMaxRanks, " ranks"));
    }
    // With a parent the members share a progress service and arenas already, and nothing but the block is
    // created.
    auto* parent = has_parent(*config) ? &config->parent->impl : nullptr;
    *out = new lockstep_comm{internal::HostCommunicator(*config, parent), config->rank, config->size};
    return LOCKSTEP_OK;
  });
}

void comm_leave(lockstep_comm* comm, const char* cause) {
  logged([&] {
    comm->impl.leave(cause);
    return LOCKSTEP_OK;
  });
}

void comm_destroy(lockstep_comm* comm, const char* cause) {
  comm_leave(comm, cause);
  delete comm;
}

void comm_abort(lockstep_comm* comm, const char* reason) {
  logged([&] {
    comm->impl.abort(reason != nullptr ? reason : "no reason given");
    return LOCKSTEP_OK;
  });
}

lockstep_status comm_failure(lockstep_comm* comm, char* error, std::size_t capacity, std::int32_t* peer_rank,
                             std::int64_t* peer_pid, char* peer_cause, std::size_t peer_cause_capacity) {
  return reported(error, capacity, [&] {
    const auto failure = comm->impl.failure();
    put_peer(failure, peer_rank, peer_pid, peer_cause, peer_cause_capacity);
    return failure ? fail(*failure, error, capacity) : LOCKSTEP_OK;
  });
}

lockstep_status alloc(lockstep_comm* comm, std::size_t n_bytes, void** out) {
  *out = nullptr;
  return logged([&] {
    // The arena is the rank's, not the communicator's: the memory can be reduced in place in every
    // communicator that has the same root parent.
    *out = comm->impl.arena().allocate(n_bytes);
    return LOCKSTEP_OK;
  });
}

void free_memory(lockstep_comm* comm, void* memory) {
  logged([&] {
    comm->impl.arena().free(memory);
    return LOCKSTEP_OK;
  });
}

lockstep_status post(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  *out = nullptr;
  return logged([&] {
    if (const char* wrong = wrong_with(*op, comm->rank, comm->size, all_capabilities())) {
      base::log(LogLevel::kError, wrong);
      return LOCKSTEP_USAGE;
    }
    *out = new lockstep_handle{comm, comm->impl.post(normal(*op, comm->size))};
    return LOCKSTEP_OK;
  });
}

// acquire: `error` and the result are written before the status is stored.
lockstep_status test(lockstep_handle* handle) {
  return static_cast<lockstep_status>(handle->posted->status.load(std::memory_order_acquire));
}

lockstep_status wait(lockstep_handle* handle, std::int64_t deadline_ns) {
  const auto call = [&] {
    // False leaves the operation in progress; its own deadline ends it.
    const bool over = handle->comm->impl.wait(*handle->posted, Deadline::from_monotonic_ns(deadline_ns));
    return over ? test(handle) : LOCKSTEP_TIMEOUT;
  };
  return guarded(call, [] { return status_of(base::current_failure().kind); });
}

void release(lockstep_handle* handle) {
  delete handle;
}

void last_error(lockstep_handle* handle, char* error, std::size_t capacity) {
  const auto status = test(handle);
  const bool failed = status != LOCKSTEP_PENDING && status != LOCKSTEP_OK;
  // Not a string made of either: that may raise.
  put(error, capacity, failed ? std::string_view(handle->posted->error) : std::string_view());
}

lockstep_status run(lockstep_comm* comm, const lockstep_op* op, char* error, std::size_t capacity) {
  return reported(error, capacity, [&] {
    // A wrong call is rejected before anything is published: the other ranks do not see it, and the group
    // stays intact.
    if (const char* wrong = wrong_with(*op, comm->rank, comm->size, all_capabilities())) {
      put(error, capacity, wrong);
      return LOCKSTEP_USAGE;
    }
    const auto failure = comm->impl.run(normal(*op, comm->size));
    return failure ? fail(*failure, error, capacity) : LOCKSTEP_OK;
  });
}

constexpr lockstep_engine kTable = {
    .struct_size = sizeof(lockstep_engine),
    .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
    .name = "host",
    .capabilities = capabilities,
    .comm_create = comm_create,
    .comm_destroy = comm_destroy,
    .comm_abort = comm_abort,
    .comm_failure = comm_failure,
    .alloc = alloc,
    .free = free_memory,
    .post = post,
    .test = test,
    .wait = wait,
    .release = release,
    .last_error = last_error,
    .run = run,
    .comm_leave = comm_leave,
};

}  // namespace

const lockstep_engine* host_engine() {
  return &kTable;
}

}  // namespace lockstep::comm
