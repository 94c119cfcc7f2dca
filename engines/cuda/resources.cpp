#include "engines/cuda/resources.h"

#include <map>
#include <memory>

#include "lockstep/base/detail/mutex.h"

namespace lockstep::cuda {

Error::Error(const Driver& driver, Result result, const std::string& call)
    : std::runtime_error(
          call + ": " + describe(driver, result) +
          (is_sticky(result) ? "; CUDA cannot be used in this process any more: restart it" : "")),
      result_(result) {}

PrimaryContext::PrimaryContext(const Driver& driver, int device) : driver_(&driver), device_(device) {
  Device handle = 0;
  check(driver, driver.device_get(&handle, device), "cuDeviceGet");
  check(driver, driver.device_get_uuid(&uuid_, handle), "cuDeviceGetUuid");
  check(driver, driver.device_get_attribute(&multiprocessors_, kMultiprocessorCount, handle),
        "cuDeviceGetAttribute");
  check(driver, driver.device_primary_ctx_retain(&context_, handle), "cuDevicePrimaryCtxRetain");
}

const PrimaryContext& PrimaryContext::of(const Driver& driver, int device) {
  struct Retained {
    base::Mutex mutex;
    std::map<int, std::unique_ptr<PrimaryContext>> by_device LOCKSTEP_GUARDED_BY(mutex);
  };
  static Retained* const retained = new Retained;  // never destroyed: see the header
  const base::MutexLock lock(retained->mutex);
  std::unique_ptr<PrimaryContext>& entry = retained->by_device[device];
  if (entry == nullptr) entry.reset(new PrimaryContext(driver, device));
  return *entry;
}

ContextScope::ContextScope(const PrimaryContext& context) : driver_(&context.driver()) {
  Context current = nullptr;
  if (driver_->ctx_get_current(&current) == kSuccess && current == context.context()) return;
  pushed_ = driver_->ctx_push_current(context.context()) == kSuccess;
}

ContextScope::~ContextScope() {
  Context popped = nullptr;
  if (pushed_) driver_->ctx_pop_current(&popped);
}

RelaxedCaptureScope::RelaxedCaptureScope(const Driver& driver) : driver_(&driver) {
  driver_->thread_exchange_stream_capture_mode(&mode_);
}

RelaxedCaptureScope::~RelaxedCaptureScope() {
  driver_->thread_exchange_stream_capture_mode(&mode_);
}

bool is_capturing(const Driver& driver, Stream stream) {
  CaptureStatus status = kCaptureNone;
  return driver.stream_is_capturing(stream, &status) == kSuccess && status == kCaptureActive;
}

OwnedStream create_stream(const PrimaryContext& context, Priority priority) {
  const Driver& driver = context.driver();
  const ContextScope scope(context);
  int least = 0;
  int greatest = 0;
  check(driver, driver.ctx_get_stream_priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  Stream stream = nullptr;
  check(driver,
        driver.stream_create_with_priority(&stream, kStreamNonBlocking,
                                           priority == Priority::kGreatest ? greatest : least),
        "cuStreamCreateWithPriority");
  return {context, stream};
}

OwnedEvent create_event(const PrimaryContext& context) {
  const ContextScope scope(context);
  Event event = nullptr;
  check(context.driver(), context.driver().event_create(&event, kEventDisableTiming), "cuEventCreate");
  return {context, event};
}

DeviceMemory allocate(const PrimaryContext& context, std::size_t n_bytes) {
  const ContextScope scope(context);
  DevicePtr memory = 0;
  check(context.driver(), context.driver().mem_alloc(&memory, n_bytes), "cuMemAlloc");
  return {context, memory};
}

RegisteredMemory::RegisteredMemory(const PrimaryContext& context, void* memory, std::size_t n_bytes)
    : context_(&context), memory_(memory) {
  const Driver& driver = context.driver();
  const ContextScope scope(context);
  check(driver, driver.mem_host_register(memory, n_bytes, kHostRegisterPortable | kHostRegisterDeviceMap),
        "cuMemHostRegister");
  if (const Result result = driver.mem_host_get_device_pointer(&device_, memory, 0); result != kSuccess) {
    driver.mem_host_unregister(memory);
    throw Error(driver, result, "cuMemHostGetDevicePointer");
  }
}

RegisteredMemory::RegisteredMemory(RegisteredMemory&& other) noexcept
    : context_(std::exchange(other.context_, nullptr)),
      memory_(std::exchange(other.memory_, nullptr)),
      device_(std::exchange(other.device_, 0)) {}

RegisteredMemory& RegisteredMemory::operator=(RegisteredMemory&& other) noexcept {
  if (this != &other) {
    reset();
    context_ = std::exchange(other.context_, nullptr);
    memory_ = std::exchange(other.memory_, nullptr);
    device_ = std::exchange(other.device_, 0);
  }
  return *this;
}

void RegisteredMemory::reset() {
  if (memory_ == nullptr) return;
  const ContextScope scope(*context_);
  context_->driver().mem_host_unregister(memory_);
  memory_ = nullptr;
}

}  // namespace lockstep::cuda
