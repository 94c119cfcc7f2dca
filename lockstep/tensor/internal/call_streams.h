// The streams that a thread works in while it handles tensors of GPUs that arrived in a message: one of libtorch's pool per
// device, current from the first tensor for that device until this is destroyed.
//
// Work there is ordered with that of others by DeviceEvents (object/detail/device_transit.h), recorded while these streams are
// current: when a future is set, a value is left behind an RRef, gradients are handed to a backward pass.
// Thread safety: an object belongs to the thread that made it. The recorder of events may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <vector>

#include "lockstep/object/detail/device_transit.h"

namespace lockstep::internal {

class CallStreams {
 public:
  CallStreams();
  ~CallStreams();
  CallStreams(const CallStreams&) = delete;
  CallStreams& operator=(const CallStreams&) = delete;

  // A copy of `host` on `device`, which exists, in its stream. `host` may be released at once.
  at::Tensor place(const at::Tensor& host, c10::Device device);
  // The device's stream is current.
  void enter(c10::Device device);
  // `tensor` was made in the device's stream, and will be used in others.
  void note(const at::Tensor& tensor);

  // Those of the message that `transit` is of.
  static CallStreams& of(object::DeviceTransit& transit);

 private:
  friend std::shared_ptr<object::DeviceEvents> record_events();

  CallStreams* const outer_;  // that this thread was in
  std::vector<c10::Stream> before_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made_;
};

// Tensors of `device` are sent or received by this process: from now on events are recorded for it.
void follow_device(c10::Device device);

}  // namespace lockstep::internal
