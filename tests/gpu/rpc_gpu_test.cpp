// RPC with CUDA tensors: device maps, streams, RRefs and distributed backward passes. Every rank maps its GPU to that of
// worker1, and no other way: worker1 has no map for worker0. Rank 0 calls, or all do; in a world of one it calls itself.
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "tests/gpu/gpu_testing.h"

namespace lockstep {
namespace {

using namespace gpu_testing;

std::string callee() {
  return get_world_size() > 1 ? "worker1" : "worker0";
}
c10::Device gpu_of(int rank) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(rank % cuda::device_count())};
}

// What a function sees of its argument, and the argument again.
struct Seen {
  std::string device;
  bool pool_stream = false;
  at::Tensor back;
};
auto lockstep_fields(SelfOf<Seen> auto& self) {
  return std::tie(self.device, self.pool_stream, self.back);
}

Seen look(const at::Tensor& x) {
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  return {.device = x.device().str(),
          .pool_stream = guard.getStream(x.device()) != guard.getDefaultStream(x.device()),
          .back = x};
}
LOCKSTEP_RPC_FUNCTION(look);

at::Tensor slowly_doubled(const at::Tensor& x) {
  delay();
  return x * 2;
}
LOCKSTEP_RPC_FUNCTION(slowly_doubled);

at::Tensor plus_value(const at::Tensor& x, const rpc::RRef<at::Tensor>& value) {
  return x + value.local_value();
}
LOCKSTEP_RPC_FUNCTION(plus_value);

rpc::Future<at::Tensor> doubled_later(const rpc::RRef<at::Tensor>& value) {
  return value.to_here_async().then([](const rpc::Future<at::Tensor>& done) { return done.result() * 2; });
}
LOCKSTEP_RPC_FUNCTION(doubled_later);

at::Tensor zeros_there(std::int64_t n) {
  return torch::zeros({n}, on_gpu());
}
LOCKSTEP_RPC_FUNCTION(zeros_there);

// What worker1 is told when it calls worker0 with a tensor, or for one.
std::string refusal_without_map(bool as_argument) {
  try {
    if (as_argument) {
      rpc::rpc_sync("worker0", look, {torch::ones({2}, on_gpu())});
    } else {
      rpc::rpc_sync("worker0", zeros_there, {2});
    }
  } catch (const Error& error) {
    return error.kind() == ErrorKind::kUsage ? error.what() : "another kind";
  }
  return "nothing was raised";
}
LOCKSTEP_RPC_FUNCTION(refusal_without_map);

at::Tensor weight_gradient(const rpc::RRef<torch::nn::LinearImpl>& layer, const autograd::Context& context) {
  return context.gradients().find(layer.local_value().weight);
}
LOCKSTEP_RPC_FUNCTION(weight_gradient);

class RpcGpu : public GpuTest {
 protected:
  static void SetUpTestSuite() {
    if (!why_not().empty()) return;
    rpc::RpcOptions options{.rpc_timeout = kPatience};
    if (get_rank() != 1 && get_world_size() > 1)
      options.set_device_map("worker1", {{gpu().index(), gpu_of(1).index()}});
    init_rpc(options);
    delay(1);  // loads the kernels: a first launch waits for streams that are busy
    synchronize();
  }
  static void TearDownTestSuite() {
    if (rpc::is_initialized()) rpc::shutdown();
  }
  // Also after a test that threw: nobody waits for this rank.
  void TearDown() override {
    if (why_not().empty()) barrier();
  }
  static bool calls() { return rank() == 0; }
};

TEST_F(RpcGpu, TensorsOfEveryShapeAndTypeGoToTheMappedDeviceAndBack) {
  if (!calls()) return;
  const auto check = [](const char* what, const at::Tensor& x) {
    const Seen seen = rpc::rpc_sync(callee(), look, {x});
    EXPECT_EQ(seen.device, gpu_of(size() > 1 ? 1 : 0).str()) << what;
    EXPECT_TRUE(seen.pool_stream) << what;
    EXPECT_EQ(seen.back.device(), x.device()) << what;
    EXPECT_EQ(seen.back.scalar_type(), x.scalar_type()) << what;
    EXPECT_TRUE(torch::equal(seen.back, x)) << what;
  };
  for (const auto type :
       {at::kByte, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kBool})
    check(c10::toString(type), torch::randint(0, 2, {17, 3}, on_gpu(type)));
  const auto x = torch::randn({64, 33, 5}, on_gpu());
  check("transposed", x.transpose(0, 2));
  check("with gaps", x.slice(1, 0, 33, 2));
  check("expanded", torch::randn({1, 5}, on_gpu()).expand({7, 5}));
  check("scalar", torch::randn({}, on_gpu()));
  check("empty", torch::empty({0, 3}, on_gpu()));
  check("channels last", torch::randn({2, 3, 8, 8}, on_gpu()).contiguous(at::MemoryFormat::ChannelsLast));
  check("64 MiB", torch::randn({16, 1024, 1024}, on_gpu()));
  const auto complex = torch::randn({9}, on_gpu(at::kComplexFloat));
  check("conjugated", complex.conj());
  const auto sparse = torch::randn({5, 4}, on_gpu()).to_sparse();
  EXPECT_TRUE(torch::equal(rpc::rpc_sync(callee(), look, {sparse}).back.to_dense(), sparse.to_dense()));
}

TEST_F(RpcGpu, AnArgumentIsReadAfterTheKernelThatWritesIt) {
  if (!calls()) return;
  const c10::StreamGuard guard(side_stream());
  auto x = torch::zeros({1 << 20}, on_gpu());
  for (int i = 1; i <= 5; ++i) {
    delay();
    x.fill_(i);
    const auto later = rpc::rpc_async(callee(), look, {x});
    EXPECT_TRUE(torch::equal(later.wait().back, x)) << i;
    EXPECT_EQ(x[5].item<int>(), i);
  }
}

TEST_F(RpcGpu, AResultIsReadAfterTheFunctionsStreamWhereverItIsUsed) {
  if (!calls()) return;
  for (int i = 1; i <= 5; ++i) {
    const auto x = torch::full({1 << 20}, i, on_gpu());
    const auto later = rpc::rpc_async(callee(), slowly_doubled, {x});
    const c10::StreamGuard guard(side_stream());
    const auto y = later.wait();
    EXPECT_EQ((y != 2 * i).sum().item<int>(), 0) << i;
  }
}

TEST_F(RpcGpu, ManyCallsAtOnceDoNotShareMemory) {
  if (!calls()) return;
  constexpr int kCalls = 200;
  std::vector<rpc::Future<Seen>> futures;
  for (int i = 0; i < kCalls; ++i)
    futures.push_back(rpc::rpc_async(callee(), look, {torch::full({1 << 16}, i, on_gpu())}));
  for (int i = 0; i < kCalls; ++i) {
    const auto back = futures[static_cast<std::size_t>(i)].wait().back;
    ASSERT_EQ((back != i).sum().item<int>(), 0) << i;
  }
}

TEST_F(RpcGpu, ValuesBehindRRefsAreReadAfterTheyAreComputed) {
  if (!calls()) return;
  const auto one = torch::ones({1 << 18}, on_gpu());
  for (int i = 1; i <= 5; ++i) {
    const auto value = rpc::remote(callee(), slowly_doubled, {one * i});
    const auto sum = rpc::rpc_sync(callee(), plus_value, {one, value});
    EXPECT_EQ((sum != 2 * i + 1).sum().item<int>(), 0) << i;
    EXPECT_EQ((value.to_here() != 2 * i).sum().item<int>(), 0) << i;
    const auto twice = rpc::rpc_sync(callee(), doubled_later, {value});
    EXPECT_EQ((twice != 4 * i).sum().item<int>(), 0) << i;
  }
}

TEST_F(RpcGpu, ADeviceWithoutAMapIsRefused) {
  if (!calls() || size() < 2) return;
  for (const bool as_argument : {true, false}) {
    const auto text = rpc::rpc_sync("worker1", refusal_without_map, {as_argument});
    EXPECT_NE(text.find("device_maps of worker1 for worker0"), std::string::npos) << text;
  }
}

TEST_F(RpcGpu, ObjectsKeepTheDeviceThatTheyRecord) {
  std::vector<at::Tensor> all(static_cast<std::size_t>(size()));
  all_gather_object(all, torch::full({3}, rank(), on_gpu()));
  for (int i = 0; i < size(); ++i) {
    EXPECT_EQ(all[static_cast<std::size_t>(i)].device(), gpu_of(i));
    EXPECT_EQ((all[static_cast<std::size_t>(i)] != i).sum().item<int>(), 0);
  }
}

// Loss on the CPU behind operations on the GPU of two workers; every part is held up by slow kernels.
TEST_F(RpcGpu, GradientsAreThoseOfOneProcess) {
  if (!calls()) return;
  for (int i = 0; i < 3; ++i) {
    const c10::StreamGuard guard(side_stream());
    const auto w = torch::randn({256, 256}, on_gpu()).set_requires_grad(true);
    const auto x = torch::randn({32, 256}, on_gpu());
    const auto loss = [&](const std::function<at::Tensor(const at::Tensor&)>& middle) {
      const auto hidden = middle(torch::tanh(torch::matmul(x, w)));
      return torch::sin(hidden.cpu() * 3).sum() + middle(w).pow(2).sum().cpu();
    };
    loss([](const at::Tensor& h) { return h * 2; }).backward();
    const autograd::DistAutogradContext context;
    delay(5);
    autograd::backward(
        context, {loss([](const at::Tensor& h) { return rpc::rpc_sync(callee(), slowly_doubled, {h}); })});
    EXPECT_TRUE(torch::allclose(context.gradients().find(w), w.grad(), 1e-4, 1e-4)) << i;
  }
}

TEST_F(RpcGpu, ARemoteModuleTrainsOnItsGpu) {
  if (!calls()) return;
  const std::string where = callee() + "/" + gpu_of(size() > 1 ? 1 : 0).str();
  const rpc::RemoteModule<torch::nn::Linear> there(where, rpc::Args{12, 4, false});
  torch::nn::Linear here(torch::nn::LinearOptions(12, 4).bias(false));
  here->to(gpu());
  {
    const auto weight = there.remote_parameters().at(0).to_here();
    EXPECT_EQ(weight.device(), gpu());
    const torch::NoGradGuard no_grad;
    here->weight.copy_(weight);  // assigned, the member would not be the parameter any more
  }
  torch::optim::SGD sgd(here->parameters(), 0.1);
  rpc::DistributedOptimizer<torch::optim::SGD> remote_sgd(there.remote_parameters(),
                                                          rpc::Args{torch::optim::SGDOptions(0.1)});
  for (int step = 0; step < 10; ++step) {
    const auto x = torch::randn({8, 12}, on_gpu());
    sgd.zero_grad();
    here->forward(x).pow(2).sum().backward();
    sgd.step();
    const autograd::DistAutogradContext context;
    autograd::backward(context, {there.forward(x).pow(2).sum()});
    remote_sgd.step(context);
  }
  EXPECT_TRUE(torch::allclose(there.remote_parameters().at(0).to_here(), here->weight, 1e-4, 1e-5));
}

// Four layers, of which two are on worker1: one on its GPU, one on its CPU; the others are averaged by DDP on the GPU.
TEST_F(RpcGpu, RemoteLayersAndDdpHaveTheGradientsOfLocalLayers) {
  const std::string where = callee() + "/" + gpu_of(size() > 1 ? 1 : 0).str();
  const rpc::RemoteModule<torch::nn::Linear> remote1(where, rpc::Args{10, 7, false});
  const rpc::RemoteModule<torch::nn::Linear> remote3(callee() + "/cpu", rpc::Args{5, 3, false});
  torch::nn::Linear layer1(torch::nn::LinearOptions(10, 7).bias(false)), layer2(7, 5);
  torch::nn::Linear layer3(torch::nn::LinearOptions(5, 3).bias(false)), layer4(3, 1);
  layer2->to(gpu());
  layer4->to(gpu());
  // Worker1 has no map for itself, and needs none.
  layer1->weight = remote1.remote_parameters().at(0).to_here();
  layer3->weight = remote3.remote_parameters().at(0).to_here();
  auto ddp2 = DistributedDataParallel(layer2), ddp4 = DistributedDataParallel(layer4);
  const auto x = torch::rand({10, 10}, on_gpu());

  const auto here = ddp2->forward(layer1->forward(x)).cpu();
  ddp4->forward(layer3->forward(here).to(gpu())).sum().backward();

  const autograd::DistAutogradContext context;
  const auto there = ddp2->forward(remote1.forward(x)).cpu();
  autograd::backward(context, {ddp4->forward(remote3.forward(there).to(gpu())).sum()});
  const auto gradients = context.gradients();
  barrier();
  const auto expect_same = [](const char* what, const at::Tensor& distributed, const at::Tensor& local) {
    ASSERT_TRUE(distributed.defined() && local.defined()) << what;
    EXPECT_EQ(distributed.device(), local.device()) << what;
    EXPECT_TRUE(torch::allclose(distributed, local, 1e-4, 1e-5)) << what;
  };
  expect_same("2", gradients.find(layer2->weight), layer2->weight.grad());
  expect_same("4", gradients.find(layer4->weight), layer4->weight.grad());
  const auto at_callee = [&](const auto& layer) {
    return rpc::rpc_sync(callee(), weight_gradient, {layer.get_module_rref(), context});
  };
  expect_same("1", at_callee(remote1), layer1->weight.grad());
  expect_same("3", at_callee(remote3), layer3->weight.grad());
}

// Not a check: a line to compare with.
TEST_F(RpcGpu, PrintsWhatARoundTripCosts) {
  if (!calls()) return;
  for (const std::int64_t n_bytes : {std::int64_t{4} << 10, std::int64_t{1} << 20, std::int64_t{64} << 20}) {
    const auto x = torch::ones({n_bytes / 4}, on_gpu());
    const int n = n_bytes > (1 << 20) ? 10 : 200;
    for (int i = 0; i < 3; ++i) rpc::rpc_sync(callee(), look, {x});
    synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < n; ++i) rpc::rpc_sync(callee(), look, {x});
    synchronize();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    std::printf("round trip of %lld KiB: %.0f us\n", static_cast<long long>(n_bytes >> 10), took.count() / n);
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::gpu_testing::run_all(argc, argv);
}
