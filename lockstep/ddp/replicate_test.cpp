// replicate: the composable form.
#include "lockstep/ddp/replicate.h"

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp_testing.h"
#include "lockstep/ddp/hooks.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

TEST(Replicate, TrainsLikeTheWrapperAndLeavesTheModuleWhatItIs) {
  run_threads(2, [](int rank) {
    const Trained expected = train_rank<MlpImpl>(rank, 2, {}, true);
    Mlp net;
    fill_parameters(*net, rank == 0 ? 1 : 77);
    auto run = replicate(net);
    EXPECT_FALSE(run.is_prepared());
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      sgd.zero_grad();
      const at::Tensor x = batch_input(step, 2).narrow(0, rank * kBatch, kBatch);
      loss_of(run(x), batch_target(step, 2).narrow(0, rank * kBatch, kBatch)).backward();
      sgd.step();
    }
    EXPECT_TRUE(run.is_prepared());
    EXPECT_TRUE(net->named_parameters().contains("first.weight"));
    const auto parameters = net->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(torch::equal(parameters[i], expected.parameters[i])) << i;
    }
  });
}

TEST(Replicate, PreparesAtTheFirstCallWithWhatTheModuleIsThen) {
  run_threads(2, [](int rank) {
    Mlp net;
    auto run = replicate(net.ptr());
    net->to(at::kDouble);
    fill_parameters(*net, rank == 0 ? 1 : 77);
    run(input_of(0, rank).to(at::kDouble)).sum().backward();
    EXPECT_EQ(net->first->weight.grad().scalar_type(), at::kDouble);
    EXPECT_EQ(run.prepared()->stats().n_reductions, 1u);
  });
}

TEST(Replicate, GradientSyncCanBeSwitchedOffAndOn) {
  run_threads(2, [](int rank) {
    const auto weight = [](const auto& run) { return run.module()->weight.grad(); };
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    auto run = replicate(net);
    run.set_requires_gradient_sync(false);  // before it is prepared
    const at::Tensor x = torch::full({1, 1}, rank + 1.0);
    run(x).sum().backward();
    EXPECT_EQ(weight(run).item<double>(), rank + 1.0);
    auto same = run;  // a copy is the same handle
    same.set_requires_gradient_sync(false);
    run(x).sum().backward();
    EXPECT_EQ(weight(run).item<double>(), 2 * (rank + 1.0));
    same.set_requires_gradient_sync(true);
    run(x).sum().backward();
    EXPECT_EQ(weight(run).item<double>(), 4.5);
  });
}

TEST(Replicate, TakesOneHookBeforeOrAfterItIsPrepared) {
  run_threads(2, [](int rank) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    auto run = replicate(net);
    run.register_comm_hook(noop_hook());
    EXPECT_NE(refusal([&] { run.register_comm_hook(noop_hook()); }).find("one hook"), std::string::npos);
    EXPECT_NE(refusal([&] { run.register_comm_hook({}); }).find("is empty"), std::string::npos);
    run(torch::full({1, 1}, rank + 1.0)).sum().backward();
    EXPECT_EQ(net->weight.grad().item<double>(), rank + 1.0);
    EXPECT_NE(refusal([&] { run.register_comm_hook(noop_hook()); }).find("one hook"), std::string::npos);
    EXPECT_NE(refusal([&] { replicate(std::shared_ptr<MlpImpl>()); }).find("null"), std::string::npos);
  });
}

}  // namespace
}  // namespace lockstep
