// A device as the engine uses it, once per process: the kernels, one stream for all that the engine submits, the segments
// that were exported and opened, and the engine's own memory.
//
// One stream suffices for all communicators: only work that can run is submitted to it, so nothing in it ever waits for
// another rank. And it is made before any stream waits: creating one may block until a waiting stream goes on.
// Thread safety: every method may be called from any thread.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engines/cuda/resources.h"
#include "engines/cuda_ipc/kernels.h"
#include "engines/cuda_ipc/layout.h"
#include "lockstep/base/detail/mutex.h"

namespace lockstep::cuda_ipc {

// One launch: a reduction or a copy. Pointers are those of the launching process.
struct Launch {
  int kernel = kCopyKernel;  // index of kKernelNames
  unsigned rows = 1;         // of the grid
  std::uint64_t row_bytes = 0;
  ReduceTask reduce{};
  CopyTask copy{};
};

class DeviceState {
 public:
  // Loads the kernels with the first call for a device. Lives for ever. Raises kUnsupported without a driver or without
  // kernels, kUsage for a device that is not there; cuda::Error.
  static DeviceState& of(int device);

  const cuda::PrimaryContext& context() const { return context_; }
  const cuda::Driver& driver() const { return context_.driver(); }
  cuda::Stream stream() const { return stream_.get(); }

  // Pre of what follows: the context is current.

  void launch(const Launch& launch);

  // Describes device memory of this process. With `exports` for other processes: false when it cannot be exported, and
  // must be staged. Raises kUsage when it is not memory of this device.
  bool describe(const void* memory, bool exports, MemoryRef& out);
  // Lets kernels of this device access the memory of another device of this process. Raises kUnsupported.
  void reach(int device);
  // Where memory of another process is in this one: opened once per segment. `n_bytes` are checked against the segment.
  void* open(std::int64_t owner, const MemoryRef& ref, std::uint64_t n_bytes);

  // Memory of the engine's own, which can be exported; kept for the next caller when it is freed. Raises kResource.
  void* allocate(std::size_t n_bytes);
  // False: it is not of this device.
  bool free(void* memory);
  static void free_anywhere(void* memory);

 private:
  struct States;
  static States& states();
  explicit DeviceState(const cuda::PrimaryContext& context);
  void load_kernels();

  struct Exported {
    std::uint64_t n_bytes, buffer_id;
    bool tried = false, exported = false;
    cuda::IpcMemHandle handle{};
  };
  struct Opened {
    std::int64_t owner;
    std::uint64_t buffer_id;
    cuda::IpcMemHandle handle;
    cuda::OpenedIpcMemory memory;
  };
  // Throws away what was found out about a base whose memory was freed.
  Exported& look_up(cuda::DevicePtr memory, cuda::DevicePtr& base) LOCKSTEP_REQUIRES(mutex_);

  const cuda::PrimaryContext& context_;
  cuda::OwnedStream stream_;
  cuda::Function kernels_[kKernels]{};

  base::Mutex mutex_;
  std::map<cuda::DevicePtr, Exported> exported_ LOCKSTEP_GUARDED_BY(mutex_);  // by base
  std::vector<int> reached_ LOCKSTEP_GUARDED_BY(mutex_);                      // devices
  std::list<Opened> opened_ LOCKSTEP_GUARDED_BY(mutex_);                      // the latest used first
  std::map<void*, std::size_t> taken_ LOCKSTEP_GUARDED_BY(mutex_);
  std::multimap<std::size_t, void*> idle_ LOCKSTEP_GUARDED_BY(mutex_);
  std::pair<char*, std::size_t> chunk_ LOCKSTEP_GUARDED_BY(mutex_){};  // what is left of the last one
};

// Segments of other processes that a process keeps open. Beyond it the one that was not used for longest is closed, which
// waits until the device is idle.
inline constexpr std::size_t kMaxOpened = 256;

}  // namespace lockstep::cuda_ipc
