// The engine ABI as C++ sees it: an Engine is a checked table, a Communicator one rank's end of a group, an
// OpHandle a posted operation. Statuses become Failures here and nowhere else. Torch-free.
//
// Ownership: an Engine lives as long as the process (plug-ins are never unloaded). A Communicator must
// outlive its OpHandles and every block from alloc(); what the config points to must outlive the
// Communicator.
// Thread safety: Engine is immutable. Every method of Communicator may be called from any thread; an OpHandle
// is used by one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/mutex.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine_abi.h"
#include "lockstep/engine/plugin.h"

namespace lockstep::comm {

// Room for an engine's message; the engine truncates longer ones.
inline constexpr std::size_t kErrorCapacity = 1024;

ErrorKind kind_of(lockstep_status status) noexcept;
lockstep_status status_of(ErrorKind kind) noexcept;

class Engine {
 public:
  // Checks the table: version, size, entries that must not be null. `origin` names it in messages: a path or
  // "built in". Raises kUnsupported, which says what is wrong.
  Engine(const lockstep_engine* table, std::string origin);

  const std::string& name() const { return name_; }
  const std::string& origin() const { return origin_; }
  // A copy of full size: entries beyond the plug-in's struct_size are null.
  const lockstep_engine& table() const { return table_; }
  // The table itself, as the plug-in gave it.
  const lockstep_engine* given() const { return given_; }
  const lockstep_capabilities& capabilities() const { return capabilities_; }
  bool offers(lockstep_op_kind kind) const { return capabilities_.op_kinds >> kind & 1u; }
  bool moves(lockstep_dtype dtype) const { return capabilities_.dtypes >> dtype & 1u; }
  bool reduces(lockstep_dtype dtype, lockstep_reduce_op op) const {
    return capabilities_.reduce[dtype] >> op & 1u;
  }
  bool takes(lockstep_device_kind kind) const { return takes_memory(capabilities_, kind); }

 private:
  const lockstep_engine* given_;
  lockstep_engine table_{};
  lockstep_capabilities capabilities_{};
  std::string name_;
  std::string origin_;
};

// A posted operation. Releasing one that has not completed does not cancel it: its buffers must stay valid.
class OpHandle {
 public:
  OpHandle() = default;
  OpHandle(const lockstep_engine* table, lockstep_handle* handle) : table_(table), handle_(handle) {}
  OpHandle(OpHandle&& other) noexcept
      : table_(other.table_), handle_(std::exchange(other.handle_, nullptr)) {}
  OpHandle& operator=(OpHandle&& other) noexcept {
    if (this != &other) {
      release();
      table_ = other.table_;
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  ~OpHandle() { release(); }

  explicit operator bool() const { return handle_ != nullptr; }
  // LOCKSTEP_PENDING, LOCKSTEP_OK or the failure.
  lockstep_status test() { return table_->test(handle_); }
  // As test, after waiting until it completes or the deadline passes.
  lockstep_status wait(Deadline deadline);
  // Orders a stream after an operation on device memory; LOCKSTEP_OK or the failure. May block until the
  // engine has submitted the operation.
  lockstep_status stream_wait(void* stream) { return table_->stream_wait(handle_, stream); }
  // The engine's message after a failure.
  std::string last_error();
  void release() noexcept {
    if (handle_ != nullptr) table_->release(std::exchange(handle_, nullptr));
  }

 private:
  const lockstep_engine* table_ = nullptr;
  lockstep_handle* handle_ = nullptr;
};

class Communicator {
 public:
  // Collective: returns when all ranks have joined; raises the engine's error (family kBackend).
  // config.engine is filled in.
  static std::shared_ptr<Communicator> create(const Engine& engine, const lockstep_comm_config& config);
  // comm_destroy; leaves the group first when leave() was not called.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Engine& engine() const { return engine_; }
  // The engine's own handle, for lockstep_comm_config.parent.
  lockstep_comm* raw() const { return comm_; }

  // Posts the operation; on failure the handle is empty and the status says why (message: failure()).
  lockstep_status post(const lockstep_op& op, OpHandle& out) noexcept;
  // Post and wait; on device memory: post and order the operation's stream after it. On failure `error`
  // (kErrorCapacity bytes) holds the engine's message or is empty.
  lockstep_status run(const lockstep_op& op, char* error) noexcept;
  // A failed status as a value, with the lost peer when there is one. `message` may be empty.
  Failure failure(lockstep_status status, std::string_view message) const;
  // The first failure, when the communicator is broken.
  std::optional<Failure> broken() const;
  // Breaks the communicator on every rank; returns at once.
  void abort(const std::string& reason) noexcept;
  // Leaves the group; an empty cause is an orderly leave. Pending and later operations fail. Only the first
  // call counts. With an engine that has no comm_leave, the group is left when the last owner is destroyed.
  void leave(const std::string& cause);

  bool has_memory() const { return engine_.table().alloc != nullptr && engine_.table().free != nullptr; }
  // Memory the engine reduces in place. Raises kResource, or kUnsupported when the engine has none.
  void* alloc(std::size_t n_bytes);
  // The same on a device. Pre: has_memory_on(kind).
  bool has_memory_on(lockstep_device_kind kind) const {
    return engine_.takes(kind) && engine_.table().alloc_on != nullptr && engine_.table().free != nullptr;
  }
  void* alloc_on(lockstep_device_kind kind, int device, std::size_t n_bytes);
  void free(void* memory) noexcept;

 private:
  Communicator(const Engine& engine, lockstep_comm* comm) : engine_(engine), comm_(comm) {}

  const Engine& engine_;
  lockstep_comm* const comm_;
  base::Mutex mutex_;
  bool left_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::string cause_ LOCKSTEP_GUARDED_BY(mutex_);  // why this rank left, empty when orderly
};

}  // namespace lockstep::comm
