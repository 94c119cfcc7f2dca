#include "lockstep/engine/engine.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/detail/table_calls.h"

namespace lockstep::comm {
namespace {

// An engine table that ends here still has everything that is not optional.
constexpr std::size_t kSmallestTable = offsetof(lockstep_engine, run);

[[noreturn]] void refuse(const std::string& origin, const std::string& why) {
  base::raise(ErrorKind::kUnsupported, base::cat("engine ", origin, ": ", why), ErrorFamily::kBackend);
}

void check_entries(const lockstep_engine& table, const std::string& origin) {
  const std::pair<const char*, bool> required[] = {
      {"name", table.name != nullptr},
      {"capabilities", table.capabilities != nullptr},
      {"comm_create", table.comm_create != nullptr},
      {"comm_destroy", table.comm_destroy != nullptr},
      {"comm_abort", table.comm_abort != nullptr},
      {"comm_failure", table.comm_failure != nullptr},
      {"post", table.post != nullptr},
      {"test", table.test != nullptr},
      {"wait", table.wait != nullptr},
      {"release", table.release != nullptr},
      {"last_error", table.last_error != nullptr},
  };
  for (const auto& [name, present] : required) {
    if (!present) refuse(origin, base::cat("its table has no ", name));
  }
}

}  // namespace

ErrorKind kind_of(lockstep_status status) noexcept {
  switch (status) {
    case LOCKSTEP_USAGE:
      return ErrorKind::kUsage;
    case LOCKSTEP_TIMEOUT:
      return ErrorKind::kTimeout;
    case LOCKSTEP_PEER_LOST:
      return ErrorKind::kPeerLost;
    case LOCKSTEP_ABORTED:
      return ErrorKind::kAborted;
    case LOCKSTEP_UNSUPPORTED:
      return ErrorKind::kUnsupported;
    case LOCKSTEP_RESOURCE:
      return ErrorKind::kResource;
    case LOCKSTEP_SYSTEM:
      return ErrorKind::kSystem;
    case LOCKSTEP_OK:
    case LOCKSTEP_PENDING:
    case LOCKSTEP_INTERNAL:
      break;
  }
  return ErrorKind::kInternal;
}

lockstep_status status_of(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kUsage:
      return LOCKSTEP_USAGE;
    case ErrorKind::kTimeout:
      return LOCKSTEP_TIMEOUT;
    case ErrorKind::kPeerLost:
      return LOCKSTEP_PEER_LOST;
    case ErrorKind::kAborted:
      return LOCKSTEP_ABORTED;
    case ErrorKind::kUnsupported:
      return LOCKSTEP_UNSUPPORTED;
    case ErrorKind::kResource:
      return LOCKSTEP_RESOURCE;
    case ErrorKind::kSystem:
      return LOCKSTEP_SYSTEM;
    case ErrorKind::kInternal:
      break;
  }
  return LOCKSTEP_INTERNAL;
}

// What comes from a plug-in is not trusted to be of this version: struct_size is looked at before any other
// field, and abi_version before the entries, whose meaning depends on it.
Engine::Engine(const lockstep_engine* table, std::string origin) : given_(table), origin_(std::move(origin)) {
  if (table == nullptr) refuse(origin_, base::cat(LOCKSTEP_ENGINE_SYMBOL, "() returned null"));
  if (table->struct_size < offsetof(lockstep_engine, name)) {
    refuse(origin_,
           base::cat("its table says it has ", table->struct_size, " bytes, too few to hold a version"));
  }
  if (table->abi_version != LOCKSTEP_ENGINE_ABI_VERSION) {
    refuse(origin_, base::cat("built for version ", table->abi_version,
                              " of the engine ABI, this lockstep has version ", LOCKSTEP_ENGINE_ABI_VERSION,
                              "; build it again against this lockstep's engine_abi.h"));
  }
  if (table->struct_size < kSmallestTable) {
    refuse(origin_, base::cat("its table has ", table->struct_size, " bytes, at least ", kSmallestTable,
                              " are needed; set struct_size to sizeof(lockstep_engine)"));
  }
  // The engine may be older, and its table shorter: entries that it does not have stay null. Or newer, and
  // longer: what this lockstep does not know is left out.
  std::memcpy(&table_, table, std::min(table->struct_size, sizeof table_));
  table_.struct_size = sizeof table_;
  check_entries(table_, origin_);
  name_ = table_.name;
  capabilities_.struct_size = sizeof capabilities_;
  if (const auto status = table_.capabilities(&capabilities_); status != LOCKSTEP_OK) {
    base::raise(kind_of(status),
                base::cat("engine ", origin_, ": it does not report its capabilities (status ",
                          static_cast<int>(status), ")"),
                ErrorFamily::kBackend);
  }
  if (takes(LOCKSTEP_CUDA) && table_.stream_wait == nullptr)
    refuse(origin_, "it takes device memory, but its table has no stream_wait");
}

lockstep_status OpHandle::wait(Deadline deadline) {
  const auto status = table_->wait(handle_, deadline.monotonic_ns());
  // The wait's deadline and the operation's own look alike; only test tells them apart.
  return status == LOCKSTEP_TIMEOUT ? table_->test(handle_) : status;
}

std::string OpHandle::last_error() {
  char message[kErrorCapacity] = "";
  // Ended here too, and below: a plug-in may fill the buffer to its end.
  if (handle_ != nullptr) table_->last_error(handle_, message, sizeof message);
  message[sizeof message - 1] = '\0';
  return message;
}

std::shared_ptr<Communicator> Communicator::create(const Engine& engine, const lockstep_comm_config& config) {
  lockstep_comm* comm = nullptr;
  char message[kErrorCapacity] = "";
  lockstep_comm_config full = config;
  full.engine = engine.given();  // the plug-in's own table, not the copy
  const auto status = engine.table().comm_create(&full, &comm, message, sizeof message);
  message[sizeof message - 1] = '\0';
  if (status != LOCKSTEP_OK || comm == nullptr) {
    const bool silent = message[0] == '\0';
    base::raise(status == LOCKSTEP_OK ? ErrorKind::kInternal : kind_of(status),
                base::cat("engine ", engine.name(), " could not join group \"", config.name, "\" as rank ",
                          config.rank, " of ", config.size, ": ", silent ? "it gave no reason" : message),
                ErrorFamily::kBackend);
  }
  return std::shared_ptr<Communicator>(new Communicator(engine, comm));
}

// The cause is passed once: an engine that has comm_leave got it there.
Communicator::~Communicator() {
  const bool told = engine_.table().comm_leave != nullptr && left_;
  engine_.table().comm_destroy(comm_, told || cause_.empty() ? nullptr : cause_.c_str());
}

// A refused operation may have a handle, which has the reason.
lockstep_status Communicator::post(const lockstep_op& op, OpHandle& out) noexcept {
  lockstep_handle* handle = nullptr;
  const auto status = engine_.table().post(comm_, &op, &handle);
  if (handle != nullptr) out = OpHandle(&engine_.table(), handle);
  return status == LOCKSTEP_OK && handle == nullptr ? LOCKSTEP_INTERNAL : status;
}

lockstep_status Communicator::run(const lockstep_op& op, char* error) noexcept {
  error[0] = '\0';
  const auto& table = engine_.table();
  if (table.run != nullptr) return table.run(comm_, &op, error, kErrorCapacity);
  lockstep_handle* handle = nullptr;
  auto status = table.post(comm_, &op, &handle);
  if (handle == nullptr) return status == LOCKSTEP_OK ? LOCKSTEP_INTERNAL : status;
  // The operation's own deadline bounds this wait.
  if (status == LOCKSTEP_OK) {
    status = op.device_kind == LOCKSTEP_HOST_MEMORY ? table.wait(handle, LOCKSTEP_NEVER)
                                                    : table.stream_wait(handle, op.stream);
  }
  if (status != LOCKSTEP_OK) table.last_error(handle, error, kErrorCapacity);
  table.release(handle);
  return status;
}

// Two sources: the operation's own message, which says what failed, and the communicator's first failure,
// which knows the lost peer.
Failure Communicator::failure(lockstep_status status, std::string_view message) const {
  Failure failure{.kind = kind_of(status), .message = std::string(message), .family = ErrorFamily::kBackend};
  char comm_message[kErrorCapacity] = "", cause[kErrorCapacity] = "";
  std::int32_t rank = -1;
  std::int64_t pid = -1;
  const auto first = engine_.table().comm_failure(comm_, comm_message, sizeof comm_message, &rank, &pid,
                                                  cause, sizeof cause);
  if (first != LOCKSTEP_OK) {
    comm_message[sizeof comm_message - 1] = cause[sizeof cause - 1] = '\0';
    if (failure.message.empty()) failure.message = comm_message;
    if (failure.kind == ErrorKind::kPeerLost && rank >= 0) failure.peer = lost_peer(rank, pid, cause);
  }
  if (failure.message.empty()) failure.message = base::cat("engine ", engine_.name(), " gave no reason");
  return failure;
}

std::optional<Failure> Communicator::broken() const {
  std::int32_t rank = -1;
  std::int64_t pid = -1;
  char message[kErrorCapacity] = "", cause[kErrorCapacity] = "";
  const auto status =
      engine_.table().comm_failure(comm_, message, sizeof message, &rank, &pid, cause, sizeof cause);
  if (status == LOCKSTEP_OK) return std::nullopt;
  return failure(status, "");
}

void Communicator::abort(const std::string& reason) noexcept {
  engine_.table().comm_abort(comm_, reason.c_str());
}

// The engine is called without the lock: leaving may run callbacks of operations that it ends.
void Communicator::leave(const std::string& cause) {
  {
    const base::MutexLock lock(mutex_);
    if (left_) return;
    left_ = true;
    cause_ = cause;
  }
  const auto& table = engine_.table();
  if (table.comm_leave != nullptr) return table.comm_leave(comm_, cause.empty() ? nullptr : cause.c_str());
  // Nobody may be left waiting for a rank that gave up, so an engine that cannot leave early is broken
  // instead.
  if (!cause.empty()) table.comm_abort(comm_, cause.c_str());
}

void* Communicator::alloc(std::size_t n_bytes) {
  if (!has_memory()) {
    base::raise(ErrorKind::kUnsupported,
                base::cat("engine ", engine_.name(), " does not allocate memory of its own"),
                ErrorFamily::kBackend);
  }
  void* memory = nullptr;
  const auto status = engine_.table().alloc(comm_, n_bytes, &memory);
  if (status != LOCKSTEP_OK || memory == nullptr) {
    base::raise(status == LOCKSTEP_OK ? ErrorKind::kInternal : kind_of(status),
                base::cat("engine ", engine_.name(), " could not give ", n_bytes, " bytes of shared memory"),
                ErrorFamily::kBackend);
  }
  return memory;
}

void* Communicator::alloc_on(lockstep_device_kind kind, int device, std::size_t n_bytes) {
  void* memory = nullptr;
  const auto status = engine_.table().alloc_on(comm_, kind, device, n_bytes, &memory);
  if (status != LOCKSTEP_OK || memory == nullptr) {
    base::raise(
        status == LOCKSTEP_OK ? ErrorKind::kInternal : kind_of(status),
        base::cat("engine ", engine_.name(), " could not give ", n_bytes, " bytes on device ", device),
        ErrorFamily::kBackend);
  }
  return memory;
}

void Communicator::free(void* memory) noexcept {
  engine_.table().free(comm_, memory);
}

}  // namespace lockstep::comm
