#include <gtest/gtest.h>

#include <stdexcept>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp_testing.h"
#include "lockstep/optim/zero_redundancy_optimizer.h"
#include "lockstep/process/spawn.h"

// ZeroRedundancyOptimizer where it is used: behind DistributedDataParallel, by ranks that are threads or
// processes.
namespace lockstep {
namespace {

using namespace ddp_testing;
using torch::optim::Adam;
using torch::optim::AdamOptions;

std::vector<at::Tensor> trained_alone_by_adam(int n) {
  auto model = std::make_shared<MlpImpl>();
  fill_parameters(*model, 1);
  Adam adam(model->parameters(), AdamOptions(0.02));
  for (int step = 0; step < kSteps; ++step) {
    adam.zero_grad();
    loss_of(model->forward(batch_input(step, n)), batch_target(step, n)).backward();
    adam.step();
  }
  return model->parameters();
}

struct ZeroWay {
  bool gradient_views;
  bool parameter_views;
  bool zero_first;  // constructed before DistributedDataParallel
};

std::vector<at::Tensor> train(int rank, int n, const ZeroWay& way) {
  auto net = std::make_shared<MlpImpl>();
  fill_parameters(*net, rank == 0 ? 1 : 77);
  std::unique_ptr<ZeroRedundancyOptimizer<Adam>> adam;
  const auto make_zero = [&] {
    adam = std::make_unique<ZeroRedundancyOptimizer<Adam>>(
        net->parameters(), AdamOptions(0.02), ZeroOptions{.parameters_as_bucket_view = way.parameter_views});
  };
  if (way.zero_first) make_zero();
  auto model = DistributedDataParallel(net, {.gradient_as_bucket_view = way.gradient_views});
  if (!way.zero_first) make_zero();
  for (int step = 0; step < kSteps; ++step) {
    adam->zero_grad(!way.gradient_views);
    const at::Tensor x = batch_input(step, n).narrow(0, rank * kBatch, kBatch);
    const at::Tensor y = batch_target(step, n).narrow(0, rank * kBatch, kBatch);
    loss_of(model->forward(x), y).backward();
    adam->step();
  }
  return net->parameters();
}

void expect_alike(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double scale = expected[i].abs().max().item<double>();
    EXPECT_LE((actual[i] - expected[i]).abs().max().item<double>(), 1e-5 * scale) << i;
    auto first = actual[i].detach().clone();
    broadcast(first, {.src = 0});
    EXPECT_TRUE(torch::equal(first, actual[i])) << i;
  }
}

// First: it forks, and a fork after an OpenMP region hangs.
TEST(ZeroBehindDdp, TrainsLikeOneProcessWhenRanksAreProcesses) {
  spawn(2, [](int rank) {
    at::set_num_threads(1);
    init_process_group({.timeout = Milliseconds(60'000)});
    expect_alike(train(rank, 2, {true, true, false}), trained_alone_by_adam(2));
    const bool failed = ::testing::Test::HasFailure();
    destroy_process_group();
    if (failed) throw std::runtime_error("rank failed");
  });
}

TEST(ZeroBehindDdp, TrainsLikeOneProcessOnTheWholeBatch) {
  at::set_num_threads(1);
  for (const int n : {1, 2, 3}) {
    const auto expected = trained_alone_by_adam(n);
    for (const ZeroWay way :
         {ZeroWay{false, false, false}, {true, true, false}, {true, true, true}, {false, true, false}}) {
      run_threads(n, [&](int rank) { expect_alike(train(rank, n, way), expected); },
                  {.timeout = Milliseconds(60'000)});
    }
  }
}

}  // namespace
}  // namespace lockstep
