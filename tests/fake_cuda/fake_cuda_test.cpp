// The fake driver as engines see it: through engines/cuda/driver.h. What is tested is what tests of engines rely on.
#include "tests/fake_cuda/fake_cuda.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "engines/cuda/driver.h"
#include "lockstep/base/fork_testing.h"

namespace lockstep::cuda {
namespace {

// A host function that holds its stream until it is opened.
struct Gate {
  std::atomic<bool> entered{false}, open{false};
  static void hold(void* self) {
    auto* const gate = static_cast<Gate*>(self);
    gate->entered = true;
    while (!gate->open) std::this_thread::yield();
  }
};

class FakeCuda : public ::testing::Test {
 protected:
  // In the test, not before: tests that fork need a parent without CUDA.
  void use(int device = 0) {
    std::string why;
    cu = Driver::find(&why);
    ASSERT_NE(cu, nullptr) << why;
    ASSERT_EQ(cu->device_primary_ctx_retain(&context, device), kSuccess);
    ASSERT_EQ(cu->ctx_push_current(context), kSuccess);
  }
  ~FakeCuda() override {
    if (cu != nullptr) cu->ctx_pop_current(&context);
  }
  DevicePtr alloc(std::size_t n_bytes) {
    DevicePtr memory = 0;
    EXPECT_EQ(cu->mem_alloc(&memory, n_bytes), kSuccess);
    return memory;
  }
  Stream stream() {
    Stream made = nullptr;
    EXPECT_EQ(cu->stream_create_with_priority(&made, kStreamNonBlocking, 0), kSuccess);
    return made;
  }
  DevicePtr of(const void* host) { return reinterpret_cast<DevicePtr>(host); }

  const Driver* cu = nullptr;
  Context context = nullptr;
};

// Before any test that starts the driver in this process: a forked driver is refused.
TEST_F(FakeCuda, ProcessesShareMemoryByHandleAndKeepItWhenItsOwnerIsKilled) {
  struct Shared {
    IpcMemHandle handle;
    std::atomic<int> step;
  };
  const fork_testing::Shared<Shared> shared;
  const auto await = [&](int step) {
    CHILD_EXPECT(fork_testing::eventually([&] { return shared->step == step; }), step);
  };
  const pid_t owner = ::fork();
  if (owner == 0) {
    use();
    const DevicePtr memory = alloc(10'000);
    cu->memset_d32_async(memory, 7, 2500, nullptr);
    cu->stream_synchronize(nullptr);
    CHILD_EXPECT(cu->ipc_get_mem_handle(&shared->handle, memory + 100) == kSuccess, "export");
    DevicePtr own = 0;
    CHILD_EXPECT(cu->ipc_open_mem_handle(&own, shared->handle, 1) == kInvalidContext, "the own process");
    const pid_t forked = ::fork();
    if (forked == 0) ::_exit(cu->init(0));
    CHILD_EXPECT(fork_testing::status_of(forked) == kNotInitialized << 8, "a forked driver");
    shared->step = 1;
    for (;;) ::pause();
  }
  const pid_t reader = ::fork();
  if (reader == 0) {
    await(1);
    use();
    DevicePtr opened = 0, again = 0;
    CHILD_EXPECT(cu->ipc_open_mem_handle(&opened, shared->handle, 1) == kSuccess, "open");
    CHILD_EXPECT(cu->ipc_open_mem_handle(&again, shared->handle, 1) == kSuccess && again == opened,
                 "open again");
    shared->step = 2;
    await(3);
    std::vector<std::uint32_t> copy(2500);
    CHILD_EXPECT(cu->memcpy(of(copy.data()), opened, 10'000) == kSuccess, "copy");
    CHILD_EXPECT(std::accumulate(copy.begin(), copy.end(), 0u) == 2500 * 7, "contents");
    CHILD_EXPECT(cu->ipc_close_mem_handle(opened) == kSuccess, "close");
    CHILD_EXPECT(cu->ipc_close_mem_handle(opened) == kSuccess, "close again");
    CHILD_EXPECT(cu->ipc_close_mem_handle(opened) == kInvalidValue, "closed already");
    CHILD_EXPECT(cu->ipc_open_mem_handle(&opened, shared->handle, 1) == kInvalidValue, "the owner is gone");
    ::_exit(0);
  }
  EXPECT_TRUE(fork_testing::eventually([&] { return shared->step == 2; }));
  ::kill(owner, SIGKILL);
  EXPECT_EQ(fork_testing::status_of(owner), SIGKILL);
  shared->step = 3;
  EXPECT_EQ(fork_testing::status_of(reader), 0);
}

TEST_F(FakeCuda, TheHostCannotTouchDeviceMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        use();
        *reinterpret_cast<volatile char*>(alloc(100)) = 1;
        ::_exit(0);
      },
      [](int status) { return status != 0; }, "");
}

TEST_F(FakeCuda, AddressesAreKnownByTheirAllocation) {
  use(1);
  const DevicePtr memory = alloc(5000);
  DevicePtr base = 0;
  std::size_t n_bytes = 0;
  EXPECT_EQ(cu->mem_get_address_range(&base, &n_bytes, memory + 4999), kSuccess);
  EXPECT_EQ(base, memory);
  EXPECT_EQ(n_bytes, 5000u);
  EXPECT_EQ(cu->mem_get_address_range(&base, &n_bytes, memory + 5000), kNotFound);
  std::uint64_t id = 0, next_id = 0;
  int device = -1;
  unsigned type = 0;
  EXPECT_EQ(cu->pointer_get_attribute(&id, kPointerBufferId, memory + 1), kSuccess);
  EXPECT_EQ(cu->pointer_get_attribute(&device, kPointerDeviceOrdinal, memory), kSuccess);
  EXPECT_EQ(cu->pointer_get_attribute(&type, kPointerMemoryType, memory), kSuccess);
  EXPECT_EQ(device, 1);
  EXPECT_EQ(type, kMemoryDevice);
  EXPECT_EQ(cu->pointer_get_attribute(&type, kPointerMemoryType, of(&type)), kInvalidValue);
  EXPECT_EQ(cu->mem_free(memory), kSuccess);
  EXPECT_EQ(cu->mem_free(memory), kInvalidValue);
  const DevicePtr next = alloc(5000);
  EXPECT_EQ(cu->pointer_get_attribute(&next_id, kPointerBufferId, next), kSuccess);
  EXPECT_NE(id, next_id);
  fake_cuda_make_unexportable(reinterpret_cast<void*>(next));
  IpcMemHandle handle;
  EXPECT_EQ(cu->ipc_get_mem_handle(&handle, next), kInvalidValue);
  cu->mem_free(next);
}

TEST_F(FakeCuda, StreamsRunInOrderAndBesideEachOther) {
  use();
  const Stream first = stream(), second = stream();
  const DevicePtr memory = alloc(64);
  Gate gate;
  ASSERT_EQ(cu->launch_host_func(first, Gate::hold, &gate), kSuccess);
  ASSERT_EQ(cu->memset_d8_async(memory, 1, 64, first), kSuccess);
  EXPECT_EQ(cu->stream_query(first), kNotReady);
  ASSERT_EQ(cu->memset_d8_async(memory, 2, 64, second), kSuccess);
  ASSERT_EQ(cu->stream_synchronize(second), kSuccess);
  unsigned char* const contents =
      static_cast<unsigned char*>(fake_cuda_host(reinterpret_cast<void*>(memory)));
  EXPECT_EQ(contents[63], 2);
  Event event = nullptr;
  ASSERT_EQ(cu->event_create(&event, kEventDisableTiming), kSuccess);
  ASSERT_EQ(cu->event_record(event, first), kSuccess);
  ASSERT_EQ(cu->stream_wait_event(second, event, 0), kSuccess);
  EXPECT_EQ(cu->event_query(event), kNotReady);
  EXPECT_EQ(cu->stream_query(second), kNotReady);
  gate.open = true;
  ASSERT_EQ(cu->stream_synchronize(second), kSuccess);
  EXPECT_EQ(contents[63], 1);
  EXPECT_EQ(cu->event_query(event), kSuccess);
  cu->event_destroy(event);
  EXPECT_EQ(cu->stream_destroy(first), kSuccess);
  EXPECT_EQ(cu->stream_destroy(first), kInvalidHandle);
  cu->stream_destroy(second);
  cu->mem_free(memory);
}

TEST_F(FakeCuda, AStreamWaitsForAValueInDeviceOrRegisteredMemory) {
  use();
  void* const page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_EQ(cu->stream_wait_value64(nullptr, of(page), 1, kWaitValueGeq), kInvalidValue) << "not registered";
  ASSERT_EQ(cu->mem_host_register(page, 4096, kHostRegisterPortable | kHostRegisterDeviceMap), kSuccess);
  DevicePtr seen = 0;
  ASSERT_EQ(cu->mem_host_get_device_pointer(&seen, page, 0), kSuccess);
  const Stream waits = stream();
  auto* const word = static_cast<std::uint64_t*>(page);
  StreamMemOp ops[2] = {};
  ops[0] = {.operation = kMemOpWaitValue64, .address = seen, .value = 5, .flags = kWaitValueEq};
  ops[1] = {.operation = kMemOpWriteValue64, .address = seen + 8, .value = 6, .flags = kWriteValueDefault};
  ASSERT_EQ(cu->stream_batch_mem_op(waits, 2, ops, 0), kSuccess);
  __atomic_store_n(word, 4, __ATOMIC_RELEASE);
  EXPECT_EQ(cu->stream_query(waits), kNotReady);
  __atomic_store_n(word, 5, __ATOMIC_RELEASE);
  ASSERT_EQ(cu->stream_synchronize(waits), kSuccess);
  EXPECT_EQ(__atomic_load_n(word + 1, __ATOMIC_ACQUIRE), 6u);
  EXPECT_EQ(cu->mem_host_unregister(page), kSuccess);
  cu->stream_destroy(waits);
  ::munmap(page, 4096);
}

void add(const fake_cuda_launch* launch) {
  auto* const data = fake_cuda_data(*static_cast<int**>(launch->params[0]));
  for (unsigned i = 0; i < launch->grid[0] * launch->block[0]; ++i)
    data[i] += *static_cast<int*>(launch->params[1]);
}

TEST_F(FakeCuda, AKernelRunsOnItsStreamWithTheArgumentsOfTheLaunch) {
  use();
  const std::size_t sizes[] = {sizeof(int*), sizeof(int)};
  fake_cuda_register_kernel("add", add, sizes, 2);
  Module module = nullptr;
  Function function = nullptr;
  ASSERT_EQ(cu->module_load_data(&module, "// PTX"), kSuccess);
  EXPECT_EQ(cu->module_get_function(&function, module, "subtract"), kNotFound);
  ASSERT_EQ(cu->module_get_function(&function, module, "add"), kSuccess);
  const DevicePtr memory = alloc(64 * 4);
  cu->memset_d32_async(memory, 1, 64, nullptr);
  DevicePtr pointer = memory;
  int amount = 41;
  void* params[] = {&pointer, &amount};
  ASSERT_EQ(cu->launch_kernel(function, 2, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr), kSuccess);
  pointer = 0, amount = 0;  // taken at the launch
  int got[64] = {};
  ASSERT_EQ(cu->memcpy(of(got), memory, sizeof got), kSuccess);
  EXPECT_EQ(got[0], 42);
  EXPECT_EQ(got[63], 42);
  EXPECT_EQ(cu->launch_kernel(function, 0, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr), kInvalidValue);
  cu->mem_free(memory);
  cu->module_unload(module);
}

TEST_F(FakeCuda, ACapturedStreamIsReplayed) {
  use();
  const Stream captured = stream();
  const DevicePtr memory = alloc(16);
  cu->memset_d8_async(memory, 0, 16, nullptr);
  cu->stream_synchronize(nullptr);
  ASSERT_EQ(cu->stream_begin_capture(captured, kCaptureThreadLocal), kSuccess);
  CaptureStatus status = kCaptureNone;
  cu->stream_is_capturing(captured, &status);
  EXPECT_EQ(status, kCaptureActive);
  cu->memset_d8_async(memory, 3, 16, captured);
  EXPECT_EQ(cu->stream_synchronize(captured), kStreamCaptureUnsupported);
  Graph graph = nullptr;
  GraphExec exec = nullptr;
  ASSERT_EQ(cu->stream_end_capture(captured, &graph), kSuccess);
  ASSERT_EQ(cu->graph_instantiate(&exec, graph, 0), kSuccess);
  const char* const contents = static_cast<char*>(fake_cuda_host(reinterpret_cast<void*>(memory)));
  EXPECT_EQ(contents[0], 0);
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(cu->graph_launch(exec, captured), kSuccess);
    ASSERT_EQ(cu->stream_synchronize(captured), kSuccess);
    EXPECT_EQ(contents[15], 3);
  }
  cu->graph_exec_destroy(exec);
  cu->graph_destroy(graph);
  cu->stream_destroy(captured);
  cu->mem_free(memory);
}

TEST_F(FakeCuda, CallsFailWhenTheyAreToldTo) {
  use();
  fake_cuda_fail("cuMemAlloc_v2", 2, kOutOfMemory);
  const std::uint64_t before = fake_cuda_calls("cuMemAlloc_v2");
  DevicePtr memory = 0, other = 0;
  EXPECT_EQ(cu->mem_alloc(&memory, 8), kSuccess);
  EXPECT_EQ(cu->mem_alloc(&other, 8), kOutOfMemory);
  EXPECT_EQ(cu->mem_alloc(&other, 8), kSuccess);
  EXPECT_EQ(fake_cuda_calls("cuMemAlloc_v2"), before + 3);
  cu->mem_free(memory);
  cu->mem_free(other);
}

TEST_F(FakeCuda, ABrokenDeviceDropsItsWorkAndEveryCallSaysSo) {
  use();
  const Stream stuck = stream();
  const DevicePtr memory = alloc(8);
  cu->memset_d8_async(memory, 0, 8, nullptr);
  cu->stream_synchronize(nullptr);
  ASSERT_EQ(cu->stream_wait_value64(stuck, memory, 1, kWaitValueEq), kSuccess);
  std::thread waiter([&] { EXPECT_EQ(cu->stream_synchronize(stuck), kIllegalAddress); });
  fake_cuda_break_device(0, kIllegalAddress);
  waiter.join();
  DevicePtr more = 0;
  EXPECT_EQ(cu->mem_alloc(&more, 8), kIllegalAddress);
  EXPECT_EQ(cu->stream_query(stuck), kIllegalAddress);
  fake_cuda_break_device(0, kSuccess);
  EXPECT_EQ(cu->stream_synchronize(stuck), kSuccess);
  cu->stream_destroy(stuck);
  cu->mem_free(memory);
}

TEST_F(FakeCuda, HostFunctionsMayNotCallTheDriver) {
  use();
  struct Call {
    const Driver* driver;
    Result result = kSuccess;
    static void make(void* self) {
      auto* const call = static_cast<Call*>(self);
      int n = 0;
      call->result = call->driver->device_get_count(&n);
    }
  } call{.driver = cu};
  ASSERT_EQ(cu->launch_host_func(nullptr, Call::make, &call), kSuccess);
  ASSERT_EQ(cu->stream_synchronize(nullptr), kSuccess);
  EXPECT_EQ(call.result, kNotPermitted);
}

// What hangs on a real device hangs here: memory is freed when the streams that might use it are idle.
TEST_F(FakeCuda, FreeingWaitsForTheStreamsOfTheDevice) {
  use();
  const Stream busy = stream();
  const DevicePtr memory = alloc(8);
  Gate gate;
  cu->launch_host_func(busy, Gate::hold, &gate);
  std::atomic<bool> freed{false};
  std::thread freeing([&] {
    cu->ctx_push_current(context);
    EXPECT_EQ(cu->mem_free(memory), kSuccess);
    freed = true;
  });
  while (!gate.entered) std::this_thread::yield();
  EXPECT_FALSE(freed);
  gate.open = true;
  freeing.join();
  cu->stream_destroy(busy);
}

}  // namespace
}  // namespace lockstep::cuda
