#include "lockstep/tensor/detail/device_stream.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep::internal {

using c10::impl::VirtualGuardImpl;

bool has_streams(c10::DeviceType type) noexcept {
  return type != c10::kCPU && type != c10::kMeta;
}

c10::Stream current_stream(c10::Device device) {
  return VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream pool_stream(c10::Device device) {
  return VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

void order(const c10::Stream& earlier, const c10::Stream& later) {
  if (earlier == later) return;
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

void synchronize(const c10::Stream& stream) {
  VirtualGuardImpl(stream.device_type()).synchronizeStream(stream);
}

void synchronize_device(c10::Device device) {
  VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

void record_use(const at::Tensor& tensor, const c10::Stream& stream) {
  if (!tensor.has_storage()) return;
  VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

int device_count(c10::DeviceType type) noexcept {
  return c10::impl::hasDeviceGuardImpl(type) ? VirtualGuardImpl(type).deviceCount() : 0;
}

c10::Device current_device(c10::DeviceType type) {
  return VirtualGuardImpl(type).getDevice();
}

std::vector<c10::Device> future_devices(c10::Device device) {
  return has_streams(device.type()) ? std::vector<c10::Device>{device} : std::vector<c10::Device>{};
}

// The device is given, so that libtorch does not ask the driver whose memory it is.
at::Tensor borrow(void* data, std::int64_t n_elements, at::ScalarType dtype, c10::Device device) {
  return at::for_blob(data, {n_elements})
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace lockstep::internal
