// Starting RPC with all layers above it.
#include "lockstep/remote/init_rpc.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdlib>
#include <map>

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
  init_rpc("one", alone());  // unqualified: no other init_rpc is found through the type of its options
  EXPECT_TRUE(rpc::rpc_sync("one", rpc::op("aten::neg"), {at::ones({2})}).sum().item<double>() == -2);
  const rpc::RemoteModule<torch::nn::Linear> layer("one/cpu", rpc::Args{2, 3, true});
  {
    const autograd::DistAutogradContext context;
    autograd::backward(context, {layer.forward(at::ones({1, 2})).sum()});
    const rpc::DistributedOptimizer<torch::optim::SGD> optimizer(layer.remote_parameters(),
                                                                 rpc::Args{torch::optim::SGDOptions(0.1)});
    optimizer.step(context);
  }
  rpc::shutdown();
}

TEST(InitRpc, WithoutANameTheWorkerIsNamedByItsRank) {
  init_rpc(alone());
  EXPECT_EQ(rpc::get_worker_info().name, "worker0");
  rpc::shutdown();
}

TEST(InitRpc, TakesRankWorldAndAddressFromTheEnvironment) {
  const std::map<const char*, const char*> launcher{
      {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "0"}};
  for (const auto& [name, value] : launcher) ::setenv(name, value, 1);
  init_rpc();
  for (const auto& [name, value] : launcher) ::unsetenv(name);
  EXPECT_EQ(rpc::get_worker_info().name, "worker0");
  EXPECT_EQ(rpc::get_worker_infos().size(), 1u);
  rpc::shutdown();
}

TEST(InitRpc, OfRpcAloneHasNoAutogradAndSaysWhoBringsIt) {
  rpc::start("bare", alone());
  const auto failure = rpc::testing::caught([] { const autograd::DistAutogradContext context; });
  EXPECT_EQ(failure.kind, ErrorKind::kUnsupported);
  EXPECT_TRUE(rpc::testing::says(failure, "lockstep::init_rpc"));
  rpc::shutdown();
}

}  // namespace
}  // namespace lockstep
