// Streams of the device that a tensor is on, through c10's device-generic interface: no CUDA header, and nothing
// to link. A program that has loaded a CUDA libtorch gets CUDA's streams; without one no tensor is on a GPU, and
// none of this is called.
// Thread safety: the current stream is per thread, as in libtorch; every function may be called from any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <vector>

namespace lockstep::internal {

// Work on the device is asynchronous and ordered by streams.
bool has_streams(c10::DeviceType type) noexcept;
// The stream that this thread enqueues work in on the device.
c10::Stream current_stream(c10::Device device);
// A stream of libtorch's pool, in turn: not ordered with the default stream.
c10::Stream pool_stream(c10::Device device);
// What is enqueued in `later` from now on runs after what `earlier` has. Blocks no thread.
void order(const c10::Stream& earlier, const c10::Stream& later);
// Blocks until everything that was enqueued in the stream has completed.
void synchronize(const c10::Stream& stream);
// The same of everything on the device.
void synchronize_device(c10::Device device);
// The tensor's memory is used in `stream`, another one than it was allocated in: libtorch does not give it to
// others before that use is over.
void record_use(const at::Tensor& tensor, const c10::Stream& stream);
// Devices of this type that the process sees; 0 when libtorch has no support for it loaded. Unlike at::hasCUDA(),
// whose first answer is kept for ever, this may be asked before a CUDA libtorch is loaded.
int device_count(c10::DeviceType type) noexcept;
// The device that this thread's work goes to by default. Pre: device_count(type) > 0.
c10::Device current_device(c10::DeviceType type);

// What a c10 Future of values on `device` must be made with: what its callbacks enqueue there is then ordered.
std::vector<c10::Device> future_devices(c10::Device device);

// A tensor over memory that it does not own, on a device. `dtype` elements, flat.
at::Tensor borrow(void* data, std::int64_t n_elements, at::ScalarType dtype, c10::Device device);

}  // namespace lockstep::internal
