// Two GPUs without a GPU, for tests of what libtorch is asked to do with them: streams are numbers, memory is the host's, and
// a copy happens at once. Which stream was ordered after which is recorded. Include in one source file of a program.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

namespace lockstep::fake_gpu {

inline constexpr c10::StreamId kFirstOfPool = 100;  // 0 is the default stream; tests use those between

using StreamOrder = std::pair<c10::Stream, c10::Stream>;  // the later one waits for the earlier one

// What happened since clear(). Any thread.
struct Record {
  std::mutex mutex;
  std::vector<StreamOrder> orders;
  std::atomic<bool> busy{false};  // events are not reached while it is set

  void clear() {
    const std::lock_guard lock(mutex);
    orders.clear();
  }
  // `later` waits for `earlier`, through others perhaps.
  bool ordered(const c10::Stream& earlier, const c10::Stream& later) {
    const std::lock_guard lock(mutex);
    std::vector<c10::Stream> reached{earlier};
    for (std::size_t i = 0; i < reached.size(); ++i) {
      for (const auto& [from, to] : orders) {
        if (from == reached[i] && std::ranges::find(reached, to) == reached.end()) reached.push_back(to);
      }
    }
    return std::ranges::find(reached, later) != reached.end();
  }
};
inline Record record;

inline c10::Device gpu(int index) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}
inline c10::Stream stream(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return std::exchange(now(), device); }
  c10::Device getDevice() const override { return now(); }
  void setDevice(c10::Device device) const override { now() = device; }
  void uncheckedSetDevice(c10::Device device) const noexcept override { now() = device; }
  c10::Stream getStream(c10::Device device) const override { return stream(device, id_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::atomic<c10::StreamId> next{kFirstOfPool};
    return stream(device, next++);
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    return stream(other.device(), std::exchange(id_of(other.device()), other.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

  // An event is the stream that it was recorded in.
  void record(void** event, const c10::Stream& in, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<c10::Stream*>(*event);
    *event = new c10::Stream(in);
  }
  void block(void* event, const c10::Stream& later) const override {
    const std::lock_guard lock(fake_gpu::record.mutex);
    fake_gpu::record.orders.emplace_back(*static_cast<c10::Stream*>(event), later);
  }
  bool queryEvent(void*) const override { return !fake_gpu::record.busy; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<c10::Stream*>(event);
  }

 private:
  static c10::Device& now() {
    thread_local c10::Device device = gpu(0);
    return device;
  }
  static c10::StreamId& id_of(c10::Device device) {
    thread_local c10::StreamId current[2] = {0, 0};
    return current[device.index() < 0 ? now().index() : device.index()];
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// What libtorch asks before it looks at streams, by this name. Memory cannot be pinned.
class CUDAHooks final : public at::CUDAHooksInterface {
 public:
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 2; }
  int getNumGPUs() const override { return 2; }
  bool isPinnedPtr(const void*) const override { return false; }
};
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

inline at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<at::Device> device, std::optional<bool>) {
  const auto type = dtype.value_or(at::kFloat);
  std::size_t n_elements = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    n_elements += static_cast<std::size_t>(std::max<std::int64_t>(sizes[i] - 1, 0) * strides[i]);
  void* const memory = std::malloc(n_elements * c10::elementSize(type));
  return at::for_blob(memory, sizes)
      .strides(strides)
      .deleter([](void* data) { std::free(data); })
      .options(at::TensorOptions().dtype(type).device(*device))
      .target_device(device)
      .make_tensor();
}
inline at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout> layout, std::optional<at::Device> device,
                        std::optional<bool> pin, std::optional<at::MemoryFormat>) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
  return empty_strided(sizes, strides, dtype, layout, device, pin);
}
// The same memory, as the CPU's.
inline at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {},
      at::TensorOptions().dtype(tensor.scalar_type()));
}
inline at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool) {
  on_host(self).copy_(on_host(source));
  return self;
}
inline at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  on_host(self).fill_(value);
  return self;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty_strided", empty_strided);
  library.impl("empty.memory_format", empty);
  library.impl("copy_", copy);
  library.impl("fill_.Scalar", fill);
}

}  // namespace lockstep::fake_gpu
