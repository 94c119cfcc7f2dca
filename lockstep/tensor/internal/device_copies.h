// Tensors of GPUs on their way through host memory: the sender copies them out, in a stream of its own per device, and
// the receiver copies them in (call_streams.h). Host memory is pinned, so that the device copies while the thread goes on;
// where no more can be pinned, ordinary memory serves, and the thread waits.
// Thread safety: stage() by one thread; over() and wait() by any, afterwards.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <vector>

#include "lockstep/object/detail/device_transit.h"

namespace lockstep::internal {

// Uninitialised, on the CPU.
at::Tensor host_memory(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// The copies of one message.
class DeviceCopies final : public object::DeviceCopies {
 public:
  // A tensor on the CPU that has the elements of `tensor`, dense and on a GPU, once this is over(): without gaps, and
  // with its strides where it has none. They are those after the work that is in this thread's current stream.
  at::Tensor stage(const at::Tensor& tensor);

  bool over() override;
  void wait(Deadline deadline) override;

 private:
  struct CopyStream {
    c10::Stream stream;
    c10::Event copied;
  };
  CopyStream& stream_for(c10::Device device);

  std::vector<CopyStream> streams_;  // one per device
};

}  // namespace lockstep::internal
