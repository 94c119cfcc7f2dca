// The part of NVIDIA's cuda.h that the fake implements, written down once more: tests build where there is no CUDA
// toolkit. cuda_abi_test.cpp compares it with cuda.h where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake_cuda {

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = void*;
using CUstream = void*;
using CUevent = void*;
using CUmodule = void*;
using CUfunction = void*;
using CUgraph = void*;
using CUgraphExec = void*;
using CUhostFn = void (*)(void*);

enum CUresult : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kPeerAccessUnsupported = 217,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kPeerAccessAlreadyEnabled = 704,
  kPeerAccessNotEnabled = 705,
  kContextIsDestroyed = 709,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kLaunchFailed = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureInvalidated = 901,
  kIllegalState = 401,
  kMapFailed = 205,
  kUnknown = 999,
};

struct CUuuid {
  char bytes[16];
};

struct CUipcMemHandle {
  char reserved[64];
};

// CUstreamBatchMemOpParams: waitValue and writeValue have the same layout.
union CUstreamBatchMemOpParams {
  int operation;
  struct Value {
    int operation;
    CUdeviceptr address;
    std::uint64_t value;  // 32-bit operations: the lower half
    unsigned flags;
    CUdeviceptr alias;
  } value;
  std::uint64_t pad[6];
};
inline constexpr int kWaitValue32 = 1, kWriteValue32 = 2, kFlushRemoteWrites = 3, kWaitValue64 = 4,
                     kWriteValue64 = 5, kMemoryBarrier = 6;
inline constexpr unsigned kWaitGeq = 0, kWaitEq = 1, kWaitAnd = 2, kWaitNor = 3;

// CU_DEVICE_ATTRIBUTE_...
inline constexpr int kMaxThreadsPerBlock = 1, kWarpSize = 10, kMultiprocessorCount = 16,
                     kUnifiedAddressing = 41, kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76,
                     kStreamPrioritiesSupported = 78, kCanUseStreamMemOpsV1 = 92,
                     kCanUse64BitStreamMemOpsV1 = 93, kCanUseStreamWaitValueNorV1 = 94,
                     kCooperativeLaunch = 95, kHostRegisterSupported = 99,
                     kCanUseHostPointerForRegisteredMem = 91, kCanUse64BitStreamMemOps = 122,
                     kCanUseStreamWaitValueNor = 123, kPciBusId = 33, kPciDeviceId = 34, kPciDomainId = 50,
                     kMaxThreadsPerMultiprocessor = 39;
// CU_POINTER_ATTRIBUTE_...
inline constexpr int kPointerContext = 1, kPointerMemoryType = 2, kPointerDevicePointer = 3,
                     kPointerHostPointer = 4, kPointerBufferId = 7, kPointerIsManaged = 8,
                     kPointerDeviceOrdinal = 9, kPointerIpcCapable = 10, kPointerRangeStart = 11,
                     kPointerRangeSize = 12, kPointerMapped = 13;
inline constexpr unsigned kMemoryTypeHost = 1, kMemoryTypeDevice = 2;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kIpcMemLazyEnablePeerAccess = 1;
inline constexpr std::uintptr_t kLaunchParamEnd = 0, kLaunchParamBufferPointer = 1,
                                kLaunchParamBufferSize = 2;

}  // namespace fake_cuda
