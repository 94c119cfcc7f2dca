// ZeroRedundancyOptimizer steps inside backward().
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/ddp_testing.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/optim/zero_redundancy_optimizer.h"

namespace lockstep {
namespace {

using namespace ddp_testing;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// Two groups, the second with a rate of its own that falls from step to step.
std::vector<OptimizerParamGroup> groups_of(MlpImpl& net) {
  auto slow = std::make_unique<SGDOptions>(0.05);
  slow->momentum(0.5);
  return {OptimizerParamGroup({net.first->weight, net.first->bias, net.last->weight}),
          OptimizerParamGroup({net.second->weight, net.second->bias}, std::move(slow))};
}
void anneal(torch::optim::Optimizer& optimizer) {
  auto& options = static_cast<SGDOptions&>(optimizer.param_groups()[1].options());
  options.lr(options.lr() * 0.9);
}

std::vector<at::Tensor> trained_alone_in_groups(int n) {
  MlpImpl model;
  fill_parameters(model, 1);
  SGD sgd(groups_of(model), SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    loss_of(model.forward(batch_input(step, n)), batch_target(step, n)).backward();
    sgd.step();
    anneal(sgd);
  }
  return model.parameters();
}

struct Overlap {
  int n;
  bool grad_views, param_views, hook;
};
class ZeroOverlaps : public ::testing::TestWithParam<Overlap> {};
INSTANTIATE_TEST_SUITE_P(Ways, ZeroOverlaps,
                         ::testing::Values(Overlap{1, false, false, false}, Overlap{2, false, false, false},
                                           Overlap{3, true, true, false}, Overlap{3, false, true, true},
                                           Overlap{4, true, false, true}));

TEST_P(ZeroOverlaps, TrainsAsOneProcessFromTheFirstStepOn) {
  const Overlap way = GetParam();
  PerRank<std::vector<at::Tensor>> got;
  run_threads(way.n, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model =
        DistributedDataParallel(net, {.bucket_cap_mb = 0.0002, .gradient_as_bucket_view = way.grad_views});
    ZeroRedundancyOptimizer<SGD> zero(
        groups_of(*net), SGDOptions(0.1).momentum(0.9),
        {.parameters_as_bucket_view = way.param_views, .overlap_with_ddp = true});
    if (way.hook) model->register_comm_hook(allreduce_hook());
    model->overlap_optimizer(zero);
    for (int step = 0; step < kSteps; ++step) {
      zero.zero_grad();
      loss_of(model->forward(part(batch_input(step, way.n), rank)), part(batch_target(step, way.n), rank))
          .backward();
      EXPECT_TRUE(net->first->weight.grad().defined());
      anneal(zero);
    }
    got.put(rank, net->parameters());
  });
  expect_same_bits(got);
  expect_close(got.values().at(0), trained_alone_in_groups(way.n));
}

TEST(ZeroOverlap, KeepsOnlyItsShareOfTheStateAndConsolidatesIt) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    ZeroRedundancyOptimizer<AdamW> zero(net->parameters(), AdamWOptions(0.01), {.overlap_with_ddp = true});
    model->overlap_optimizer(zero);
    for (int step = 0; step < 3; ++step) {
      zero.zero_grad();
      model->forward(input_of(step, rank)).square().mean().backward();
    }
    std::size_t mine = 0;
    for (const int owner : zero.owners()[0]) mine += owner == rank ? 1 : 0;
    EXPECT_EQ(zero.state().size(), mine);
    EXPECT_LT(mine, net->parameters().size());
    zero.consolidate_state_dict(0);
    if (rank == 0) {
      EXPECT_EQ(zero.state_dict().state.size(), net->parameters().size());
    }
  });
}

TEST(ZeroOverlap, UnusedParametersAreNotStepped) {
  struct HalfImpl : torch::nn::Module {
    HalfImpl() {
      used = register_module("used", torch::nn::Linear(kIn, kOut));
      idle = register_module("idle", torch::nn::Linear(kIn, kOut));
    }
    at::Tensor forward(const at::Tensor& x) { return used(x); }
    torch::nn::Linear used{nullptr}, idle{nullptr};
  };
  PerRank<std::vector<at::Tensor>> got;
  run_threads(2, [&](int rank) {
    auto net = std::make_shared<HalfImpl>();
    fill_parameters(*net, 1);
    const auto before = net->idle->weight.detach().clone();
    auto model = DistributedDataParallel(net, {.find_unused_parameters = true});
    ZeroRedundancyOptimizer<Adam> zero(net->parameters(), AdamOptions(0.01).weight_decay(0.1),
                                       {.overlap_with_ddp = true});
    model->overlap_optimizer(zero);
    for (int step = 0; step < 2; ++step) model->forward(input_of(step, rank)).sum().backward();
    EXPECT_TRUE(torch::equal(before, net->idle->weight));
    got.put(rank, net->parameters());
  });
  expect_same_bits(got);
}

TEST(ZeroOverlap, GoesOnWhenARankHasNoInput) {
  PerRank<std::vector<at::Tensor>> got;
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    ZeroRedundancyOptimizer<Adam> zero(net->parameters(), AdamOptions(0.01), {.overlap_with_ddp = true});
    model->overlap_optimizer(zero);
    join({*model, zero}, [&] {
      for (int step = 0; step < 2 + 3 * rank; ++step) {
        zero.zero_grad();
        model->forward(input_of(step, rank)).square().mean().backward();
      }
    });
    got.put(rank, net->parameters());
  });
  expect_same_bits(got);
  MlpImpl one;
  fill_parameters(one, 1);
  Adam adam(one.parameters(), AdamOptions(0.01));
  for (int step = 0; step < 5; ++step) {
    adam.zero_grad();
    at::Tensor loss = one.forward(input_of(step, 1)).square().mean() / 2;
    if (step < 2) loss = loss + one.forward(input_of(step, 0)).square().mean() / 2;
    loss.backward();
    adam.step();
  }
  expect_close(got.values().at(0), one.parameters());
}

TEST(ZeroOverlap, StepItselfDoesNothingAndWrongUseIsRefused) {
  run_threads(2, [&](int rank) {
    const Group other = new_group();
    Mlp net, stranger;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    const auto make = [&](Mlp of, ZeroOptions options) {
      return std::make_unique<ZeroRedundancyOptimizer<Adam>>(of->parameters(), AdamOptions(0.01), options);
    };
    const auto zero = make(net, {.overlap_with_ddp = true});
    EXPECT_NE(refusal([&] { model->overlap_optimizer(*make(net, {})); }).find("without overlap_with_ddp"),
              std::string::npos);
    EXPECT_NE(refusal([&] {
                model->overlap_optimizer(*make(stranger, {.overlap_with_ddp = true}));
              }).find("does not average"),
              std::string::npos);
    EXPECT_NE(refusal([&] {
                model->overlap_optimizer(*make(net, {.group = other, .overlap_with_ddp = true}));
              }).find("belongs to group"),
              std::string::npos);
    model->overlap_optimizer(*zero);
    EXPECT_NE(refusal([&] { model->overlap_optimizer(*zero); }).find("already"), std::string::npos);
    EXPECT_NE(refusal([&] {
                zero->add_param_group(OptimizerParamGroup({torch::ones({2})}));
              }).find("not with overlap_with_ddp"),
              std::string::npos);
    const auto before = net->first->weight.detach().clone();
    zero->step();
    EXPECT_TRUE(torch::equal(before, net->first->weight));
    model->forward(input_of(0, rank)).sum().backward();
    EXPECT_FALSE(torch::equal(before, net->first->weight));
  });
}

TEST(ZeroOverlap, EndsWithTheOptimizer) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    {
      ZeroRedundancyOptimizer<Adam> zero(net->parameters(), AdamOptions(0.01), {.overlap_with_ddp = true});
      model->overlap_optimizer(zero);
    }
    const auto before = net->first->weight.detach().clone();
    model->forward(input_of(0, rank)).sum().backward();
    EXPECT_TRUE(torch::equal(before, net->first->weight));
  });
}

}  // namespace
}  // namespace lockstep
