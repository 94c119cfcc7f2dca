// Devices, contexts, errors, and the functions of fake_cuda.h.
#include <dlfcn.h>

#include <cstring>
#include <optional>

#include "tests/fake_cuda/entries.h"

using namespace fake_cuda;

FAKE_CUDA_API CUresult cuInit(unsigned flags) {
  return flags == 0 ? Driver::get().initialize() : kInvalidValue;
}

FAKE_CUDA_API CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return kInvalidValue;
  *version = 13000;
  return kSuccess;
}

namespace {

struct Name {
  int result;
  const char* name;
  const char* text;
};
constexpr Name kNames[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kPeerAccessUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kIllegalState, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kPeerAccessAlreadyEnabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kStreamCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {kStreamCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const Name* name_of(int result) {
  for (const Name& one : kNames) {
    if (one.result == result) return &one;
  }
  return nullptr;
}

}  // namespace

FAKE_CUDA_API CUresult cuGetErrorName(CUresult result, const char** text) {
  const Name* const found = name_of(result);
  *text = found == nullptr ? nullptr : found->name;
  return found == nullptr ? kInvalidValue : kSuccess;
}

FAKE_CUDA_API CUresult cuGetErrorString(CUresult result, const char** text) {
  const Name* const found = name_of(result);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? kInvalidValue : kSuccess;
}

// ---- devices ----

FAKE_CUDA_API CUresult cuDeviceGetCount(int* count) {
  FAKE_CUDA_ENTER();
  *count = Driver::get().n_devices();
  return kSuccess;
}

FAKE_CUDA_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_CUDA_ENTER();
  if (Driver::get().device(ordinal) == nullptr) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

FAKE_CUDA_API CUresult cuDeviceGetName(char* name, int capacity, CUdevice device) {
  FAKE_CUDA_ENTER();
  if (Driver::get().device(device) == nullptr) return kInvalidDevice;
  if (capacity <= 0) return kInvalidValue;
  std::strncpy(name, "Fake CUDA device", static_cast<std::size_t>(capacity));
  name[capacity - 1] = '\0';
  return kSuccess;
}

FAKE_CUDA_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  FAKE_CUDA_ENTER();
  if (Driver::get().device(device) == nullptr) return kInvalidDevice;
  std::memcpy(uuid->bytes, "fake-cuda-gpu-00", sizeof uuid->bytes);
  uuid->bytes[15] = static_cast<char>('0' + device);
  return kSuccess;
}

FAKE_CUDA_API CUresult cuDeviceTotalMem_v2(std::size_t* n_bytes, CUdevice device) {
  FAKE_CUDA_ENTER();
  if (Driver::get().device(device) == nullptr) return kInvalidDevice;
  *n_bytes = Driver::get().memory.limit();
  return kSuccess;
}

FAKE_CUDA_API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  FAKE_CUDA_ENTER();
  if (Driver::get().device(device) == nullptr) return kInvalidDevice;
  switch (attribute) {
    case kMaxThreadsPerBlock:
      *value = 1024;
      return kSuccess;
    case kMaxThreadsPerMultiprocessor:
      *value = 2048;
      return kSuccess;
    case kWarpSize:
      *value = 32;
      return kSuccess;
    case kMultiprocessorCount:
      *value = 4;
      return kSuccess;
    case kComputeCapabilityMajor:
      *value = 9;
      return kSuccess;
    case kComputeCapabilityMinor:
    case kPciDeviceId:
    case kPciDomainId:
      *value = 0;
      return kSuccess;
    case kPciBusId:
      *value = device + 1;
      return kSuccess;
    case kUnifiedAddressing:
    case kStreamPrioritiesSupported:
    case kCanUseStreamMemOpsV1:
    case kCanUse64BitStreamMemOpsV1:
    case kCanUseStreamWaitValueNorV1:
    case kCooperativeLaunch:
    case kHostRegisterSupported:
    case kCanUseHostPointerForRegisteredMem:
    case kCanUse64BitStreamMemOps:
    case kCanUseStreamWaitValueNor:
      *value = 1;
      return kSuccess;
    default:
      return kInvalidValue;  // not one that lockstep has asked for so far
  }
}

FAKE_CUDA_API CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  FAKE_CUDA_ENTER();
  if (Driver::get().device(device) == nullptr || Driver::get().device(peer) == nullptr) return kInvalidDevice;
  *can = device != peer;
  return kSuccess;
}

FAKE_CUDA_API CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char*) {
  FAKE_CUDA_ENTER();
  *device = 0;
  return kNotSupported;
}

// ---- contexts ----

FAKE_CUDA_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice index) {
  FAKE_CUDA_ENTER();
  Device* const device = Driver::get().device(index);
  if (device == nullptr) return kInvalidDevice;
  if (device->error != kSuccess) return static_cast<CUresult>(device->error.load());
  ++device->n_retained;
  *context = device;
  return kSuccess;
}

FAKE_CUDA_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice index) {
  FAKE_CUDA_ENTER();
  Device* const device = Driver::get().device(index);
  if (device == nullptr) return kInvalidDevice;
  if (device->n_retained == 0) return kInvalidContext;
  --device->n_retained;
  return kSuccess;
}

FAKE_CUDA_API CUresult cuDevicePrimaryCtxGetState(CUdevice index, unsigned* flags, int* active) {
  FAKE_CUDA_ENTER();
  Device* const device = Driver::get().device(index);
  if (device == nullptr) return kInvalidDevice;
  *flags = 0;
  *active = device->n_retained > 0;
  return kSuccess;
}

FAKE_CUDA_API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  FAKE_CUDA_ENTER();
  if (context == nullptr) return kInvalidContext;
  contexts().push_back(static_cast<Device*>(context));
  return kSuccess;
}

FAKE_CUDA_API CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  FAKE_CUDA_ENTER();
  if (contexts().empty()) return kInvalidContext;
  if (context != nullptr) *context = contexts().back();
  contexts().pop_back();
  return kSuccess;
}

FAKE_CUDA_API CUresult cuCtxSetCurrent(CUcontext context) {
  FAKE_CUDA_ENTER();
  if (!contexts().empty()) contexts().pop_back();
  if (context != nullptr) contexts().push_back(static_cast<Device*>(context));
  return kSuccess;
}

FAKE_CUDA_API CUresult cuCtxGetCurrent(CUcontext* context) {
  FAKE_CUDA_ENTER();
  *context = contexts().empty() ? nullptr : contexts().back();
  return kSuccess;
}

FAKE_CUDA_API CUresult cuCtxGetDevice(CUdevice* index) {
  FAKE_CUDA_ENTER_DEVICE();
  *index = device->index;
  return kSuccess;
}

FAKE_CUDA_API CUresult cuCtxSynchronize() {
  FAKE_CUDA_ENTER_DEVICE();
  Driver::get().drain(*device, __func__);
  return static_cast<CUresult>(device->error.load());
}

FAKE_CUDA_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  FAKE_CUDA_ENTER_DEVICE();
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

FAKE_CUDA_API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  FAKE_CUDA_ENTER_DEVICE();
  if (flags != 0) return kInvalidValue;
  if (peer == device || peer == nullptr) return kInvalidContext;
  return kSuccess;
}

// ---- the test's side ----

extern "C" {

void fake_cuda_register_kernel(const char* name, fake_cuda_kernel run, const size_t* sizes, size_t n_sizes) {
  Driver& driver = Driver::get();
  const std::lock_guard lock(driver.mutex);
  driver.kernels[name] = {.run = run, .sizes = std::vector<std::size_t>(sizes, sizes + n_sizes)};
}

void* fake_cuda_host(const void* device_pointer) {
  return Driver::get().memory.contents(reinterpret_cast<std::uintptr_t>(device_pointer), 0);
}

void fake_cuda_fail(const char* entry, int nth, int result) {
  Driver::get().fail(entry, nth, result);
}

uint64_t fake_cuda_calls(const char* entry) {
  return Driver::get().calls(entry);
}

void fake_cuda_break_device(int index, int result) {
  Device* const device = Driver::get().device(index);
  if (device == nullptr) return;
  device->error = result;
  if (result != kSuccess) ++device->n_broken;
}

void fake_cuda_make_unexportable(const void* device_pointer) {
  Driver::get().memory.make_unexportable(reinterpret_cast<std::uintptr_t>(device_pointer));
}
}
