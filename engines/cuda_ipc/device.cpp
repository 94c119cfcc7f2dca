#include "engines/cuda_ipc/device.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "engines/cuda_ipc/image.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"

namespace lockstep::cuda_ipc {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{2} << 20;

// Small blocks are powers of two, cut from chunks; large ones whole chunks.
std::size_t rounded(std::size_t n_bytes) {
  if (n_bytes <= kChunkBytes / 2) return std::bit_ceil(std::max<std::size_t>(n_bytes, 512));
  return (n_bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
}

cuda::DevicePtr device_pointer(const void* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);
}
void* host_pointer(cuda::DevicePtr memory) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(memory));
}

}  // namespace

struct DeviceState::States {
  base::Mutex mutex;
  std::map<int, std::unique_ptr<DeviceState>> by_device LOCKSTEP_GUARDED_BY(mutex);
};

DeviceState::States& DeviceState::states() {
  static States* const all = new States;  // never destroyed: threads may use it during exit
  return *all;
}

DeviceState& DeviceState::of(int device) {
  std::string why;
  const cuda::Driver* const driver = cuda::Driver::find(&why);
  if (driver == nullptr) base::raise(ErrorKind::kUnsupported, why, ErrorFamily::kBackend);
  States& all = states();
  const base::MutexLock lock(all.mutex);
  std::unique_ptr<DeviceState>& entry = all.by_device[device];
  int n_devices = 0;
  if (entry == nullptr) cuda::check(*driver, driver->device_get_count(&n_devices), "cuDeviceGetCount");
  if (entry == nullptr && (device < 0 || device >= n_devices)) {
    all.by_device.erase(device);
    base::raise(ErrorKind::kUsage,
                base::cat("there is no CUDA device ", device, ": this process has ", n_devices),
                ErrorFamily::kBackend);
  }
  if (entry == nullptr) entry.reset(new DeviceState(cuda::PrimaryContext::of(*driver, device)));
  return *entry;
}

DeviceState::DeviceState(const cuda::PrimaryContext& context)
    : context_(context), stream_(cuda::create_stream(context, cuda::Priority::kGreatest)) {
  load_kernels();
}

// All of them now: a kernel that is loaded with its first launch waits until no stream waits.
void DeviceState::load_kernels() {
  const cuda::ContextScope scope(context_);
  const cuda::RelaxedCaptureScope relaxed(driver());
  cuda::Module module = nullptr;  // never unloaded
  cuda::check(driver(), driver().module_load_data(&module, kernel_image()), "cuModuleLoadData");
  for (int k = 0; k < kKernels; ++k) {
    cuda::check(driver(), driver().module_get_function(&kernels_[k], module, kKernelNames[k]),
                "cuModuleGetFunction");
    if (driver().func_load != nullptr) {
      cuda::check(driver(), driver().func_load(kernels_[k]), "cuFuncLoad");
    } else {
      launch({.kernel = k});  // of nothing
    }
  }
}

void DeviceState::launch(const Launch& launch) {
  // No more blocks than there are vectors. Many per multiprocessor: with 64 an all_reduce of 256 MiB by two ranks takes 295
  // us on an H200, with 4 it takes 325.
  const auto per_block = std::uint64_t{kBlockThreads} * kVectorBytes * kUnrolled;
  const auto useful = std::max<std::uint64_t>(1, (launch.row_bytes + per_block - 1) / per_block);
  const auto busy =
      std::max<std::uint64_t>(1, 64 * static_cast<std::uint64_t>(context_.multiprocessors()) / launch.rows);
  void* argument = launch.kernel == kCopyKernel ? static_cast<void*>(const_cast<CopyTask*>(&launch.copy))
                                                : static_cast<void*>(const_cast<ReduceTask*>(&launch.reduce));
  cuda::check(driver(),
              driver().launch_kernel(kernels_[launch.kernel], static_cast<unsigned>(std::min(useful, busy)),
                                     launch.rows, 1, kBlockThreads, 1, 1, 0, stream(), &argument, nullptr),
              "cuLaunchKernel");
}

// The base is found in the map; one attribute tells whether the memory there is still the same, which saves asking for its
// range and handle again.
DeviceState::Exported& DeviceState::look_up(cuda::DevicePtr memory, cuda::DevicePtr& base) {
  std::uint64_t buffer_id = 0;
  if (driver().pointer_get_attribute(&buffer_id, cuda::kPointerBufferId, memory) != cuda::kSuccess)
    base::raise(ErrorKind::kUsage,
                base::cat("a buffer of the operation is not memory of device ", context_.device()),
                ErrorFamily::kBackend);
  auto found = exported_.upper_bound(memory);
  if (found != exported_.begin() && (--found)->second.buffer_id == buffer_id &&
      memory - found->first < found->second.n_bytes) {
    base = found->first;
    return found->second;
  }
  std::size_t n_bytes = 0;
  cuda::check(driver(), driver().mem_get_address_range(&base, &n_bytes, memory), "cuMemGetAddressRange");
  // Whatever was known about this range is gone.
  auto stale = exported_.lower_bound(base);
  if (stale != exported_.begin() && std::prev(stale)->first + std::prev(stale)->second.n_bytes > base)
    --stale;
  while (stale != exported_.end() && stale->first < base + n_bytes) stale = exported_.erase(stale);
  return exported_[base] = Exported{.n_bytes = n_bytes, .buffer_id = buffer_id};
}

bool DeviceState::describe(const void* memory, bool exports, MemoryRef& out) {
  out = {.address = device_pointer(memory)};
  if (!exports) return true;
  const base::MutexLock lock(mutex_);
  cuda::DevicePtr base = 0;
  Exported& segment = look_up(out.address, base);
  if (!segment.tried) {
    // A refusal is no error: memory of a pool or of virtual-memory management has no such handle.
    const cuda::Result result = driver().ipc_get_mem_handle(&segment.handle, base);
    if (cuda::is_sticky(result)) cuda::check(driver(), result, "cuIpcGetMemHandle");
    segment.exported = result == cuda::kSuccess;
    segment.tried = true;
  }
  if (!segment.exported) return false;
  out.segment_bytes = segment.n_bytes;
  out.offset = out.address - base;
  out.buffer_id = segment.buffer_id;
  out.handle = segment.handle;
  return true;
}

void DeviceState::reach(int device) {
  if (device == context_.device()) return;
  const base::MutexLock lock(mutex_);
  if (std::ranges::find(reached_, device) != reached_.end()) return;
  const cuda::PrimaryContext& other = cuda::PrimaryContext::of(driver(), device);
  const cuda::Result result = driver().ctx_enable_peer_access(other.context(), 0);
  if (result != cuda::kSuccess && result != cuda::kPeerAccessAlreadyEnabled)
    base::raise(ErrorKind::kUnsupported,
                base::cat("CUDA device ", context_.device(), " cannot access the memory of device ", device,
                          ": ", cuda::describe(driver(), result)),
                ErrorFamily::kBackend);
  reached_.push_back(device);
}

// What a peer names is checked against the segment that it named. The least recently used of kMaxOpened is closed; a kernel
// that uses it keeps the driver from unmapping it before its end.
void* DeviceState::open(std::int64_t owner, const MemoryRef& ref, std::uint64_t n_bytes) {
  if (ref.buffer_id == 0 || ref.offset > ref.segment_bytes || n_bytes > ref.segment_bytes - ref.offset)
    base::raise(ErrorKind::kInternal, "a rank named memory outside its segment", ErrorFamily::kBackend);
  const base::MutexLock lock(mutex_);
  const auto found = std::ranges::find_if(opened_, [&](const Opened& one) {
    return one.owner == owner && one.buffer_id == ref.buffer_id &&
           std::memcmp(&one.handle, &ref.handle, sizeof ref.handle) == 0;
  });
  if (found != opened_.end()) {
    opened_.splice(opened_.begin(), opened_, found);
  } else {
    cuda::DevicePtr memory = 0;
    cuda::check(driver(), driver().ipc_open_mem_handle(&memory, ref.handle, cuda::kIpcLazyEnablePeerAccess),
                "cuIpcOpenMemHandle");
    opened_.push_front({owner, ref.buffer_id, ref.handle, {context_, memory}});
    if (opened_.size() > kMaxOpened) opened_.pop_back();
  }
  return host_pointer(opened_.front().memory.get() + ref.offset);
}

// Never given back to the driver: cuMemFree waits for the device, and peers may have the memory open.
void* DeviceState::allocate(std::size_t n_bytes) {
  const std::size_t size = rounded(n_bytes);
  const base::MutexLock lock(mutex_);
  void* memory = nullptr;
  if (const auto idle = idle_.find(size); idle != idle_.end()) {
    memory = idle->second;
    idle_.erase(idle);
  } else if (size < kChunkBytes && chunk_.second >= size) {
    memory = chunk_.first;
    chunk_ = {chunk_.first + size, chunk_.second - size};
  } else {
    cuda::DevicePtr fresh = 0;
    const std::size_t whole = std::max(size, kChunkBytes);
    const cuda::Result result = driver().mem_alloc(&fresh, whole);
    if (result == cuda::kOutOfMemory)
      base::raise(
          ErrorKind::kResource,
          base::cat("no ", whole, " bytes are left on CUDA device ", context_.device(), " for the engine"),
          ErrorFamily::kBackend);
    cuda::check(driver(), result, "cuMemAlloc");
    memory = host_pointer(fresh);
    if (size < kChunkBytes) chunk_ = {static_cast<char*>(memory) + size, kChunkBytes - size};
  }
  taken_[memory] = size;
  return memory;
}

bool DeviceState::free(void* memory) {
  const base::MutexLock lock(mutex_);
  const auto taken = taken_.find(memory);
  if (taken == taken_.end()) return false;
  idle_.emplace(taken->second, memory);
  taken_.erase(taken);
  return true;
}

void DeviceState::free_anywhere(void* memory) {
  States& all = states();
  const base::MutexLock lock(all.mutex);
  for (const auto& [device, state] : all.by_device) {
    if (state != nullptr && state->free(memory)) return;
  }
}

}  // namespace lockstep::cuda_ipc
