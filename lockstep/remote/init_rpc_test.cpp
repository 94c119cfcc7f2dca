// Starting RPC with all layers above it.
#include "lockstep/remote/init_rpc.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "lockstep/autograd/autograd.h"
#include "lockstep/remote/remote.h"
#include "lockstep/rpc/rpc_testing.h"
#include "lockstep/store/hash_store.h"

namespace lockstep {
namespace {

rpc::RpcOptions alone() {
  return {.rank = 0, .world_size = 1, .store = std::make_shared<HashStore>()};
}

TEST(InitRpc, BringsAutogradOperatorsModulesAndOptimizers) {
  lockstep::init_rpc("one", alone());
  EXPECT_TRUE(rpc::rpc_sync("one", rpc::op("aten::neg"), {at::ones({2})}).sum().item<double>() == -2);
  const rpc::RemoteModule<torch::nn::Linear> layer("one/cpu", 2, 3, true);
  {
    const autograd::DistAutogradContext context;
    autograd::backward(context.id(), {layer.forward(at::ones({1, 2})).sum()});
    const rpc::DistributedOptimizer<torch::optim::SGD> optimizer(layer.remote_parameters(),
                                                                 torch::optim::SGDOptions(0.1));
    optimizer.step(context.id());
  }
  rpc::shutdown();
}

TEST(InitRpc, WithoutANameTheWorkerIsNamedByItsRank) {
  lockstep::init_rpc(alone());
  EXPECT_EQ(rpc::get_worker_info().name, "worker0");
  rpc::shutdown();
}

TEST(InitRpc, OfRpcAloneHasNoAutogradAndSaysWhoBringsIt) {
  rpc::init_rpc("bare", alone());
  const auto failure = rpc::testing::caught([] { const autograd::DistAutogradContext context; });
  EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
  EXPECT_TRUE(rpc::testing::says(failure, "lockstep::init_rpc"));
  rpc::shutdown();
}

}  // namespace
}  // namespace lockstep
