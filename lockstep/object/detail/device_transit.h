// What a message between workers needs beside its bytes when it holds tensors of other devices than the CPU. Written
// for the codec of tensors (tensor/tensor_object.h) and the layers that send messages (lockstep/rpc), which know nothing
// of each other. Values without such tensors use none of it.
//
//   encoding    the codec asks `targets` where each tensor goes, begins to copy it to host memory, and leaves in `copies`
//               what must be over before the message is sent
//   decoding    the codec copies each tensor to its device in a stream that it makes current on this thread; `streams`
//               restores the thread's own when it is destroyed, on the same thread
//   afterwards  work of this thread on devices is ordered before that of others by DeviceEvents
//
// Thread safety: a DeviceTransit belongs to one thread; DeviceCopies and DeviceEvents may be used from any thread.
#pragma once

#include <memory>

#include "lockstep/base/deadline.h"

namespace lockstep::object {

// The device maps between two workers.
class DeviceTargets {
 public:
  virtual ~DeviceTargets() = default;
  // The receiver's GPU for a tensor that is on cuda:`index` here. Raises kUsage when no map names one.
  virtual int target(int index) const = 0;
};

// Copies from devices into host memory that an encoded object refers to.
class DeviceCopies {
 public:
  virtual ~DeviceCopies() = default;
  // Never blocks. Raises what the device reports.
  virtual bool over() = 0;
  // Blocks until over(). Raises kTimeout at the deadline.
  virtual void wait(Deadline deadline) = 0;
};

struct DeviceTransit {
  const DeviceTargets* targets = nullptr;  // of what is encoded
  std::shared_ptr<DeviceCopies> copies{};  // null: the object is complete
  std::shared_ptr<void> streams{};         // null: nothing was decoded for a device
};

// A point in the work of one thread on devices: what was enqueued in its current streams before.
class DeviceEvents {
 public:
  virtual ~DeviceEvents() = default;
  // What the calling thread enqueues in its current streams from now on runs after that point. Blocks no thread.
  virtual void order() = 0;
  // The value that these events guard is about to be destroyed: its memory is not reused before the streams that
  // were ordered after them are through with what they have.
  virtual void before_release() noexcept = 0;
};

// The point that the calling thread has reached; null while no tensor of a device was sent or received by this process.
std::shared_ptr<DeviceEvents> record_device_events();
// Set by the layer that knows devices, once, when the first such tensor is met.
using RecordDeviceEvents = std::shared_ptr<DeviceEvents> (*)();
void set_device_event_recorder(RecordDeviceEvents record) noexcept;

}  // namespace lockstep::object
