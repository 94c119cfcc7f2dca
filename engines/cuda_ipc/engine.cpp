// The C table over Communicator. Nothing is thrown across it.
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>

#include "engines/cuda/identity.h"
#include "engines/cuda_ipc/communicator.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/engine.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/engine/plugin.h"

struct lockstep_comm {
  lockstep::cuda_ipc::Communicator impl;
  const lockstep_host* host;
};

struct lockstep_handle {
  lockstep_comm* comm;
  std::shared_ptr<lockstep::cuda_ipc::Operation> operation;
};

namespace lockstep::cuda_ipc {
namespace {

using comm::put;

bool can_reduce(lockstep_dtype dtype, lockstep_reduce_op op) {
  const bool floating = dtype >= LOCKSTEP_F16 && dtype <= LOCKSTEP_F64;
  if (op == LOCKSTEP_AVG) return floating;
  return !floating || op < LOCKSTEP_BAND;
}

const lockstep_capabilities& all_capabilities() {
  static const lockstep_capabilities all = [] {
    lockstep_capabilities made = comm::all_kinds(can_reduce);
    made.calls_back = 1;
    made.device_kinds = 1u << LOCKSTEP_CUDA;
    return made;
  }();
  return all;
}

lockstep_status capabilities(lockstep_capabilities* out) {
  return comm::give_capabilities(all_capabilities(), out);
}

lockstep_status status_of_exception(char* error, std::size_t capacity) noexcept {
  const Failure failure = current_failure();
  put(error, capacity, failure.message);
  return comm::status_of(failure.kind);
}

// For entries without a buffer for the message.
template <class Call>
lockstep_status logged(const lockstep_comm& comm, const Call& call) noexcept {
  return comm::guarded(call, [&] {
    char error[512];
    const lockstep_status status = status_of_exception(error, sizeof error);
    if (comm.host->log != nullptr) comm.host->log(comm.host->context, 0, error);
    return status;
  });
}

const char* wrong_with(const lockstep_op& op, const lockstep_comm& comm) {
  // A barrier has no buffers: also where there is no stream.
  if (op.struct_size >= sizeof op && op.kind == LOCKSTEP_BARRIER && op.device_kind == LOCKSTEP_HOST_MEMORY)
    return nullptr;
  return comm::wrong_with(op, comm.impl.rank(), comm.impl.size(), all_capabilities());
}

// Fields that do not matter for the kind are made equal on all ranks, which compare the whole call.
lockstep_op normal(lockstep_op op, int size) {
  if (comm::is_point_to_point(op.kind)) return op;
  if (!comm::has_root(op.kind)) op.root = 0;
  if (!comm::has_reduce(op.kind)) op.reduce = LOCKSTEP_SUM;
  if (op.kind == LOCKSTEP_BARRIER) op.dtype = LOCKSTEP_U8;
  if (op.kind == LOCKSTEP_BARRIER || op.kind == LOCKSTEP_ALL_TO_ALL_V) op.count = 0;
  if (op.kind == LOCKSTEP_ALL_GATHER_V)
    op.count = std::accumulate(op.recv_counts, op.recv_counts + size, std::uint64_t{0});
  return op;
}

void check_config(const lockstep_comm_config& config) {
  if (config.size < 1 || config.size > kMaxRanks || config.rank < 0 || config.rank >= config.size)
    base::raise(ErrorKind::kUsage, base::cat("rank ", config.rank, " of ", config.size,
                                             " is not possible; cuda_ipc takes 1 to ", kMaxRanks, " ranks"));
  const bool has_options =
      config.struct_size > offsetof(lockstep_comm_config, options) && config.options != nullptr;
  const std::string_view options = has_options ? config.options : "";
  if (const auto begin = options.find_first_not_of(' '); begin != std::string_view::npos)
    base::raise(
        ErrorKind::kUsage,
        base::cat("cuda_ipc has no option \"",
                  std::string(options.substr(begin, options.find_first_of(" =", begin) - begin)), "\""));
  std::string why;
  if (cuda::Driver::find(&why) == nullptr) base::raise(ErrorKind::kUnsupported, why, ErrorFamily::kBackend);
}

Communicator* parent_of(const lockstep_comm_config& config) {
  if (config.struct_size < offsetof(lockstep_comm_config, engine) || config.parent == nullptr) return nullptr;
  Communicator& parent = config.parent->impl;
  for (int r = 0; r < config.size; ++r) {
    if (config.parent_ranks[r] < 0 || config.parent_ranks[r] >= parent.size())
      base::raise(ErrorKind::kUsage,
                  base::cat("rank ", config.parent_ranks[r], " is not a rank of the parent"));
  }
  return &parent;
}

lockstep_status comm_create(const lockstep_comm_config* config, lockstep_comm** out, char* error,
                            std::size_t capacity) {
  *out = nullptr;
  return comm::guarded(
      [&] {
        check_config(*config);
        *out = new lockstep_comm{Communicator(*config, parent_of(*config)), config->host};
        return LOCKSTEP_OK;
      },
      [&] { return status_of_exception(error, capacity); });
}

void comm_leave(lockstep_comm* comm, const char* cause) {
  logged(*comm, [&] {
    comm->impl.leave(cause);
    return LOCKSTEP_OK;
  });
}

void comm_destroy(lockstep_comm* comm, const char* cause) {
  comm_leave(comm, cause);
  delete comm;
}

void comm_abort(lockstep_comm* comm, const char* reason) {
  logged(*comm, [&] {
    comm->impl.abort(reason != nullptr ? reason : "no reason given");
    return LOCKSTEP_OK;
  });
}

lockstep_status comm_failure(lockstep_comm* comm, char* error, std::size_t capacity, std::int32_t* peer_rank,
                             std::int64_t* peer_pid, char* peer_cause, std::size_t cause_capacity) {
  return logged(*comm, [&] {
    const std::optional<Failure> failure = comm->impl.failure();
    const LostPeer peer = failure ? failure->peer.value_or(LostPeer{}) : LostPeer{};
    if (peer_rank != nullptr) *peer_rank = peer.rank.value_or(-1);
    if (peer_pid != nullptr) *peer_pid = peer.pid.value_or(-1);
    put(peer_cause, cause_capacity, peer.cause);
    put(error, capacity, failure ? failure->message : std::string());
    return failure ? comm::status_of(failure->kind) : LOCKSTEP_OK;
  });
}

// A DeviceState is the process's, and so is the memory: any communicator of this rank may use it, and it outlives them.
lockstep_status alloc_on(lockstep_comm* comm, lockstep_device_kind kind, std::int32_t device,
                         std::size_t n_bytes, void** out) {
  *out = nullptr;
  return logged(*comm, [&] {
    if (kind != LOCKSTEP_CUDA) base::raise(ErrorKind::kUsage, "cuda_ipc allocates CUDA memory only");
    DeviceState& state = DeviceState::of(device);
    const cuda::ContextScope scope(state.context());
    *out = state.allocate(n_bytes);
    return LOCKSTEP_OK;
  });
}

void free_memory(lockstep_comm* comm, void* memory) {
  logged(*comm, [&] {
    DeviceState::free_anywhere(memory);
    return LOCKSTEP_OK;
  });
}

lockstep_status post(lockstep_comm* comm, const lockstep_op* op, lockstep_handle** out) {
  *out = nullptr;
  return logged(*comm, [&] {
    if (const char* const wrong = wrong_with(*op, *comm)) base::raise(ErrorKind::kUsage, wrong);
    auto handle = std::make_unique<lockstep_handle>();
    handle->comm = comm;
    handle->operation = comm->impl.post(normal(*op, comm->impl.size()));
    *out = handle.release();
    return LOCKSTEP_OK;
  });
}

lockstep_status test(lockstep_handle* handle) {
  const Operation& operation = *handle->operation;
  const bool over = operation.phase.load(std::memory_order_acquire) == Operation::kOver;
  return over ? operation.status : LOCKSTEP_PENDING;
}

lockstep_status wait(lockstep_handle* handle, std::int64_t deadline_ns) {
  const bool over = handle->comm->impl.wait(*handle->operation, Deadline::from_monotonic_ns(deadline_ns));
  return over ? test(handle) : LOCKSTEP_TIMEOUT;
}

void release(lockstep_handle* handle) {
  delete handle;
}

void last_error(lockstep_handle* handle, char* error, std::size_t capacity) {
  const auto status = test(handle);
  const bool failed = status != LOCKSTEP_PENDING && status != LOCKSTEP_OK;
  put(error, capacity, failed ? std::string_view(handle->operation->error) : std::string_view());
}

lockstep_status stream_wait(lockstep_handle* handle, void* stream) {
  return logged(*handle->comm, [&] {
    Operation& operation = *handle->operation;
    if (!operation.on_device())
      base::raise(ErrorKind::kUsage, "stream_wait is for operations on device memory");
    return handle->comm->impl.stream_wait(operation, stream) ? operation.status : LOCKSTEP_OK;
  });
}

lockstep_status run(lockstep_comm* comm, const lockstep_op* op, char* error, std::size_t capacity) {
  return comm::guarded(
      [&] {
        if (const char* const wrong = wrong_with(*op, *comm)) base::raise(ErrorKind::kUsage, wrong);
        // Like a posted one that was released: the progress thread calls nobody back.
        lockstep_op own = normal(*op, comm->impl.size());
        own.done = nullptr;
        const std::shared_ptr<Operation> operation = comm->impl.post(own);
        if (operation->on_device()) {
          if (!comm->impl.stream_wait(*operation, op->stream)) return LOCKSTEP_OK;
        } else {
          comm->impl.wait(*operation, Deadline::never());  // ended by the operation's own deadline
        }
        put(error, capacity, operation->error);
        return operation->status;
      },
      [&] { return status_of_exception(error, capacity); });
}

constexpr lockstep_engine kTable = {
    .struct_size = sizeof(lockstep_engine),
    .abi_version = LOCKSTEP_ENGINE_ABI_VERSION,
    .name = "cuda_ipc",
    .capabilities = capabilities,
    .comm_create = comm_create,
    .comm_destroy = comm_destroy,
    .comm_abort = comm_abort,
    .comm_failure = comm_failure,
    .alloc = nullptr,
    .free = free_memory,
    .post = post,
    .test = test,
    .wait = wait,
    .release = release,
    .last_error = last_error,
    .run = run,
    .comm_leave = comm_leave,
    .stream_wait = stream_wait,
    .alloc_on = alloc_on,
    .device_identity = cuda::device_identity,
};

}  // namespace
}  // namespace lockstep::cuda_ipc

extern "C" __attribute__((visibility("default"))) const lockstep_engine* lockstep_engine_v1(void) {
  return &lockstep::cuda_ipc::kTable;
}
