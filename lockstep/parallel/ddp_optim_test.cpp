// Optimizers of a model that is data parallel over tensor parallel: ZeRO over dp, steps inside backward(),
// and clipping, against one process that sees both batches.
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <memory>

#include "lockstep/ddp/ddp.h"
#include "lockstep/dtensor/dtensor.h"
#include "lockstep/optim/in_backward.h"
#include "lockstep/optim/zero_redundancy_optimizer.h"
#include "lockstep/parallel/ddp_testing.h"

namespace lockstep {
namespace {

using namespace testing;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

TEST(DdpOverTensorParallel, ZeroShardsTheStateOverDpOnceMore) {
  const Net one = trained_alone<Adam>(AdamOptions(0.01), kSteps + 1);
  for (const bool views : {false, true}) {
    world(4, [&](int) {
      Fixture setup;
      const auto dp = setup.mesh["dp"];
      auto model = DistributedDataParallel(setup.net, {.device_mesh = dp});
      using Zero = ZeroRedundancyOptimizer<Adam>;
      const ZeroOptions options{.group = dp.get_group(), .parameters_as_bucket_view = views};
      auto optimizer = std::make_unique<Zero>(model->parameters(), AdamOptions(0.01), options);
      for (int step = 0; step < kSteps + 1; ++step) {
        optimizer->zero_grad();
        loss_of(model->forward(batch(step, setup.half))).backward();
        optimizer->step();
        if (step != 1) continue;
        // The state of all parameters on both ranks of dp, through bytes, into a new optimizer.
        OptimizerStateDict state;
        for (const int to : {0, 1}) {
          optimizer->consolidate_state_dict(to);
          if (to == setup.half) state = optimizer->state_dict();
        }
        optimizer = std::make_unique<Zero>(model->parameters(), AdamOptions(0.01), options);
        optimizer->load_state_dict(state);
      }
      expect_same_parameters(*setup.net, *one, views ? "views" : "apart");
      EXPECT_EQ(placements(setup.net->named_parameters()["blocks.0.up.weight"]), Placements{Shard(0)});
    });
  }
}

TEST(DdpOverTensorParallel, OptimizersThatStepInsideBackwardGetShardedGradients) {
  const Net one = trained_alone<SGD>(SGDOptions(0.1));
  world(4, [&](int) {
    Fixture setup;
    const auto inside = apply_optimizer_in_backward<SGD>(setup.net->parameters(), SGDOptions(0.1));
    auto model = DistributedDataParallel(setup.net, {.device_mesh = setup.mesh["dp"]});
    for (int step = 0; step < kSteps; ++step) loss_of(model->forward(batch(step, setup.half))).backward();
    expect_same_parameters(*setup.net, *one, "in backward");
  });
  world(4, [&](int) {
    Fixture setup;
    const auto dp = setup.mesh["dp"];
    auto model = DistributedDataParallel(setup.net, {.device_mesh = dp});
    ZeroRedundancyOptimizer<SGD> zero(model->parameters(), SGDOptions(0.1),
                                      {.group = dp.get_group(), .overlap_with_ddp = true});
    model->overlap_optimizer(zero);
    for (int step = 0; step < kSteps; ++step) {
      model->zero_grad();
      loss_of(model->forward(batch(step, setup.half))).backward();
    }
    expect_same_parameters(*setup.net, *one, "ZeRO in backward");
  });
}

TEST(DdpOverTensorParallel, ClippingSeesTheNormOfTheWholeModel) {
  world(4, [&](int) {
    Fixture setup;
    auto model = DistributedDataParallel(setup.net, {.device_mesh = setup.mesh["dp"]});
    Net one;
    loss_of(one(at::cat({batch(0, 0), batch(0, 1)}))).backward();
    loss_of(model->forward(batch(0, setup.half))).backward();
    const ImplicitReplicationScope scope;  // plain and sharded parameters in one norm
    const double expected = torch::nn::utils::clip_grad_norm_(one->parameters(), 0.1);
    const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), 0.1);
    EXPECT_NEAR(norm, expected, 1e-5);
    for (const auto& item : one->named_parameters())
      expect_close(setup.net->named_parameters()[item.key()].grad(), item.value().grad(), item.key());
  });
}

}  // namespace
}  // namespace lockstep
