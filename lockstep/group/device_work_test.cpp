// Operations on device memory without a device: libtorch gets a guard of the test's own for CUDA, whose streams are
// numbers and whose memory is the host's, and the group an engine that records what it is asked.
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <bit>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/collective/collective.h"
#include "lockstep/group/backends.h"
#include "lockstep/group/world.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/tensor/detail/device_stream.h"

struct lockstep_comm {};
struct lockstep_handle {
  lockstep_op op{};
};

namespace lockstep {
namespace {

// Two devices; stream 0 is the default one of each.
class HostGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return std::exchange(now(), device); }
  c10::Device getDevice() const override { return now(); }
  void setDevice(c10::Device device) const override { now() = device; }
  void uncheckedSetDevice(c10::Device device) const noexcept override { now() = device; }
  c10::Stream getStream(c10::Device device) const override { return stream(device, ids()[device.index()]); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    return stream(other.device(), std::exchange(ids()[other.device_index()], other.id()));
  }
  void* getStreamNativeHandle(const c10::Stream s) const override {
    return std::bit_cast<void*>(0x1000 + 0x100 * static_cast<std::intptr_t>(s.device_index()) + s.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }

 private:
  static c10::Device& now() {
    thread_local c10::Device device(c10::kCUDA, 0);
    return device;
  }
  static std::vector<c10::StreamId>& ids() {
    thread_local std::vector<c10::StreamId> current(2, 0);
    return current;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, HostGuard);

// What the engine answers, and what it saw. One test at a time.
struct Script {
  lockstep_status test = LOCKSTEP_PENDING, wait = LOCKSTEP_OK, stream_wait = LOCKSTEP_OK;
  std::vector<std::string> calls;
  std::vector<lockstep_op> posted;
};
Script script;
struct Joined {
  lockstep_device_kind kind = LOCKSTEP_HOST_MEMORY;
  int device = -1;
  std::string options;
} joined;
lockstep_comm the_comm;

std::string named(const char* what, const void* stream) {
  char text[64];
  std::snprintf(text, sizeof text, "%s %p", what, stream);
  return text;
}

lockstep_engine device_table() {
  lockstep_engine table{};
  table.struct_size = sizeof table;
  table.abi_version = LOCKSTEP_ENGINE_ABI_VERSION;
  table.name = "recording";
  table.capabilities = [](lockstep_capabilities* out) {
    out->op_kinds = (1u << LOCKSTEP_OP_KINDS) - 1;
    out->dtypes = (1u << LOCKSTEP_DTYPES) - 1;
    for (auto& mask : out->reduce) mask = (1u << LOCKSTEP_REDUCE_OPS) - 1;
    out->device_kinds = 1u << LOCKSTEP_CUDA;
    return LOCKSTEP_OK;
  };
  table.comm_create = [](const lockstep_comm_config* config, lockstep_comm** out, char*, size_t) {
    joined = {config->device_kind, config->device, config->options == nullptr ? "" : config->options};
    *out = &the_comm;
    return LOCKSTEP_OK;
  };
  table.comm_destroy = [](lockstep_comm*, const char*) {};
  table.comm_abort = [](lockstep_comm*, const char*) { script.test = script.wait = LOCKSTEP_ABORTED; };
  table.comm_failure = [](lockstep_comm*, char* error, size_t capacity, int32_t* rank, int64_t* pid,
                          char* cause, size_t cause_capacity) {
    std::snprintf(error, capacity, "rank 1 is gone");
    std::snprintf(cause, cause_capacity, "killed");
    *rank = 1;
    *pid = 7;
    return LOCKSTEP_PEER_LOST;
  };
  table.post = [](lockstep_comm*, const lockstep_op* op, lockstep_handle** out) {
    script.posted.push_back(*op);
    script.calls.push_back(named("post", op->stream));
    *out = new lockstep_handle{*op};
    return LOCKSTEP_OK;
  };
  table.test = [](lockstep_handle*) { return script.test; };
  table.wait = [](lockstep_handle*, int64_t) {
    script.calls.emplace_back("wait");
    return script.wait;
  };
  table.release = [](lockstep_handle* handle) { delete handle; };
  table.last_error = [](lockstep_handle*, char* error, size_t capacity) {
    std::snprintf(error, capacity, "the engine's words");
  };
  table.stream_wait = [](lockstep_handle*, void* stream) {
    script.calls.push_back(named("order", stream));
    return script.stream_wait;
  };
  return table;
}

using Calls = std::vector<std::string>;

class DeviceWork : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    static const lockstep_engine table = device_table();
    register_backend(&table, {.devices = {"cuda"}});
    init_process_group(
        {.backend = "cuda:recording", .device_id = at::Device(c10::kCUDA, 1), .pg_options = "speed=9"});
  }
  static void TearDownTestSuite() {
    script.test = script.wait = LOCKSTEP_OK;
    destroy_process_group();
  }
  void SetUp() override { script = Script{}; }
  void TearDown() override { script.test = script.wait = LOCKSTEP_OK; }

  at::Tensor tensor(int device = 0) {
    return internal::borrow(memory_, 4, at::kFloat, {c10::kCUDA, static_cast<c10::DeviceIndex>(device)});
  }
  float memory_[4] = {1, 2, 3, 4};
};

TEST_F(DeviceWork, TheEngineKnowsTheBoundDeviceAndItsOptions) {
  EXPECT_EQ(joined.kind, LOCKSTEP_CUDA);
  EXPECT_EQ(joined.device, 1);
  EXPECT_EQ(joined.options, "speed=9");
}

TEST_F(DeviceWork, ADeviceThatDoesNotExistIsRefused) {
  for (const at::Device device : {at::Device(c10::kCUDA, 7), at::Device(c10::kCUDA)}) {
    try {
      create_group(
          {.store = std::make_shared<HashStore>(), .rank = 0, .size = 1, .name = "g", .device_id = device});
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string(error.what()).find("2 cuda devices"), std::string::npos) << error.what();
    }
  }
}

TEST_F(DeviceWork, AnOperationNamesItsDeviceAndTheCurrentStream) {
  const c10::StreamGuard guard(HostGuard::stream({c10::kCUDA, 1}, 3));
  auto work = all_reduce(tensor(1), {.async_op = true});
  ASSERT_EQ(script.posted.size(), 1u);
  EXPECT_EQ(script.posted[0].device_kind, LOCKSTEP_CUDA);
  EXPECT_EQ(script.posted[0].device, 1);
  EXPECT_EQ(script.posted[0].stream, std::bit_cast<void*>(std::intptr_t{0x1103}));
  EXPECT_EQ(script.posted[0].send, static_cast<void*>(memory_));
  EXPECT_FALSE(work.done());
  script.test = LOCKSTEP_OK;
  EXPECT_TRUE(work.done());
}

TEST_F(DeviceWork, WaitOrdersTheStreamAndDoesNotBlock) {
  auto work = all_reduce(tensor(), {.async_op = true});
  const c10::StreamGuard guard(HostGuard::stream({c10::kCUDA, 0}, 5));
  EXPECT_THROW(work.result(), Error) << "neither completed nor waited for";
  work.wait();
  EXPECT_EQ(script.calls, (Calls{"post 0x1000", "order 0x1005"}));
  EXPECT_FALSE(work.done()) << "it is still running on the device";
  EXPECT_EQ(work.result().size(), 1u) << "and may be used in that stream";
  EXPECT_EQ(work.error(), nullptr);
}

TEST_F(DeviceWork, AWaitWithATimeoutBlocksUntilTheOperationHasCompleted) {
  auto work = all_reduce(tensor(), {.async_op = true});
  work.wait(Milliseconds(1000));
  EXPECT_EQ(script.calls, (Calls{"post 0x1000", "wait"}));
  EXPECT_TRUE(work.done());
}

TEST_F(DeviceWork, ABlockingCallOrdersItsOwnStream) {
  const c10::StreamGuard guard(HostGuard::stream({c10::kCUDA, 0}, 9));
  all_reduce(tensor());
  EXPECT_EQ(script.calls, (Calls{"post 0x1009", "order 0x1009"}));
}

TEST_F(DeviceWork, AFailureThatIsKnownWhenItIsWaitedForIsRaisedOnceNamed) {
  auto work = all_reduce(tensor(), {.async_op = true});
  script.stream_wait = script.test = LOCKSTEP_PEER_LOST;
  for (int i = 0; i < 2; ++i) {
    try {
      work.wait();
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
      const std::string text = error.what();
      EXPECT_NE(text.find("the engine's words"), std::string::npos) << text;
      EXPECT_EQ(text.find("all_reduce #"), text.rfind("all_reduce #")) << "described once: " << text;
    }
  }
}

TEST_F(DeviceWork, AFailureThatComesAfterTheWaitIsFoundByLookingAgain) {
  auto work = all_reduce(tensor(), {.async_op = true});
  work.wait();
  script.test = LOCKSTEP_PEER_LOST;
  EXPECT_TRUE(work.done());
  EXPECT_FALSE(work.is_success());
  EXPECT_NE(work.error(), nullptr);
}

TEST_F(DeviceWork, TensorsLiveUntilTheOperationHasCompleted) {
  bool freed = false;
  {
    auto held = at::for_blob(memory_, {4})
                    .deleter([&](void*) { freed = true; })
                    .options(at::TensorOptions().device(c10::kCUDA, 0))
                    .target_device(c10::Device(c10::kCUDA, 0))
                    .make_tensor();
    all_reduce(held, {.async_op = true}).wait();
  }
  EXPECT_FALSE(freed) << "the stream waits, the device may still read it";
  script.test = LOCKSTEP_OK;
  all_reduce(tensor());  // the next operation releases what has completed
  EXPECT_TRUE(freed);
}

TEST_F(DeviceWork, TensorsOfTwoDevicesAreRefused) {
  try {
    float other[4] = {};
    auto output = internal::borrow(other, 4, at::kFloat, {c10::kCUDA, 1});
    all_gather_single(output, tensor(0));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(error.what()).find("cuda:0"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("cuda:1"), std::string::npos);
  }
}

TEST_F(DeviceWork, AReceiveKnowsTheSenderItNamed) {
  auto work = irecv(tensor(), {.src = 0});
  work.wait();
  EXPECT_EQ(work.source_rank(), 0);
}

}  // namespace
}  // namespace lockstep
