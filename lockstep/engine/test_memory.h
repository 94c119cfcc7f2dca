// Where a test of engines has its buffers when they are not in host memory. A rank of the contract suite is given
// one (EngineKind::memory): its buffers are then filled and read by copies, and its operations name the device and
// the stream. tests/cuda/test_memory.h is the one for CUDA. For tests only; not installed.
//
// Everything raises when the device fails. Thread safety: from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/engine/engine_abi.h"

namespace lockstep::comm::testing {

class TestMemory {
 public:
  virtual ~TestMemory() = default;

  // Constant for the life of the object. The stream is that of the rank's operations.
  virtual lockstep_device_kind device_kind() const = 0;
  virtual int device() const = 0;
  virtual void* stream() = 0;

  // Memory, from a pool that the process keeps: freeing device memory may wait for streams of other ranks.
  virtual void* allocate(std::size_t n_bytes) = 0;
  virtual void free(void* memory, std::size_t n_bytes) noexcept = 0;
  // Done when they return, in a stream that no operation uses.
  virtual void copy_in(void* to, const void* from, std::size_t n_bytes) = 0;
  virtual void copy_out(void* to, const void* from, std::size_t n_bytes) = 0;

  // Another stream, until the object is destroyed.
  virtual void* new_stream() = 0;
  // Enqueue and return. A host function must not use the device; those of a device run one at a time.
  virtual void enqueue_copy(void* to, const void* from, std::size_t n_bytes, void* stream) = 0;
  virtual void enqueue_call(void (*function)(void*), void* context, void* stream) = 0;
  // Until the stream is idle; raises kTimeout when that takes too long for anything that works.
  virtual void synchronize(void* stream) = 0;
  virtual bool idle(void* stream) = 0;

  // Says in an operation where its buffers are.
  void place(lockstep_op& op) {
    op.device_kind = device_kind();
    op.device = device();
    op.stream = stream();
  }
};

}  // namespace lockstep::comm::testing
