// Optimizers inside backward(), delayed reductions, and models that change their group.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/ddp_testing.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/optim/functional_optimizer.h"
#include "lockstep/optim/in_backward.h"

namespace lockstep {
namespace {

using namespace ddp_testing;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// The same training by one process on the whole batch.
Trained expected(int n) {
  return train_alone<MlpImpl>(n);
}

class Views : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Bucket, Views, ::testing::Bool());

TEST_P(Views, OptimizersInBackwardStepWithTheAverageAndLeaveNoGradient) {
  for (const bool applied_first : {true, false}) {
    PerRank<std::vector<at::Tensor>> got;
    run_threads(3, [&](int rank) {
      Mlp net;
      fill_parameters(*net, 1);
      OptimizersInBackward steps;
      const auto apply = [&] {
        steps = apply_optimizer_in_backward<SGD>(net->parameters(), SGDOptions(0.1).momentum(0.9));
      };
      if (applied_first) apply();
      auto model =
          DistributedDataParallel(net, {.bucket_cap_mb = 0.0002, .gradient_as_bucket_view = GetParam()});
      if (!applied_first) apply();
      for (int step = 0; step < kSteps; ++step) {
        loss_of(model->forward(part(batch_input(step, 3), rank)), part(batch_target(step, 3), rank))
            .backward();
        for (const auto& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
      }
      got.put(rank, net->parameters());
    });
    expect_same_bits(got);
    expect_close(got.values().at(0), expected(3).parameters);
  }
}

TEST(OptimizersInBackward, WaitForTheSyncedPassAfterNoSyncAndWorkBehindAHook) {
  PerRank<std::vector<at::Tensor>> got;
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    model->register_comm_hook(allreduce_hook());
    const auto steps = apply_optimizer_in_backward<SGD>(net->parameters(), SGDOptions(0.1));
    const auto before = net->first->weight.detach().clone();
    {
      const auto guard = model->no_sync();
      model->forward(input_of(0, rank)).sum().backward();
      EXPECT_TRUE(torch::equal(before, net->first->weight));
      EXPECT_TRUE(net->first->weight.grad().defined());
    }
    model->forward(input_of(1, rank)).sum().backward();
    got.put(rank, net->parameters());
  });
  expect_same_bits(got);
  Mlp alone;
  fill_parameters(*alone, 1);
  SGD sgd(alone->parameters(), SGDOptions(0.1));
  at::Tensor loss = torch::zeros({});
  for (int rank = 0; rank < 2; ++rank) {
    for (int step = 0; step < 2; ++step) loss = loss + alone->forward(input_of(step, rank)).sum() / 2;
  }
  loss.backward();
  sgd.step();
  expect_close(got.values().at(0), alone->parameters());
}

TEST(OptimizersInBackward, StepByThemselvesAgainOnceTheModelIsGone) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    const auto steps = apply_optimizer_in_backward<SGD>(net->parameters(), SGDOptions(0.1));
    {
      auto model = DistributedDataParallel(net);
      model->forward(input_of(0, rank)).sum().backward();
    }
    const auto before = net->last->weight.detach().clone();
    net->forward(input_of(1, rank)).sum().backward();
    EXPECT_FALSE(torch::equal(before, net->last->weight));
  });
}

TEST(OptimizersInBackward, NoLongerStepOnceTheirOwnerIsGone) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    {
      const auto steps = apply_optimizer_in_backward<SGD>(net->parameters(), SGDOptions(0.1));
      model->forward(input_of(0, rank)).sum().backward();
    }
    const auto before = net->first->weight.detach().clone();
    model->forward(input_of(1, rank)).sum().backward();
    EXPECT_TRUE(torch::equal(before, net->first->weight));
    EXPECT_TRUE(net->first->weight.grad().defined());
  });
}

class FusedRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FusedRanks, ::testing::Values(1, 2, 3));

TEST_P(FusedRanks, AFusedOptimizerStepsEachParameterWithItsAverage) {
  const int n = GetParam();
  PerRank<std::vector<at::Tensor>> got;
  run_threads(n, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    model->register_fused_optimizer(
        std::make_shared<FunctionalSGD>(std::vector<at::Tensor>(), SGDOptions(0.1).momentum(0.9),
                                        FunctionalOptions{.allow_empty_param_list = true}));
    for (int step = 0; step < kSteps; ++step) {
      model->zero_grad();
      loss_of(model->forward(part(batch_input(step, n), rank)), part(batch_target(step, n), rank)).backward();
      EXPECT_TRUE(net->first->weight.grad().defined());
    }
    got.put(rank, net->parameters());
  });
  expect_same_bits(got);
  expect_close(got.values().at(0), expected(n).parameters);
}

TEST(FusedOptimizer, StepsOnlyTheParametersItIsGivenAndIsRegisteredOnce) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    const auto make = [&] { return std::make_shared<FunctionalSGD>(net->parameters(), SGDOptions(0.1)); };
    const at::Tensor stranger = torch::ones({2}, torch::requires_grad());
    EXPECT_NE(
        refusal([&] { model->register_fused_optimizer(make(), {stranger}); }).find("not one that this model"),
        std::string::npos);
    EXPECT_NE(refusal([&] { model->register_fused_optimizer(nullptr); }).find("is null"), std::string::npos);
    model->register_fused_optimizer(make(), {net->last->weight});
    EXPECT_NE(refusal([&] { model->register_fused_optimizer(make()); }).find("one fused optimizer"),
              std::string::npos);
    const auto first = net->first->weight.detach().clone();
    const auto last = net->last->weight.detach().clone();
    model->forward(input_of(0, rank)).sum().backward();
    EXPECT_TRUE(torch::equal(first, net->first->weight));
    EXPECT_TRUE(torch::allclose(net->last->weight, last - 0.1 * net->last->weight.grad()));
  });
}

// ---- delayed ----

struct Delay {
  std::vector<std::string> names;
  std::string trigger;
};

std::vector<at::Tensor> trained_with(const Delay& delay, int rank, int n, bool set_to_none) {
  Mlp net;
  fill_parameters(*net, rank == 0 ? 1 : 9);
  auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.0002,
                                             .delay_all_reduce_named_params = delay.names,
                                             .param_to_hook_all_reduce = delay.trigger});
  SGD sgd(net->parameters(), SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad(set_to_none);
    loss_of(model->forward(part(batch_input(step, n), rank)), part(batch_target(step, n), rank)).backward();
    sgd.step();
  }
  return net->parameters();
}

TEST(DelayedAllReduce, AveragesSomeOrAllParametersWhenTheTriggerArrives) {
  const std::vector<Delay> delays = {
      {{"last.weight", "second.bias"}, "first.weight"},
      {{"first.weight", "first.bias", "second.weight", "second.bias", "last.weight"}, "first.weight"}};
  for (const Delay& delay : delays) {
    for (const bool set_to_none : {true, false}) {
      PerRank<std::vector<at::Tensor>> got;
      run_threads(3, [&](int rank) { got.put(rank, trained_with(delay, rank, 3, set_to_none)); });
      expect_same_bits(got);
      expect_close(got.values().at(0), expected(3).parameters);
    }
  }
}

TEST(DelayedAllReduce, IsOneOperationPerElementTypeAndNoneInsideNoSync) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(
        net, {.delay_all_reduce_named_params = {"first.weight", "first.bias", "second.weight", "second.bias",
                                                "last.weight"},
              .param_to_hook_all_reduce = "first.weight"});
    const auto group = model->group();
    {
      const auto guard = model->no_sync();
      const auto before = group->sequence_number();
      model->forward(input_of(0, rank)).sum().backward();
      EXPECT_EQ(group->sequence_number(), before);
    }
    const auto before = group->sequence_number();
    model->forward(input_of(1, rank)).sum().backward();
    EXPECT_EQ(group->sequence_number(), before + 1);
  });
}

TEST(DelayedAllReduce, ATriggerThatComesTooEarlyIsAnErrorThatStays) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(
        net, {.delay_all_reduce_named_params = {"first.weight"}, .param_to_hook_all_reduce = "last.weight"});
    const auto loss = model->forward(input_of(0, rank)).sum();
    EXPECT_NE(refusal([&] { loss.backward(); }).find("first.weight arrived after"), std::string::npos);
    EXPECT_NE(refusal([&] { model->forward(input_of(0, rank)); }), "no error");
  });
}

TEST(DelayedAllReduce, TheBareModuleStaysLocal) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(
        net, {.delay_all_reduce_named_params = {"last.weight"}, .param_to_hook_all_reduce = "first.weight"});
    const auto before = default_group()->sequence_number();
    model->module()->forward(input_of(0, rank)).sum().backward();
    EXPECT_EQ(default_group()->sequence_number(), before);
  });
}

TEST(DelayedAllReduce, RefusesHalfAnOptionAndUnknownNames) {
  run_threads(2, [&](int) {
    Mlp net;
    EXPECT_NE(refusal([&] {
                DistributedDataParallel(net, {.find_unused_parameters = true,
                                              .delay_all_reduce_named_params = {"last.weight"},
                                              .param_to_hook_all_reduce = "first.weight"});
              }).find("which find_unused_parameters does not promise"),
              std::string::npos);
    const auto with = [&](const Delay& delay) {
      return refusal([&] {
        DistributedDataParallel(
            net, {.delay_all_reduce_named_params = delay.names, .param_to_hook_all_reduce = delay.trigger});
      });
    };
    EXPECT_NE(with({{"last.weight"}, ""}).find("belong together"), std::string::npos);
    EXPECT_NE(with({{}, "last.weight"}).find("belong together"), std::string::npos);
    EXPECT_NE(with({{"last.wait"}, "last.weight"}).find("\"last.wait\", to be delayed"), std::string::npos);
    EXPECT_NE(with({{"last.weight"}, "nobody"}).find("\"nobody\", to be delayed"), std::string::npos);
    auto model = DistributedDataParallel(
        net, {.delay_all_reduce_named_params = {"last.weight"}, .param_to_hook_all_reduce = "first.weight"});
    EXPECT_NE(refusal([&] { join({*model}, [] {}); }).find("cannot be joined"), std::string::npos);
    const auto steps = apply_optimizer_in_backward<SGD>({net->last->weight}, SGDOptions(0.1));
    EXPECT_NE(refusal([&] { model->forward(input_of(0, 0)); }).find("steps inside backward"),
              std::string::npos);
  });
}

// ---- another group ----

TEST(UpdateProcessGroup, TheModelGoesOnAmongOtherRanks) {
  run_threads(4, [&](int rank) {
    const Group low = new_group({0, 1});
    const Group high = new_group({2, 3});
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.0002, .gradient_as_bucket_view = true});
    int n_hooked = 0;
    model->register_comm_hook({.run = [&](GradBucket& bucket) {
      ++n_hooked;
      return all_reduce(bucket.buffer(), {.op = ReduceOp::kAvg, .group = model->group(), .async_op = true})
          .get_future();
    }});
    const auto step = [&](int k) {
      model->zero_grad();
      model->forward(input_of(k, rank)).sum().backward();
    };
    for (int k = 0; k < 3; ++k) step(k);
    EXPECT_TRUE(model->stats().has_rebuilt_buckets);
    model->update_process_group(rank < 2 ? low : high);
    EXPECT_FALSE(model->stats().has_rebuilt_buckets);
    n_hooked = 0;
    for (int k = 3; k < 6; ++k) {
      step(k);
      at::Tensor want;
      for (const int r : rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3}) {
        const auto grad =
            torch::autograd::grad({net->forward(input_of(k, r)).sum()}, {net->first->weight})[0].detach() / 2;
        want = want.defined() ? want + grad : grad;
      }
      EXPECT_TRUE(torch::allclose(net->first->weight.grad(), want, 1e-4, 1e-6));
    }
    EXPECT_GT(n_hooked, 3);
    EXPECT_TRUE(model->stats().has_rebuilt_buckets);
    join({*model}, [&] {
      EXPECT_NE(refusal([&] { model->update_process_group(nullptr); }).find("not inside join()"),
                std::string::npos);
    });
    model->update_process_group(nullptr);
    EXPECT_EQ(model->group(), default_group());
    step(7);
  });
}

TEST(UpdateProcessGroup, AModelWhoseReductionFailedGoesOn) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    model->forward(input_of(0, rank));
    torch::tanh(net->first->forward(input_of(0, rank))).sum().backward();  // leaves out the others
    EXPECT_NE(refusal([&] { model->forward(input_of(0, rank)); }).find("did not reach every parameter"),
              std::string::npos);
    model->zero_grad();
    model->update_process_group(nullptr);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      model->forward(input_of(step, rank)).sum().backward();
    }
    at::Tensor want;
    for (int r = 0; r < 2; ++r) {
      const auto grad =
          torch::autograd::grad({net->forward(input_of(1, r)).sum()}, {net->first->weight})[0].detach() / 2;
      want = want.defined() ? want + grad : grad;
    }
    EXPECT_TRUE(torch::allclose(net->first->weight.grad(), want, 1e-4, 1e-6));
  });
}

TEST(UpdateProcessGroup, AloneTheModelIsLeftToItselfAndItsOptimizersStepOn) {
  run_threads(2, [&](int rank) {
    const Group low = new_group({0});
    const Group high = new_group({1});
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net);
    const auto steps = apply_optimizer_in_backward<SGD>(net->parameters(), SGDOptions(0.1));
    model->forward(input_of(0, rank)).sum().backward();
    EXPECT_NE(refusal([&] { model->update_process_group(rank == 0 ? high : low); }).find("not a member"),
              std::string::npos);
    model->update_process_group(rank == 0 ? low : high);
    const auto before = net->last->weight.detach().clone();
    const auto grad = torch::autograd::grad({net->forward(input_of(1, rank)).sum()}, {net->last->weight})[0];
    model->forward(input_of(1, rank)).sum().backward();
    EXPECT_TRUE(torch::allclose(net->last->weight, before - 0.1 * grad));
    EXPECT_FALSE(net->last->weight.grad().defined());
  });
}

TEST(DdpMesh, AMeshHasOneDimensionAndStandsForItsGroup) {
  run_threads(4, [](int rank) {
    const DeviceMesh mesh("cpu", std::vector<std::vector<int>>{{0, 1}, {2, 3}},
                          {.mesh_dim_names = {"dp", "tp"}});
    const auto with = [&](DdpOptions options) {
      return refusal([&] { DistributedDataParallel(Mlp(), std::move(options)); });
    };
    EXPECT_NE(with({.device_mesh = mesh}).find("has 2 dimensions"), std::string::npos);
    EXPECT_NE(with({.group = default_group(), .device_mesh = mesh["dp"]}).find("not both"),
              std::string::npos);
    Mlp net;
    auto model = DistributedDataParallel(net, {.device_mesh = mesh["dp"]});
    EXPECT_EQ(model->group(), mesh["dp"].get_group());
    const at::Tensor x = torch::full({1, kIn}, static_cast<double>(rank));
    model->forward(x).sum().backward();
    at::Tensor want = torch::zeros_like(net->first->weight);
    for (const int r : {rank % 2, rank % 2 + 2}) {
      const at::Tensor input = torch::full({1, kIn}, static_cast<double>(r));
      want += torch::autograd::grad({net->forward(input).sum()}, {net->first->weight})[0] / 2;
    }
    EXPECT_TRUE(torch::allclose(net->first->weight.grad(), want, 1e-4, 1e-6));
  });
}

}  // namespace
}  // namespace lockstep
