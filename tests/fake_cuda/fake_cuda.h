// A CUDA driver without a GPU: libcuda.so.1 for tests on machines that have none.
//
// It implements the entries of the driver API that lockstep calls, with the same binary interface, and behaves as the
// real driver does where code comes to rely on it:
//  - Device memory is one memfd per allocation. The CUdeviceptr is an address that the host may not touch (a fault, as
//    with a real device); the contents are mapped elsewhere, see fake_cuda_host.
//  - A stream is a thread with a queue. Calls that enqueue return at once. The null stream is a stream like any other.
//  - Another process opens an allocation by its IPC handle; the own process is refused, also after fork. The memory of
//    a process that died stays valid where it is mapped.
//  - A process that was forked after cuInit has no CUDA (CUDA_ERROR_NOT_INITIALIZED).
//  - cuMemFree, cuMemHostUnregister, cuIpcCloseMemHandle, cuCtxSynchronize and the first launch of a kernel wait until
//    the streams of the device are idle: code that makes a stream wait for what it submits later hangs here too, and
//    is named on stderr after five seconds. cuFuncLoad loads a kernel ahead of its launch.
//  - Host functions of one device run one at a time and may not call the driver (CUDA_ERROR_NOT_PERMITTED).
//  - Copies from pageable memory take the data at the call, copies to pageable memory return when they are done.
// What it does not do: null-stream ordering, graphs of more than one stream, textures, arrays, pools, managed memory.
// Only versioned names are exported where cuda.h maps a name to one: cuMemAlloc_v2, not cuMemAlloc.
//
// Kernels. A module's image is not executed. cuModuleGetFunction("sum") finds a kernel that was given to
// fake_cuda_register_kernel, or `fake_kernel_sum` in the shared object that FAKE_CUDA_KERNELS names, or in what the
// process has loaded globally. It runs on the stream's thread, once per launch, for the whole grid:
//
//   FAKE_CUDA_KERNEL(sum, sizeof(float*), sizeof(int)) {            // the sizes of the kernel's parameters
//     float* data = fake_cuda_data(*static_cast<float**>(launch->params[0]));
//     const int n = *static_cast<int*>(launch->params[1]);
//     ...
//   }
//
// Environment, read once: FAKE_CUDA_DEVICES (2), FAKE_CUDA_KERNELS, FAKE_CUDA_FAIL=cuMemAlloc_v2:3=2,... (the third
// call gives 2), FAKE_CUDA_BROKEN=1=700,... (device 1 is broken from the start), FAKE_CUDA_MEMORY (bytes per device and
// process), FAKE_CUDA_RELAXED=1 (nothing waits for idle streams but cuCtxSynchronize).
//
// Thread safety: every function may be called from any thread.
#ifndef LOCKSTEP_TESTS_FAKE_CUDA_H
#define LOCKSTEP_TESTS_FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FAKE_CUDA_EXPORT __attribute__((visibility("default")))

typedef struct fake_cuda_launch {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** params;    /* one pointer per parameter, to a copy made by cuLaunchKernel */
  const void* data; /* with CU_LAUNCH_PARAM_BUFFER_POINTER: the buffer; params is null */
  int device;
} fake_cuda_launch;

typedef void (*fake_cuda_kernel)(const fake_cuda_launch* launch);

/* Sizes are those of the parameters in order. A second kernel of the same name replaces the first. */
FAKE_CUDA_EXPORT void fake_cuda_register_kernel(const char* name, fake_cuda_kernel run, const size_t* sizes,
                                                size_t n_sizes);

/* Where the contents of device memory can be touched in this process; the address itself for registered host memory;
 * null for anything else. For kernels and for tests that look behind the driver. */
FAKE_CUDA_EXPORT void* fake_cuda_host(const void* device_pointer);

/* The nth call from now on (1: the next) of an entry, by its exported name, gives `result` and does nothing else. */
FAKE_CUDA_EXPORT void fake_cuda_fail(const char* entry, int nth, int result);
/* How many calls of an entry there were. */
FAKE_CUDA_EXPORT uint64_t fake_cuda_calls(const char* entry);

/* As after an illegal access: work that is enqueued is dropped, streams stop waiting, and every call on the device gives
 * `result`. 0 mends it. */
FAKE_CUDA_EXPORT void fake_cuda_break_device(int device, int result);

/* Memory as of a virtual-memory pool: cuIpcGetMemHandle refuses it. */
FAKE_CUDA_EXPORT void fake_cuda_make_unexportable(const void* device_pointer);

#ifdef __cplusplus
}

template <class T>
T* fake_cuda_data(T* device_pointer) {
  return static_cast<T*>(fake_cuda_host(device_pointer));
}
#define FAKE_CUDA_EXTERN extern "C" FAKE_CUDA_EXPORT
#else
#define FAKE_CUDA_EXTERN FAKE_CUDA_EXPORT
#endif

/* Defines a kernel in a shared object of kernels; the sizes of its parameters follow the name. */
#define FAKE_CUDA_KERNEL(name, ...)                                            \
  FAKE_CUDA_EXTERN const size_t fake_kernel_sizes_##name[] = {__VA_ARGS__, 0}; \
  FAKE_CUDA_EXTERN void fake_kernel_##name(const fake_cuda_launch* launch);    \
  FAKE_CUDA_EXTERN void fake_kernel_##name([[maybe_unused]] const fake_cuda_launch* launch)

#endif
