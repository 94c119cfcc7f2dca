#include "lockstep/ddp/comm_hook.h"

#include <utility>

#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep {

GradFuture ready_future(at::Tensor tensor) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(),
                                                         internal::future_devices(tensor.device()));
  future->markCompleted(c10::IValue(std::move(tensor)));
  return future;
}

}  // namespace lockstep
