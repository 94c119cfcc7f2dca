// Allocations, IPC, registered host memory, copies and fills.
#include <cstring>
#include <optional>

#include "tests/fake_cuda/entries.h"

using namespace fake_cuda;

namespace {

Memory& memory() {
  return Driver::get().memory;
}

// Frees something when the streams of its device are idle.
template <class Free>
CUresult free_when_idle(std::uintptr_t address, const char* who, const Free& free) {
  if (const auto block = memory().find(address))
    Driver::get().block_as_the_real_one(*Driver::get().device(block->device), who);
  return free();
}

}  // namespace

FAKE_CUDA_API CUresult cuMemAlloc_v2(CUdeviceptr* out, std::size_t n_bytes) {
  FAKE_CUDA_ENTER_DEVICE();
  return memory().allocate(device->index, n_bytes, out);
}

FAKE_CUDA_API CUresult cuMemFree_v2(CUdeviceptr address) {
  FAKE_CUDA_ENTER_DEVICE();
  if (address == 0) return kSuccess;
  return free_when_idle(address, __func__, [&] { return memory().free(address); });
}

FAKE_CUDA_API CUresult cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  FAKE_CUDA_ENTER_DEVICE();
  *total = memory().limit();
  *free = memory().limit() - memory().used(device->index);
  return kSuccess;
}

FAKE_CUDA_API CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* n_bytes, CUdeviceptr address) {
  FAKE_CUDA_ENTER_DEVICE();
  const auto block = memory().find(address);
  if (!block || block->kind == Block::Kind::kRegistered) return kNotFound;
  if (base != nullptr) *base = block->base;
  if (n_bytes != nullptr) *n_bytes = block->n_bytes;
  return kSuccess;
}

namespace {

CUresult attribute_of(const Block& block, CUdeviceptr address, int attribute, void* out) {
  const bool host = block.kind == Block::Kind::kRegistered;
  const auto put = [&](auto value) {
    std::memcpy(out, &value, sizeof value);
    return kSuccess;
  };
  switch (attribute) {
    case kPointerContext:
      return put(static_cast<CUcontext>(Driver::get().device(block.device)));
    case kPointerMemoryType:
      return put(host ? kMemoryTypeHost : kMemoryTypeDevice);
    case kPointerDevicePointer:
      return put(address);
    case kPointerHostPointer:
      return host ? put(address) : kInvalidValue;
    case kPointerBufferId:
      return put(block.id);
    case kPointerIsManaged:
      return put(false);
    case kPointerDeviceOrdinal:
      return put(block.device);
    case kPointerIpcCapable:
      return put(block.kind == Block::Kind::kOwn && block.exportable);
    case kPointerRangeStart:
      return put(static_cast<CUdeviceptr>(block.base));
    case kPointerRangeSize:
      return put(block.n_bytes);
    case kPointerMapped:
      return put(true);
    default:
      return kInvalidValue;
  }
}

}  // namespace

FAKE_CUDA_API CUresult cuPointerGetAttribute(void* out, int attribute, CUdeviceptr address) {
  FAKE_CUDA_ENTER();
  const auto block = memory().find(address);
  return block && out != nullptr ? attribute_of(*block, address, attribute, out) : kInvalidValue;
}

// Of memory that the driver does not know, every attribute is null and the call succeeds.
FAKE_CUDA_API CUresult cuPointerGetAttributes(unsigned n, int* attributes, void** out, CUdeviceptr address) {
  FAKE_CUDA_ENTER();
  const auto block = memory().find(address);
  for (unsigned i = 0; i < n; ++i) {
    const int attribute = attributes[i];
    const bool wide = attribute == kPointerContext || attribute == kPointerDevicePointer ||
                      attribute == kPointerHostPointer || attribute == kPointerBufferId ||
                      attribute == kPointerRangeStart || attribute == kPointerRangeSize;
    const bool byte =
        attribute == kPointerIsManaged || attribute == kPointerIpcCapable || attribute == kPointerMapped;
    if (block && attribute_of(*block, address, attribute, out[i]) == kSuccess) continue;
    std::memset(out[i], attribute == kPointerDeviceOrdinal ? 0xfe : 0, wide ? 8 : byte ? 1 : 4);
    if (attribute == kPointerDeviceOrdinal) *static_cast<int*>(out[i]) = -2;
  }
  return kSuccess;
}

// ---- IPC ----

FAKE_CUDA_API CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  FAKE_CUDA_ENTER_DEVICE();
  return memory().export_handle(address, handle);
}

FAKE_CUDA_API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* out, CUipcMemHandle handle, unsigned flags) {
  FAKE_CUDA_ENTER_DEVICE();
  if (flags != kIpcMemLazyEnablePeerAccess) return kInvalidValue;
  return memory().open(device->index, handle, out);
}

FAKE_CUDA_API CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  FAKE_CUDA_ENTER_DEVICE();
  return free_when_idle(address, __func__, [&] { return memory().close(address); });
}

// ---- registered host memory ----

FAKE_CUDA_API CUresult cuMemHostRegister_v2(void* host, std::size_t n_bytes, unsigned flags) {
  FAKE_CUDA_ENTER_DEVICE();
  if ((flags & ~0xfu) != 0) return kInvalidValue;
  return memory().register_host(device->index, host, n_bytes);
}

FAKE_CUDA_API CUresult cuMemHostUnregister(void* host) {
  FAKE_CUDA_ENTER_DEVICE();
  return free_when_idle(reinterpret_cast<std::uintptr_t>(host), __func__,
                        [&] { return memory().unregister(host); });
}

FAKE_CUDA_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* host, unsigned flags) {
  FAKE_CUDA_ENTER_DEVICE();
  const auto address = reinterpret_cast<std::uintptr_t>(host);
  const auto block = memory().find(address);
  if (flags != 0 || !block || block->kind != Block::Kind::kRegistered) return kInvalidValue;
  *out = address;
  return kSuccess;
}

// ---- copies and fills ----

namespace {

// One end of a copy: memory the device can reach, or pageable memory of the host.
struct End {
  std::byte* data;
  bool pageable;
};

// `must`: must be known to the driver. Null data: it is not, or not as long.
End end_of(CUdeviceptr address, std::size_t n_bytes, bool must) {
  if (memory().find(address)) return {memory().contents(address, n_bytes), false};
  return {must ? nullptr : reinterpret_cast<std::byte*>(address), true};
}

CUresult copy(Stream& queue, const End& to, const End& from, std::size_t n_bytes, const char* who) {
  if (n_bytes == 0) return kSuccess;
  if (to.data == nullptr || from.data == nullptr) return kInvalidValue;
  if (from.pageable) {  // staged at once, as the real driver does
    auto staged = std::make_shared<std::vector<std::byte>>(from.data, from.data + n_bytes);
    queue.push({who, nullptr, [=, at = to.data] { std::memcpy(at, staged->data(), n_bytes); }});
  } else {
    queue.push({who, nullptr, [=, at = to.data, source = from.data] { std::memmove(at, source, n_bytes); }});
  }
  if (to.pageable && !queue.capturing()) queue.drain(who);
  return kSuccess;
}

}  // namespace

FAKE_CUDA_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t n_bytes, CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  return copy(*queue, end_of(to, n_bytes, false), end_of(from, n_bytes, false), n_bytes, __func__);
}

FAKE_CUDA_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t n_bytes,
                                            CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  return copy(*queue, end_of(to, n_bytes, true), end_of(from, n_bytes, true), n_bytes, __func__);
}

FAKE_CUDA_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t n_bytes,
                                            CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  return copy(*queue, end_of(to, n_bytes, true),
              end_of(reinterpret_cast<std::uintptr_t>(from), n_bytes, false), n_bytes, __func__);
}

FAKE_CUDA_API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t n_bytes,
                                            CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  return copy(*queue, end_of(reinterpret_cast<std::uintptr_t>(to), n_bytes, false),
              end_of(from, n_bytes, true), n_bytes, __func__);
}

FAKE_CUDA_API CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext,
                                         std::size_t n_bytes, CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  return copy(*queue, end_of(to, n_bytes, true), end_of(from, n_bytes, true), n_bytes, __func__);
}

// Synchronous: on the null stream, and done when they return.
FAKE_CUDA_API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, std::size_t n_bytes) {
  FAKE_CUDA_ENTER_STREAM(nullptr);
  const CUresult result =
      copy(*queue, end_of(to, n_bytes, false), end_of(from, n_bytes, false), n_bytes, __func__);
  queue->drain(__func__);
  return result;
}

FAKE_CUDA_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, std::size_t n_bytes) {
  return cuMemcpy(to, reinterpret_cast<std::uintptr_t>(from), n_bytes);
}

FAKE_CUDA_API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, std::size_t n_bytes) {
  return cuMemcpy(reinterpret_cast<std::uintptr_t>(to), from, n_bytes);
}

FAKE_CUDA_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t n, CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  std::byte* const at = memory().contents(to, n);
  if (at == nullptr) return kInvalidValue;
  queue->push({__func__, nullptr, [=] { std::memset(at, value, n); }});
  return kSuccess;
}

FAKE_CUDA_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, std::size_t n, CUstream stream) {
  FAKE_CUDA_ENTER_STREAM(stream);
  std::byte* const at = memory().contents(to, n * sizeof value);
  if (at == nullptr || to % sizeof value != 0) return kInvalidValue;
  queue->push({__func__, nullptr, [=] {
                 for (std::size_t i = 0; i < n; ++i) std::memcpy(at + i * sizeof value, &value, sizeof value);
               }});
  return kSuccess;
}
