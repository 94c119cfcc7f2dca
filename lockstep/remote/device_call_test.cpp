// Calls with tensors of GPUs, on GPUs that are not there: where tensors go, what is refused before anything is sent, and which
// stream waits for which.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/remote/fake_gpu_testing.h"
#include "lockstep/remote/operator.h"
#include "lockstep/remote/remote_testing.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/tensor/detail/device_stream.h"

namespace lockstep::rpc {
namespace {

using fake_gpu::gpu;
using testing::caught;
using testing::says;

at::Tensor on_gpu(int index, double value = 1, at::IntArrayRef sizes = {4}) {
  return at::full(sizes, value).to(gpu(index));
}
void expect_values(const at::Tensor& tensor, double value) {
  EXPECT_TRUE(at::allclose(fake_gpu::on_host(tensor), at::full(tensor.sizes(), value)));
}

// Worker 0 calls; its cuda:0 is cuda:1 of worker 1.
void as_two(const std::function<void()>& fn, DeviceMaps maps = {{"worker1", {{0, 1}}}}) {
  auto options = testing::with_remote();
  options.device_maps[0] = std::move(maps);
  testing::run_workers(
      2,
      [&](int rank, testing::Workers&) {
        if (rank == 0) fn();
      },
      options);
}

// What a function sees of its argument, and the argument again.
struct Seen {
  int device = -1;
  std::int64_t stream = -1;  // current for the device
  at::Tensor back;
};
auto lockstep_fields(SelfOf<Seen> auto& self) {
  return std::tie(self.device, self.stream, self.back);
}

std::atomic<int> n_runs{0};

Seen look(const at::Tensor& x) {
  ++n_runs;
  if (x.is_cpu()) return {.back = x};
  return {
      .device = x.device().index(), .stream = lockstep::internal::current_stream(x.device()).id(), .back = x};
}
LOCKSTEP_RPC_FUNCTION(look);

std::int64_t current_stream_of(int index) {
  return lockstep::internal::current_stream(gpu(index)).id();
}
LOCKSTEP_RPC_FUNCTION(current_stream_of);

at::Tensor made_on(int index) {
  return on_gpu(index, 7);
}
LOCKSTEP_RPC_FUNCTION(made_on);

using Nest = std::map<std::string, std::vector<std::optional<at::Tensor>>>;
Nest pass_nest(const Nest& nest) {
  for (const auto& tensor : nest.at("x")) {
    if (tensor && tensor->defined() && tensor->device() != gpu(1))
      throw std::runtime_error("it is on " + tensor->device().str());
  }
  return nest;
}
LOCKSTEP_RPC_FUNCTION(pass_nest);

at::Tensor same(const at::Tensor& x) {
  return x;
}
LOCKSTEP_RPC_FUNCTION(same);

int device_of_local(const RRef<at::Tensor>& value) {
  return value.local_value().device().index();
}
LOCKSTEP_RPC_FUNCTION(device_of_local);

class DeviceCall : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_gpu::record.clear();
    fake_gpu::record.busy = false;
    n_runs = 0;
  }
};

TEST_F(DeviceCall, ArgumentsTakeTheMapAndResultsTheWayBack) {
  as_two([] {
    const Seen seen = rpc_sync("worker1", look, {on_gpu(0, 3)});
    EXPECT_EQ(seen.device, 1);
    EXPECT_EQ(seen.back.device(), gpu(0));
    expect_values(seen.back, 3);
    const at::Tensor other = rpc_sync("worker1", made_on, {1});
    EXPECT_EQ(other.device(), gpu(0));
    expect_values(other, 7);
  });
}

TEST_F(DeviceCall, TensorsInsideOtherValuesAreFound) {
  as_two(
      [] {
        const Nest nest = rpc_sync("worker1", pass_nest,
                                   {Nest{{"x", {on_gpu(0, 2), std::nullopt, at::Tensor(), on_gpu(0, 4)}}}});
        const auto& list = nest.at("x");
        EXPECT_EQ(list[0]->device(), gpu(0));
        EXPECT_FALSE(list[1]);
        EXPECT_FALSE(list[2]->defined());
        expect_values(*list[3], 4);
      },
      {{"worker1", {{0, 1}}}});
}

TEST_F(DeviceCall, OperatorsTakeTheMapsToo) {
  as_two([] {
    const auto there = rpc_sync<at::Tensor>("worker1", op("aten::detach"), {on_gpu(0, 5)});
    EXPECT_EQ(there.device(), gpu(0));
    expect_values(there, 5);
  });
}

TEST_F(DeviceCall, ADeviceWithoutAMapIsRefusedBeforeAnythingIsSent) {
  as_two([] {
    const auto refused = [](const auto& call) {
      const auto failure = caught(call);
      EXPECT_EQ(failure.kind, ErrorKind::kUsage) << failure.message;
      for (const char* part : {"cuda:1", "worker1", "device_maps"})
        EXPECT_TRUE(says(failure, part)) << failure.message;
    };
    refused([] { rpc_sync("worker1", look, {on_gpu(1)}); });
    refused([] { remote("worker1", look, {on_gpu(1)}); });
    refused([] { rpc_sync("worker1", pass_nest, {Nest{{"x", {on_gpu(0), on_gpu(1)}}}}); });
    refused([] { rpc_sync<at::Tensor>("worker1", op("aten::detach"), {on_gpu(1)}); });
    EXPECT_EQ(n_runs, 0);
    rpc_sync("worker1", look, {at::ones({2})});  // the CPU needs no map
    EXPECT_EQ(n_runs, 1);
  });
}

TEST_F(DeviceCall, AResultThatNoMapBringsBackIsTheCallersError) {
  as_two([] {
    const auto failure = caught([] { rpc_sync("worker1", made_on, {0}); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage);
    for (const char* part : {"cuda:0 of worker worker1", "device_maps of worker0 for worker1"})
      EXPECT_TRUE(says(failure, part)) << failure.message;
  });
}

TEST_F(DeviceCall, ADeviceThatTheReceiverDoesNotHaveIsNamed) {
  as_two(
      [] {
        const auto failure = caught([] { rpc_sync("worker1", look, {on_gpu(0)}); });
        EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
        for (const char* part : {"cuda:5", "device_maps"})
          EXPECT_TRUE(says(failure, part)) << failure.message;
      },
      {{"worker1", {{0, 5}}}});
}

TEST_F(DeviceCall, CallsToOneselfNeedNoMap) {
  as_two([] {
    const Seen seen = rpc_sync("worker0", look, {on_gpu(1, 6)});
    EXPECT_EQ(seen.device, 1);
    EXPECT_EQ(seen.back.device(), gpu(1));
    expect_values(seen.back, 6);
  });
}

TEST_F(DeviceCall, ValuesStayOnTheDeviceOfTheirOwnerAndAreFetchedBack) {
  as_two([] {
    const auto value = remote("worker1", same, {on_gpu(0, 8)});
    EXPECT_EQ(rpc_sync("worker1", device_of_local, {value}), 1);
    const at::Tensor here = value.to_here();
    EXPECT_EQ(here.device(), gpu(0));
    expect_values(here, 8);
  });
}

TEST_F(DeviceCall, AFunctionRunsInAStreamOfItsOwnForTheDevicesOfItsArguments) {
  as_two([] {
    const Seen seen = rpc_sync("worker1", look, {on_gpu(0)});
    EXPECT_GE(seen.stream, fake_gpu::kFirstOfPool);
    // Restored on the agent's threads, and nothing is set up for calls without such arguments.
    for (int i = 0; i < 20; ++i) EXPECT_EQ(rpc_sync("worker1", current_stream_of, {1}), 0);
    EXPECT_EQ(current_stream_of(0), 0) << "the thread that waits may decode the answer";
  });
}

TEST_F(DeviceCall, EveryStreamOnTheWayWaitsForTheOneBefore) {
  as_two([] {
    const c10::StreamGuard guard(fake_gpu::stream(gpu(0), 9));
    const auto later = rpc_async("worker1", look, {on_gpu(0)});
    bool out = false;
    for (c10::StreamId id = fake_gpu::kFirstOfPool; id < fake_gpu::kFirstOfPool + 1000; ++id)
      out = out || fake_gpu::record.ordered(fake_gpu::stream(gpu(0), 9), fake_gpu::stream(gpu(0), id));
    EXPECT_TRUE(out) << "the copy out comes after the caller's work";
    later.wait();
    const auto reader = fake_gpu::stream(gpu(0), 11);
    const c10::StreamGuard other(reader);
    fake_gpu::record.clear();
    const Seen seen = later.result();  // in another stream than the wait
    bool in = false;
    for (c10::StreamId id = fake_gpu::kFirstOfPool; id < fake_gpu::kFirstOfPool + 1000; ++id)
      in = in || fake_gpu::record.ordered(fake_gpu::stream(gpu(0), id), reader);
    EXPECT_TRUE(in) << "whoever gets the value waits for the copy in";
  });
}

TEST_F(DeviceCall, TheResultIsCopiedAfterTheFunctionsStream) {
  as_two([] {
    const Seen seen = rpc_sync("worker1", look, {on_gpu(0)});
    const auto own = fake_gpu::stream(gpu(1), seen.stream);
    bool out = false;
    for (c10::StreamId id = fake_gpu::kFirstOfPool; id < fake_gpu::kFirstOfPool + 1000; ++id)
      out = out || (id != seen.stream && fake_gpu::record.ordered(own, fake_gpu::stream(gpu(1), id)));
    EXPECT_TRUE(out);
  });
}

TEST_F(DeviceCall, AValueBehindAnRRefIsReadAfterTheStreamThatMadeIt) {
  as_two([] {
    const auto value = remote("worker1", same, {on_gpu(0)});
    value.get_future().wait();
    fake_gpu::record.clear();
    rpc_sync("worker1", device_of_local, {value});  // its thread is in the default stream of cuda:1
    bool ordered = false;
    for (c10::StreamId id = fake_gpu::kFirstOfPool; id < fake_gpu::kFirstOfPool + 1000; ++id)
      ordered =
          ordered || fake_gpu::record.ordered(fake_gpu::stream(gpu(1), id), fake_gpu::stream(gpu(1), 0));
    EXPECT_TRUE(ordered);
  });
}

TEST_F(DeviceCall, ABusyGpuHoldsUpTheMessageAndNotItsCaller) {
  as_two([] {
    fake_gpu::record.busy = true;
    const auto later = rpc_async("worker1", look, {on_gpu(0, 2)});
    std::this_thread::sleep_for(Milliseconds(20));
    EXPECT_FALSE(later.done());
    EXPECT_EQ(n_runs, 0) << "it was sent before its bytes were there";
    fake_gpu::record.busy = false;
    expect_values(later.wait().back, 2);
  });
}

TEST_F(DeviceCall, AGpuThatIsStuckEndsInATimeout) {
  as_two([] {
    fake_gpu::record.busy = true;
    const auto failure =
        caught([] { rpc_sync("worker1", look, {on_gpu(0)}, {.timeout = Milliseconds(50)}); });
    EXPECT_EQ(failure.kind, ErrorKind::kTimeout) << failure.message;
    EXPECT_EQ(n_runs, 0);
    fake_gpu::record.busy = false;
  });
}

// x goes to worker 1 as an argument and comes back as a result; its gradient goes there by the map, and returns by its
// reverse.
TEST_F(DeviceCall, GradientsTakeTheWayBack) {
  as_two([] {
    const at::Tensor x = on_gpu(0, 3, {1}).set_requires_grad(true);
    const autograd::DistAutogradContext context;
    const at::Tensor y = rpc_sync("worker1", same, {x});
    ASSERT_TRUE(y.requires_grad());
    autograd::backward(context, {y});
    const at::Tensor gradient = context.gradients().find(x);
    ASSERT_TRUE(gradient.defined());
    EXPECT_EQ(gradient.device(), gpu(0));
    expect_values(gradient, 1);
  });
}

TEST_F(DeviceCall, ObjectsKeepTheDeviceThatTheyRecord) {
  const auto back = decode<at::Tensor>(encode(on_gpu(1, 9)));
  EXPECT_EQ(back.device(), gpu(1));
  expect_values(back, 9);
}

}  // namespace
}  // namespace lockstep::rpc
