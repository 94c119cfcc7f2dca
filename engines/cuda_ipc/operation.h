// An operation that was posted, from post to its end.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engines/cuda_ipc/device.h"
#include "engines/cuda_ipc/plan.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/engine/engine_abi.h"

namespace lockstep::cuda_ipc {

// Memory of the engine that takes the place of a buffer which cannot be exported.
struct Stage {
  DeviceState* device = nullptr;
  void* memory = nullptr;
};

// Shared by the communicator's queues and the caller's handle.
//
//   post: described, then published at once or, when the window is full, by the progress thread later
//   phase: kPosted --> kSubmitted (a stream may be made to wait for it) --> kOver (status and error are final)
struct Operation {
  enum Phase : std::uint32_t { kPosted = 0, kSubmitted, kOver };

  explicit Operation(const lockstep_op& from, int size);
  ~Operation();
  Operation(const Operation&) = delete;

  bool on_device() const { return op.device_kind == LOCKSTEP_CUDA; }
  std::uint64_t send_bytes() const;
  std::uint64_t recv_bytes() const;

  // Constant after post.
  lockstep_op op;  // where and counts point into this object
  std::string where;
  std::vector<std::uint64_t> send_counts, recv_counts;
  Deadline deadline;
  Extent extent{};
  DeviceState* device = nullptr;  // of operations on device memory
  MemoryRef send{}, recv{};
  Stage staged_send, staged_recv;
  cuda::OwnedEvent
      reached;  // the stream has reached the post; where no word says so: receives and what is deferred

  // Under the communicator's mutex until it is queued, then of the progress thread.
  std::uint64_t number = 0;  // of a collective, or of a message
  bool deferred = false;     // the progress thread publishes it; a receive is never published
  // post has returned, or is about to: `reached` is there.
  std::atomic<bool> announced{false};

  // Of the progress thread.
  bool published = false;               // of a deferred one
  std::size_t slot = 0;                 // of a message
  int source = -1;                      // RECV: whose message it takes; -1: none yet
  bool launched = false;                // RECV: the copy
  std::vector<std::uint64_t> searched;  // RECV: up to which message of each rank there was none for it
  cuda::OwnedEvent copied;              // the stage has been copied back

  // A stream waits for it: its caller may have no other way to learn of a failure than the communicator.
  std::atomic<bool> in_stream{false};

  // For threads that wait.
  std::atomic<std::uint32_t> phase{kPosted};  // a futex
  lockstep_status status = LOCKSTEP_PENDING;  // written before kOver
  std::string error;
};

// "all_reduce(sum, f32, 1024 elements)", "send(i32, 5 elements, to rank 1, tag 3)".
std::string describe(const lockstep_op& op);
std::string describe(const Call& call);
std::string describe(const Message& message);

// The exception that is being handled; a driver's out of memory is kResource, its other failures kSystem.
Failure current_failure() noexcept;

}  // namespace lockstep::cuda_ipc
