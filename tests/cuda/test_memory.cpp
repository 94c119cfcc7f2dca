#include "tests/cuda/test_memory.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "engines/cuda/resources.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/engine/test_world.h"

namespace lockstep::cuda {
namespace {

DevicePtr address(const void* pointer) {
  return reinterpret_cast<DevicePtr>(pointer);
}

// Blocks that were freed, by device and size, for the whole process. Never returned to the driver, which would wait
// for every stream of the device.
class Pool {
 public:
  static Pool& get() {
    static Pool* const pool = new Pool;
    return *pool;
  }
  void* take(const PrimaryContext& context, std::size_t n_bytes) {
    const std::size_t rounded = std::bit_ceil(std::max<std::size_t>(n_bytes, 512));
    {
      const std::lock_guard lock(mutex_);
      auto& free = free_[{context.device(), rounded}];
      if (!free.empty()) {
        void* const memory = free.back();
        free.pop_back();
        return memory;
      }
    }
    const ContextScope scope(context);
    DevicePtr memory = 0;
    check(context.driver(), context.driver().mem_alloc(&memory, rounded), "cuMemAlloc");
    return reinterpret_cast<void*>(memory);
  }
  void give(const PrimaryContext& context, void* memory, std::size_t n_bytes) {
    const std::lock_guard lock(mutex_);
    free_[{context.device(), std::bit_ceil(std::max<std::size_t>(n_bytes, 512))}].push_back(memory);
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, std::size_t>, std::vector<void*>> free_;
};

class CudaTestMemory final : public comm::testing::TestMemory {
 public:
  CudaTestMemory(const Driver& driver, int device)
      : driver_(driver),
        context_(PrimaryContext::of(driver, device)),
        stream_(create_stream(context_, Priority::kLeast)),
        copies_(create_stream(context_, Priority::kLeast)) {}

  lockstep_device_kind device_kind() const override { return LOCKSTEP_CUDA; }
  int device() const override { return context_.device(); }
  void* stream() override { return stream_.get(); }

  void* allocate(std::size_t n_bytes) override { return Pool::get().take(context_, n_bytes); }
  void free(void* memory, std::size_t n_bytes) noexcept override {
    Pool::get().give(context_, memory, n_bytes);
  }
  void copy_in(void* to, const void* from, std::size_t n_bytes) override { copy_now(to, from, n_bytes); }
  void copy_out(void* to, const void* from, std::size_t n_bytes) override { copy_now(to, from, n_bytes); }

  void* new_stream() override {
    const std::lock_guard lock(mutex_);
    streams_.push_back(create_stream(context_, Priority::kLeast));
    return streams_.back().get();
  }
  void enqueue_copy(void* to, const void* from, std::size_t n_bytes, void* stream) override {
    const ContextScope scope(context_);
    check(driver_, driver_.memcpy_async(address(to), address(from), n_bytes, static_cast<Stream>(stream)),
          "cuMemcpyAsync");
  }
  void enqueue_call(void (*function)(void*), void* context, void* stream) override {
    const ContextScope scope(context_);
    check(driver_, driver_.launch_host_func(static_cast<Stream>(stream), function, context),
          "cuLaunchHostFunc");
  }
  void synchronize(void* stream) override {
    const Deadline patience = Deadline::after(comm::testing::kPatience);
    while (!idle(stream)) {
      if (patience.expired()) base::raise(ErrorKind::kTimeout, "the stream did not become idle");
      std::this_thread::yield();
    }
  }
  bool idle(void* stream) override {
    const ContextScope scope(context_);
    const Result result = driver_.stream_query(static_cast<Stream>(stream));
    if (result != kNotReady) check(driver_, result, "cuStreamQuery");
    return result == kSuccess;
  }

 private:
  void copy_now(void* to, const void* from, std::size_t n_bytes) {
    if (n_bytes == 0) return;
    enqueue_copy(to, from, n_bytes, copies_.get());
    synchronize(copies_.get());
  }

  const Driver& driver_;
  const PrimaryContext& context_;
  const OwnedStream stream_, copies_;
  std::mutex mutex_;
  std::vector<OwnedStream> streams_;
};

}  // namespace

std::unique_ptr<comm::testing::TestMemory> test_memory(int rank, int) {
  std::string why;
  const Driver* const driver = Driver::find(&why);
  if (driver == nullptr) base::raise(ErrorKind::kUnsupported, why);
  int n = 0;
  check(*driver, driver->device_get_count(&n), "cuDeviceGetCount");
  if (n == 0) base::raise(ErrorKind::kUnsupported, "no CUDA device on this machine");
  return std::make_unique<CudaTestMemory>(*driver, rank % n);
}

}  // namespace lockstep::cuda
