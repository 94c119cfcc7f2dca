// The CUDA driver API, found when it is first needed. An engine for CUDA memory is built without a CUDA toolkit and loads
// on machines without a GPU: nothing of CUDA is linked. The declarations below are the driver's binary interface as far as
// the engines use it; driver_abi_test.cpp compares them with cuda.h where that file is installed.
//
// Why the driver and not the runtime (cudart): the driver is one library per machine, with one name and an interface that
// has kept old entries for fifteen years, while every program may have a runtime of its own. Both share the primary
// context of a device, so that streams and pointers of one are valid in the other (cudaStream_t is CUstream).
//
// Thread safety: every function of a Driver may be called from any thread. Most need a current context: ContextScope.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lockstep::cuda {

// ---- the driver's types; names as in cuda.h without the prefix CU ----

using DevicePtr = unsigned long long;
using Device = int;
using Context = struct ContextObject*;
using Module = struct ModuleObject*;
using Function = struct FunctionObject*;
using Stream = struct StreamObject*;  // null is the legacy default stream
using Event = struct EventObject*;
using Graph = struct GraphObject*;
using GraphExec = struct GraphExecObject*;
using HostFunction = void (*)(void* user_data);

struct Uuid {
  unsigned char bytes[16];
};
struct IpcMemHandle {
  unsigned char bytes[64];
};

// An element of cuStreamBatchMemOp. In cuda.h this is a union padded to six words; waits and writes of 64-bit values have
// the same layout there, and are the only members used.
struct StreamMemOp {
  std::uint32_t operation;  // kMemOp...
  std::uint32_t padding0;
  DevicePtr address;
  std::uint64_t value;
  std::uint32_t flags;  // kWaitValue..., kWriteValue...
  std::uint32_t padding1;
  DevicePtr alias;
  std::uint64_t reserved;
};

// ---- constants ----

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kMapFailed = 205,
  kNoBinaryForGpu = 209,
  kPeerAccessUnsupported = 217,
  kContained = 226,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kLaunchTimeout = 702,
  kPeerAccessAlreadyEnabled = 704,
  kHardwareStackError = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kInvalidPc = 718,
  kLaunchFailed = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kMpsClientTerminated = 810,
  kStreamCaptureUnsupported = 900,
  kExternalDevice = 911,
  kUnknown = 999,
};

enum : unsigned {
  kStreamNonBlocking = 1,
  kEventDisableTiming = 2,
  kHostRegisterPortable = 1,
  kHostRegisterDeviceMap = 2,
  kIpcLazyEnablePeerAccess = 1,
  kWaitValueGeq = 0,  // as signed numbers: *address - value >= 0
  kWaitValueEq = 1,
  kWriteValueDefault = 0,  // after a fence: what the stream wrote before is visible with the value
  kMemOpWaitValue64 = 4,
  kMemOpWriteValue64 = 5,
};
enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kUnifiedAddressing = 41,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kCanUse64BitStreamMemOps = 122,
};
enum PointerAttribute : int {
  kPointerContext = 1,        // Context
  kPointerMemoryType = 2,     // unsigned, MemoryType
  kPointerBufferId = 7,       // std::uint64_t, unique in this process for ever
  kPointerIsManaged = 8,      // unsigned
  kPointerDeviceOrdinal = 9,  // int
  kPointerIsIpcCapable = 10,  // unsigned; whether cuIpcGetMemHandle takes it
};
enum MemoryType : unsigned { kMemoryHost = 1, kMemoryDevice = 2, kMemoryUnified = 4 };
enum CaptureStatus : int { kCaptureNone = 0, kCaptureActive = 1, kCaptureInvalidated = 2 };
enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };

// ---- the entries: member, name in the library, arguments ----

// clang-format off
#define LOCKSTEP_CUDA_ENTRIES(ENTRY)                                                                                      \
  ENTRY(init, "cuInit", (unsigned flags))                                                                                 \
  ENTRY(driver_get_version, "cuDriverGetVersion", (int* version))                                                         \
  ENTRY(get_error_name, "cuGetErrorName", (Result error, const char** text))                                              \
  ENTRY(get_error_string, "cuGetErrorString", (Result error, const char** text))                                          \
  ENTRY(device_get, "cuDeviceGet", (Device* device, int ordinal))                                                         \
  ENTRY(device_get_count, "cuDeviceGetCount", (int* count))                                                               \
  ENTRY(device_get_name, "cuDeviceGetName", (char* name, int capacity, Device device))                                    \
  ENTRY(device_get_uuid, "cuDeviceGetUuid_v2", (Uuid* uuid, Device device))                                               \
  ENTRY(device_get_attribute, "cuDeviceGetAttribute", (int* value, DeviceAttribute attribute, Device device))             \
  ENTRY(device_can_access_peer, "cuDeviceCanAccessPeer", (int* can, Device device, Device peer))                          \
  ENTRY(device_primary_ctx_retain, "cuDevicePrimaryCtxRetain", (Context* context, Device device))                         \
  ENTRY(device_primary_ctx_release, "cuDevicePrimaryCtxRelease_v2", (Device device))                                      \
  ENTRY(ctx_push_current, "cuCtxPushCurrent_v2", (Context context))                                                       \
  ENTRY(ctx_pop_current, "cuCtxPopCurrent_v2", (Context* context))                                                        \
  ENTRY(ctx_get_current, "cuCtxGetCurrent", (Context* context))                                                           \
  ENTRY(ctx_get_device, "cuCtxGetDevice", (Device* device))                                                               \
  ENTRY(ctx_synchronize, "cuCtxSynchronize", ())                                                                          \
  ENTRY(ctx_get_stream_priority_range, "cuCtxGetStreamPriorityRange", (int* least, int* greatest))                        \
  ENTRY(ctx_enable_peer_access, "cuCtxEnablePeerAccess", (Context peer, unsigned flags))                                  \
  ENTRY(module_load_data, "cuModuleLoadData", (Module* module, const void* image))                                        \
  ENTRY(module_unload, "cuModuleUnload", (Module module))                                                                 \
  ENTRY(module_get_function, "cuModuleGetFunction", (Function* function, Module module, const char* name))                \
  ENTRY(launch_kernel, "cuLaunchKernel", (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,           \
        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters,    \
        void** extra))                                                                                                    \
  ENTRY(launch_host_func, "cuLaunchHostFunc", (Stream stream, HostFunction function, void* user_data))                    \
  ENTRY(mem_alloc, "cuMemAlloc_v2", (DevicePtr* out, std::size_t n_bytes))                                                \
  ENTRY(mem_free, "cuMemFree_v2", (DevicePtr memory))                                                                     \
  ENTRY(mem_get_info, "cuMemGetInfo_v2", (std::size_t* free_bytes, std::size_t* total_bytes))                             \
  ENTRY(mem_get_address_range, "cuMemGetAddressRange_v2", (DevicePtr* base, std::size_t* n_bytes, DevicePtr inside))      \
  ENTRY(memcpy, "cuMemcpy", (DevicePtr to, DevicePtr from, std::size_t n_bytes))                                          \
  ENTRY(memcpy_async, "cuMemcpyAsync", (DevicePtr to, DevicePtr from, std::size_t n_bytes, Stream stream))                \
  ENTRY(memset_d8_async, "cuMemsetD8Async", (DevicePtr to, unsigned char value, std::size_t n, Stream stream))            \
  ENTRY(memset_d32_async, "cuMemsetD32Async", (DevicePtr to, unsigned value, std::size_t n, Stream stream))               \
  ENTRY(pointer_get_attribute, "cuPointerGetAttribute", (void* value, PointerAttribute attribute, DevicePtr pointer))     \
  ENTRY(pointer_get_attributes, "cuPointerGetAttributes", (unsigned n, PointerAttribute* attributes, void** values,       \
        DevicePtr pointer))                                                                                               \
  ENTRY(ipc_get_mem_handle, "cuIpcGetMemHandle", (IpcMemHandle* handle, DevicePtr memory))                                \
  ENTRY(ipc_open_mem_handle, "cuIpcOpenMemHandle_v2", (DevicePtr* out, IpcMemHandle handle, unsigned flags))              \
  ENTRY(ipc_close_mem_handle, "cuIpcCloseMemHandle", (DevicePtr memory))                                                  \
  ENTRY(mem_host_register, "cuMemHostRegister_v2", (void* memory, std::size_t n_bytes, unsigned flags))                   \
  ENTRY(mem_host_unregister, "cuMemHostUnregister", (void* memory))                                                       \
  ENTRY(mem_host_get_device_pointer, "cuMemHostGetDevicePointer_v2", (DevicePtr* out, void* memory, unsigned flags))      \
  ENTRY(stream_create_with_priority, "cuStreamCreateWithPriority", (Stream* stream, unsigned flags, int priority))        \
  ENTRY(stream_destroy, "cuStreamDestroy_v2", (Stream stream))                                                            \
  ENTRY(stream_query, "cuStreamQuery", (Stream stream))                                                                   \
  ENTRY(stream_synchronize, "cuStreamSynchronize", (Stream stream))                                                       \
  ENTRY(stream_wait_event, "cuStreamWaitEvent", (Stream stream, Event event, unsigned flags))                             \
  ENTRY(stream_is_capturing, "cuStreamIsCapturing", (Stream stream, CaptureStatus* status))                               \
  ENTRY(stream_wait_value64, "cuStreamWaitValue64_v2", (Stream stream, DevicePtr address, std::uint64_t value,            \
        unsigned flags))                                                                                                  \
  ENTRY(stream_write_value64, "cuStreamWriteValue64_v2", (Stream stream, DevicePtr address, std::uint64_t value,          \
        unsigned flags))                                                                                                  \
  ENTRY(stream_batch_mem_op, "cuStreamBatchMemOp_v2", (Stream stream, unsigned n, StreamMemOp* operations,                \
        unsigned flags))                                                                                                  \
  ENTRY(event_create, "cuEventCreate", (Event* event, unsigned flags))                                                    \
  ENTRY(event_record, "cuEventRecord", (Event event, Stream stream))                                                      \
  ENTRY(event_query, "cuEventQuery", (Event event))                                                                       \
  ENTRY(event_synchronize, "cuEventSynchronize", (Event event))                                                           \
  ENTRY(event_destroy, "cuEventDestroy_v2", (Event event))                                                                \
  ENTRY(thread_exchange_stream_capture_mode, "cuThreadExchangeStreamCaptureMode", (CaptureMode* mode))                    \
  ENTRY(stream_begin_capture, "cuStreamBeginCapture_v2", (Stream stream, CaptureMode mode))                               \
  ENTRY(stream_end_capture, "cuStreamEndCapture", (Stream stream, Graph* graph))                                          \
  ENTRY(graph_instantiate, "cuGraphInstantiateWithFlags", (GraphExec* out, Graph graph, unsigned long long flags))        \
  ENTRY(graph_launch, "cuGraphLaunch", (GraphExec graph, Stream stream))                                                  \
  ENTRY(graph_exec_destroy, "cuGraphExecDestroy", (GraphExec graph))                                                      \
  ENTRY(graph_destroy, "cuGraphDestroy", (Graph graph))
// Of newer drivers: null in older ones.
#define LOCKSTEP_CUDA_OPTIONAL_ENTRIES(ENTRY) ENTRY(func_load, "cuFuncLoad", (Function function))
// clang-format on

// The functions of the driver, all of them there but the optional ones. Every one returns a Result.
struct Driver {
#define LOCKSTEP_CUDA_MEMBER(member, symbol, arguments) Result(*member) arguments;
  LOCKSTEP_CUDA_ENTRIES(LOCKSTEP_CUDA_MEMBER)
  LOCKSTEP_CUDA_OPTIONAL_ENTRIES(LOCKSTEP_CUDA_MEMBER)
#undef LOCKSTEP_CUDA_MEMBER

  // Loads libcuda.so.1 and initialises it, once per process; the answer, also a failure, is kept. Null: the driver is not
  // there or cannot be used, and *why says so (no library, an entry that is missing, no device). Never throws.
  static const Driver* find(std::string* why);
};

// "CUDA_ERROR_OUT_OF_MEMORY: out of memory".
std::string describe(const Driver& driver, Result result);

// The context is lost, and every later call of this process gives such an error too: only a restart of the process helps.
bool is_sticky(Result result);

}  // namespace lockstep::cuda
