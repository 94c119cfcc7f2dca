// Our declarations against cuda.h. There is nothing to run: what differs does not compile.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "engines/cuda/driver.h"

namespace lockstep::cuda {
namespace {

#define SAME(ours, theirs) static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs))
SAME(kSuccess, CUDA_SUCCESS);
SAME(kInvalidValue, CUDA_ERROR_INVALID_VALUE);
SAME(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
SAME(kDeinitialized, CUDA_ERROR_DEINITIALIZED);
SAME(kNoDevice, CUDA_ERROR_NO_DEVICE);
SAME(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
SAME(kInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
SAME(kMapFailed, CUDA_ERROR_MAP_FAILED);
SAME(kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(kPeerAccessUnsupported, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
SAME(kContained, CUDA_ERROR_CONTAINED);
SAME(kInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
SAME(kNotFound, CUDA_ERROR_NOT_FOUND);
SAME(kNotReady, CUDA_ERROR_NOT_READY);
SAME(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(kLaunchOutOfResources, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
SAME(kLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT);
SAME(kPeerAccessAlreadyEnabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
SAME(kHardwareStackError, CUDA_ERROR_HARDWARE_STACK_ERROR);
SAME(kIllegalInstruction, CUDA_ERROR_ILLEGAL_INSTRUCTION);
SAME(kMisalignedAddress, CUDA_ERROR_MISALIGNED_ADDRESS);
SAME(kInvalidAddressSpace, CUDA_ERROR_INVALID_ADDRESS_SPACE);
SAME(kInvalidPc, CUDA_ERROR_INVALID_PC);
SAME(kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED);
SAME(kNotPermitted, CUDA_ERROR_NOT_PERMITTED);
SAME(kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
SAME(kMpsClientTerminated, CUDA_ERROR_MPS_CLIENT_TERMINATED);
SAME(kStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
SAME(kExternalDevice, CUDA_ERROR_EXTERNAL_DEVICE);
SAME(kUnknown, CUDA_ERROR_UNKNOWN);
SAME(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME(kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
SAME(kHostRegisterDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME(kIpcLazyEnablePeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME(kWaitValueGeq, CU_STREAM_WAIT_VALUE_GEQ);
SAME(kWaitValueEq, CU_STREAM_WAIT_VALUE_EQ);
SAME(kWriteValueDefault, CU_STREAM_WRITE_VALUE_DEFAULT);
SAME(kMemOpWaitValue64, CU_STREAM_MEM_OP_WAIT_VALUE_64);
SAME(kMemOpWriteValue64, CU_STREAM_MEM_OP_WRITE_VALUE_64);
SAME(kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(kUnifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(kComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(kComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(kCanUse64BitStreamMemOps, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
SAME(kPointerContext, CU_POINTER_ATTRIBUTE_CONTEXT);
SAME(kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME(kPointerBufferId, CU_POINTER_ATTRIBUTE_BUFFER_ID);
SAME(kPointerIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME(kPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(kPointerIsIpcCapable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME(kMemoryHost, CU_MEMORYTYPE_HOST);
SAME(kMemoryDevice, CU_MEMORYTYPE_DEVICE);
SAME(kMemoryUnified, CU_MEMORYTYPE_UNIFIED);
SAME(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(kCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME(kCaptureInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
SAME(kCaptureGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
SAME(kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);

SAME(sizeof(DevicePtr), sizeof(CUdeviceptr));
SAME(sizeof(Device), sizeof(CUdevice));
SAME(sizeof(Result), sizeof(CUresult));
SAME(sizeof(Uuid), sizeof(CUuuid));
SAME(sizeof(IpcMemHandle), sizeof(CUipcMemHandle));
SAME(sizeof(StreamMemOp), sizeof(CUstreamBatchMemOpParams));
using Wait = CUstreamBatchMemOpParams::CUstreamMemOpWaitValueParams_st;
using Write = CUstreamBatchMemOpParams::CUstreamMemOpWriteValueParams_st;
SAME(offsetof(StreamMemOp, address), offsetof(Wait, address));
SAME(offsetof(StreamMemOp, value), offsetof(Wait, value64));
SAME(offsetof(StreamMemOp, flags), offsetof(Wait, flags));
SAME(offsetof(StreamMemOp, alias), offsetof(Wait, alias));
SAME(offsetof(StreamMemOp, address), offsetof(Write, address));
SAME(offsetof(StreamMemOp, value), offsetof(Write, value64));
SAME(offsetof(StreamMemOp, flags), offsetof(Write, flags));

// An entry takes as many arguments, of the same sizes and of the same nature: pointers, numbers.
template <class Ours, class Theirs>
constexpr bool agree() {
  return sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
         std::is_class_v<Ours> == std::is_class_v<Theirs>;
}
template <class... Ours, class... Theirs>
constexpr bool same_arguments(Result (*)(Ours...), CUresult (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) return (agree<Ours, Theirs>() && ...);
  return false;
}
#define AGREES(member, function)                                               \
  static_assert(same_arguments(static_cast<decltype(Driver::member)>(nullptr), \
                               static_cast<decltype(&function)>(nullptr)))
AGREES(device_get_uuid, cuDeviceGetUuid);
AGREES(device_get_attribute, cuDeviceGetAttribute);
AGREES(device_can_access_peer, cuDeviceCanAccessPeer);
AGREES(device_primary_ctx_retain, cuDevicePrimaryCtxRetain);
AGREES(ctx_push_current, cuCtxPushCurrent);
AGREES(ctx_pop_current, cuCtxPopCurrent);
AGREES(ctx_get_device, cuCtxGetDevice);
AGREES(ctx_synchronize, cuCtxSynchronize);
AGREES(ctx_get_stream_priority_range, cuCtxGetStreamPriorityRange);
AGREES(ctx_enable_peer_access, cuCtxEnablePeerAccess);
AGREES(module_load_data, cuModuleLoadData);
AGREES(module_get_function, cuModuleGetFunction);
AGREES(func_load, cuFuncLoad);
AGREES(launch_kernel, cuLaunchKernel);
AGREES(launch_host_func, cuLaunchHostFunc);
AGREES(mem_alloc, cuMemAlloc);
AGREES(mem_free, cuMemFree);
AGREES(mem_get_info, cuMemGetInfo);
AGREES(mem_get_address_range, cuMemGetAddressRange);
AGREES(memcpy, cuMemcpy);
AGREES(memcpy_async, cuMemcpyAsync);
AGREES(memset_d8_async, cuMemsetD8Async);
AGREES(memset_d32_async, cuMemsetD32Async);
AGREES(pointer_get_attribute, cuPointerGetAttribute);
AGREES(pointer_get_attributes, cuPointerGetAttributes);
AGREES(ipc_get_mem_handle, cuIpcGetMemHandle);
AGREES(ipc_open_mem_handle, cuIpcOpenMemHandle);
AGREES(ipc_close_mem_handle, cuIpcCloseMemHandle);
AGREES(mem_host_register, cuMemHostRegister);
AGREES(mem_host_unregister, cuMemHostUnregister);
AGREES(mem_host_get_device_pointer, cuMemHostGetDevicePointer);
AGREES(stream_create_with_priority, cuStreamCreateWithPriority);
AGREES(stream_destroy, cuStreamDestroy);
AGREES(stream_query, cuStreamQuery);
AGREES(stream_synchronize, cuStreamSynchronize);
AGREES(stream_wait_event, cuStreamWaitEvent);
AGREES(stream_is_capturing, cuStreamIsCapturing);
AGREES(stream_wait_value64, cuStreamWaitValue64);
AGREES(stream_write_value64, cuStreamWriteValue64);
AGREES(stream_batch_mem_op, cuStreamBatchMemOp);
AGREES(event_create, cuEventCreate);
AGREES(event_record, cuEventRecord);
AGREES(event_query, cuEventQuery);
AGREES(event_synchronize, cuEventSynchronize);
AGREES(event_destroy, cuEventDestroy);
AGREES(thread_exchange_stream_capture_mode, cuThreadExchangeStreamCaptureMode);
AGREES(stream_begin_capture, cuStreamBeginCapture);
AGREES(stream_end_capture, cuStreamEndCapture);
AGREES(graph_instantiate, cuGraphInstantiateWithFlags);
AGREES(graph_launch, cuGraphLaunch);
AGREES(graph_exec_destroy, cuGraphExecDestroy);
AGREES(graph_destroy, cuGraphDestroy);

}  // namespace
}  // namespace lockstep::cuda

int main() {
  return 0;
}
