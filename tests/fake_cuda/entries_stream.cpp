// Streams, events, values in memory that streams wait for, host functions, capture.
#include <atomic>
#include <cstring>
#include <optional>

#include "tests/fake_cuda/entries.h"

using namespace fake_cuda;

FAKE_CUDA_API CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int) {
  FAKE_CUDA_ENTER_DEVICE();
  if (out == nullptr || flags > 1) return kInvalidValue;
  *out = Driver::get().add_stream(*device);
  return kSuccess;
}

FAKE_CUDA_API CUresult cuStreamCreate(CUstream* out, unsigned flags) {
  return cuStreamCreateWithPriority(out, flags, 0);
}

// Returns at once; what is in the queue is still executed.
FAKE_CUDA_API CUresult cuStreamDestroy_v2(CUstream stream) {
  FAKE_CUDA_ENTER();
  return Driver::get().remove_stream(stream);
}

FAKE_CUDA_API CUresult cuStreamQuery(CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  if (queue->capturing()) return kStreamCaptureUnsupported;
  return queue->idle() ? kSuccess : kNotReady;
}

FAKE_CUDA_API CUresult cuStreamSynchronize(CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  if (queue->capturing()) return kStreamCaptureUnsupported;
  queue->drain(__func__);
  return static_cast<CUresult>(queue->device().error.load());
}

FAKE_CUDA_API CUresult cuStreamGetPriority(CUstream stream, int* priority) {
  FAKE_CUDA_ENTER_STREAM(stream);
  *priority = 0;
  return kSuccess;
}

FAKE_CUDA_API CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  FAKE_CUDA_ENTER_STREAM(stream);
  *context = &queue->device();
  return kSuccess;
}

// ---- events ----

namespace {

std::shared_ptr<Event> event_of(CUevent handle, CUresult& error) {
  Driver& driver = Driver::get();
  const std::lock_guard lock(driver.mutex);
  const auto found = driver.events.find(handle);
  error = found == driver.events.end() ? kInvalidHandle
                                       : static_cast<CUresult>(found->second->device->error.load());
  return found == driver.events.end() ? nullptr : found->second;
}

std::shared_ptr<Mark> last_of(Event& event) {
  const std::lock_guard lock(event.mutex);
  return event.last;
}

}  // namespace

FAKE_CUDA_API CUresult cuEventCreate(CUevent* out, unsigned flags) {
  FAKE_CUDA_ENTER_DEVICE();
  auto event = std::make_shared<Event>();
  event->device = device;
  event->timed = (flags & kEventDisableTiming) == 0;
  *out = event.get();
  Driver& driver = Driver::get();
  const std::lock_guard lock(driver.mutex);
  driver.events.emplace(event.get(), std::move(event));
  return kSuccess;
}

FAKE_CUDA_API CUresult cuEventDestroy_v2(CUevent handle) {
  FAKE_CUDA_ENTER();
  Driver& driver = Driver::get();
  const std::lock_guard lock(driver.mutex);
  return driver.events.erase(handle) == 1 ? kSuccess : kInvalidHandle;
}

FAKE_CUDA_API CUresult cuEventRecord(CUevent handle, CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  const auto event = event_of(handle, error);
  if (error != kSuccess) return error;
  if (event->device != &queue->device()) return kInvalidHandle;
  if (queue->capturing()) return kStreamCaptureUnsupported;  // joins of streams are not captured here
  auto mark = std::make_shared<Mark>();
  {
    const std::lock_guard lock(event->mutex);
    event->last = mark;
  }
  queue->push({__func__, nullptr, [mark] {
                 mark->when = std::chrono::steady_clock::now();
                 mark->reached.store(true, std::memory_order_release);
               }});
  return kSuccess;
}

FAKE_CUDA_API CUresult cuEventQuery(CUevent handle) {
  FAKE_CUDA_ENTER();
  CUresult error = kSuccess;
  const auto event = event_of(handle, error);
  if (error != kSuccess) return error;
  const auto mark = last_of(*event);
  return !mark || mark->reached.load(std::memory_order_acquire) ? kSuccess : kNotReady;
}

FAKE_CUDA_API CUresult cuEventSynchronize(CUevent handle) {
  FAKE_CUDA_ENTER();
  CUresult error = kSuccess;
  const auto event = event_of(handle, error);
  if (error != kSuccess) return error;
  const auto mark = last_of(*event);
  while (mark && !mark->reached.load(std::memory_order_acquire)) {
    if (event->device->error != kSuccess) return static_cast<CUresult>(event->device->error.load());
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return kSuccess;
}

FAKE_CUDA_API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent from, CUevent to) {
  FAKE_CUDA_ENTER();
  CUresult error = kSuccess;
  const auto first = event_of(from, error);
  if (error != kSuccess) return error;
  const auto second = event_of(to, error);
  if (error != kSuccess) return error;
  const auto a = last_of(*first), b = last_of(*second);
  if (!first->timed || !second->timed || !a || !b) return kInvalidHandle;
  if (!a->reached.load(std::memory_order_acquire) || !b->reached.load(std::memory_order_acquire))
    return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(b->when - a->when).count();
  return kSuccess;
}

FAKE_CUDA_API CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned) {
  FAKE_CUDA_ENTER_STREAM(stream);
  const auto event = event_of(handle, error);
  if (error != kSuccess) return error;
  if (queue->capturing()) return kStreamCaptureUnsupported;
  if (const auto mark = last_of(*event))  // an event that was never recorded is not waited for
    queue->push({__func__, [mark] { return mark->reached.load(std::memory_order_acquire); }, nullptr});
  return kSuccess;
}

// ---- values in memory ----

namespace {

template <class T>
bool holds(const T* at, T value, unsigned condition) {
  const T now = __atomic_load_n(at, __ATOMIC_ACQUIRE);
  switch (condition) {
    case kWaitGeq:
      return static_cast<std::make_signed_t<T>>(now - value) >= 0;
    case kWaitEq:
      return now == value;
    case kWaitAnd:
      return (now & value) != 0;
    default:
      return static_cast<T>(~(now | value)) != 0;
  }
}

template <class T>
CUresult value_task(CUdeviceptr address, T value, unsigned flags, bool wait, Task& out) {
  auto* const at = reinterpret_cast<T*>(Driver::get().memory.contents(address, sizeof(T)));
  if (at == nullptr || address % sizeof(T) != 0) return kInvalidValue;
  if (wait) {
    if (flags > kWaitNor)
      return flags >> 30 != 0 ? kNotSupported : kInvalidValue;  // no flush of remote writes
    out = {"cuStreamWaitValue", [=] { return holds(at, value, flags); }, nullptr};
  } else {
    if (flags > 1) return kInvalidValue;
    out = {"cuStreamWriteValue", nullptr, [=] { __atomic_store_n(at, value, __ATOMIC_RELEASE); }};
  }
  return kSuccess;
}

CUresult push_value(Stream& queue, int operation, const CUstreamBatchMemOpParams::Value& value) {
  Task task{};
  CUresult result = kInvalidValue;
  switch (operation) {
    case kWaitValue32:
    case kWriteValue32:
      result = value_task(value.address, static_cast<std::uint32_t>(value.value), value.flags,
                          operation == kWaitValue32, task);
      break;
    case kWaitValue64:
    case kWriteValue64:
      result = value_task(value.address, value.value, value.flags, operation == kWaitValue64, task);
      break;
    case kMemoryBarrier:
      return kSuccess;  // a stream executes in order here
    case kFlushRemoteWrites:
      return kNotSupported;
    default:
      break;
  }
  if (result == kSuccess) queue.push(std::move(task));
  return result;
}

}  // namespace

#define FAKE_CUDA_VALUE_ENTRY(name, type, operation)                                              \
  FAKE_CUDA_API CUresult name(CUstream stream, CUdeviceptr address, type value, unsigned flags) { \
    FAKE_CUDA_ENTER_STREAM(stream);                                                               \
    return push_value(*queue, operation, {operation, address, value, flags, 0});                  \
  }
FAKE_CUDA_VALUE_ENTRY(cuStreamWaitValue32_v2, std::uint32_t, kWaitValue32)
FAKE_CUDA_VALUE_ENTRY(cuStreamWriteValue32_v2, std::uint32_t, kWriteValue32)
FAKE_CUDA_VALUE_ENTRY(cuStreamWaitValue64_v2, std::uint64_t, kWaitValue64)
FAKE_CUDA_VALUE_ENTRY(cuStreamWriteValue64_v2, std::uint64_t, kWriteValue64)

FAKE_CUDA_API CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned n, CUstreamBatchMemOpParams* all,
                                             unsigned flags) {
  FAKE_CUDA_ENTER_STREAM(stream);
  if (flags != 0 || n > 256 || (n > 0 && all == nullptr)) return kInvalidValue;
  for (unsigned i = 0; i < n; ++i) {
    if (const CUresult result = push_value(*queue, all[i].operation, all[i].value); result != kSuccess)
      return result;
  }
  return kSuccess;
}

// ---- host functions ----

FAKE_CUDA_API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  FAKE_CUDA_ENTER_STREAM(stream);
  if (function == nullptr) return kInvalidValue;
  Device& device = queue->device();
  queue->push({__func__, nullptr, [=, &device] { run_host_function(device, function, data); }});
  return kSuccess;
}

// ---- capture: of one stream ----

FAKE_CUDA_API CUresult cuStreamIsCapturing(CUstream stream, int* status) {
  FAKE_CUDA_ENTER_STREAM(stream);
  *status = queue->capturing() ? 1 : 0;
  return kSuccess;
}

FAKE_CUDA_API CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  FAKE_CUDA_ENTER();
  thread_local int current = 0;
  if (mode == nullptr || *mode < 0 || *mode > 2) return kInvalidValue;
  std::swap(*mode, current);
  return kSuccess;
}

FAKE_CUDA_API CUresult cuStreamBeginCapture_v2(CUstream stream, int) {
  FAKE_CUDA_ENTER_STREAM(stream);
  if (stream == nullptr) return kStreamCaptureUnsupported;
  return queue->begin_capture() ? kSuccess : kIllegalState;
}

FAKE_CUDA_API CUresult cuStreamEndCapture(CUstream stream, CUgraph* out) {
  FAKE_CUDA_ENTER_STREAM(stream);
  auto graph = queue->end_capture();
  if (!graph) return kIllegalState;
  *out = graph.get();
  Driver& driver = Driver::get();
  const std::lock_guard lock(driver.mutex);
  driver.graphs.emplace(graph.get(), std::move(graph));
  return kSuccess;
}

FAKE_CUDA_API CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph handle, unsigned long long) {
  FAKE_CUDA_ENTER();
  Driver& driver = Driver::get();
  const std::lock_guard lock(driver.mutex);
  const auto found = driver.graphs.find(handle);
  if (found == driver.graphs.end()) return kInvalidValue;
  auto copy = std::make_shared<Graph>(*found->second);
  *out = copy.get();
  driver.graphs.emplace(copy.get(), std::move(copy));
  return kSuccess;
}

FAKE_CUDA_API CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  std::shared_ptr<Graph> graph;
  {
    Driver& driver = Driver::get();
    const std::lock_guard lock(driver.mutex);
    const auto found = driver.graphs.find(handle);
    if (found == driver.graphs.end()) return kInvalidValue;
    graph = found->second;
  }
  for (const Task& task : graph->tasks) queue->push(task);
  return kSuccess;
}

FAKE_CUDA_API CUresult cuGraphDestroy(CUgraph handle) {
  FAKE_CUDA_ENTER();
  Driver& driver = Driver::get();
  const std::lock_guard lock(driver.mutex);
  return driver.graphs.erase(handle) == 1 ? kSuccess : kInvalidValue;
}

FAKE_CUDA_API CUresult cuGraphExecDestroy(CUgraphExec handle) {
  return cuGraphDestroy(handle);
}
