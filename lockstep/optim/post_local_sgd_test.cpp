#include <ATen/ops/stack.h>
#include <torch/optim/adam.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>

#include "lockstep/optim/optim_testing.h"
#include "lockstep/optim/post_local_sgd_optimizer.h"

namespace lockstep::testing {
namespace {

torch::optim::SGDOptions sgd_options() {
  return torch::optim::SGDOptions(0.1).momentum(0.9);
}

std::shared_ptr<ModelAverager> every(std::int64_t period, std::int64_t warmup = 0) {
  return std::make_shared<PeriodicModelAverager>(
      PeriodicModelAveragerOptions{.period = period, .warmup_steps = warmup});
}

// n replicas in one process, averaged by hand.
std::vector<std::vector<at::Tensor>> train_by_hand(int n, int n_steps, int period, int warmup) {
  std::vector<std::vector<at::Tensor>> replicas;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
  for (int r = 0; r < n; ++r) {
    replicas.push_back(make_parameters());
    optimizers.push_back(std::make_unique<torch::optim::SGD>(replicas.back(), sgd_options()));
  }
  const at::NoGradGuard no_grad;
  for (int step = 0; step < n_steps; ++step) {
    for (int r = 0; r < n; ++r) {
      set_gradients(replicas[r], step, r);
      optimizers[r]->step();
    }
    if (step < warmup || (step - warmup) % period != 0) continue;
    for (std::size_t i = 0; i < replicas[0].size(); ++i) {
      std::vector<at::Tensor> values;
      for (const auto& replica : replicas) values.push_back(replica[i]);
      const auto mean = at::stack(values).mean(0);
      for (const auto& replica : replicas) replica[i].copy_(mean);
    }
  }
  return replicas;
}

TEST(PostLocalSGDOptimizer, StepsAloneAndAveragesWhenItIsTime) {
  for (const int n : {1, 2, 3}) {
    for (const int n_steps : {6, 7}) {  // 7 ends with an average, 6 does not
      const auto expected = train_by_hand(n, n_steps, 2, 2);
      world(n, [&](int rank) {
        const auto parameters = make_parameters();
        PostLocalSGDOptimizer optimizer(torch::optim::SGD(parameters, sgd_options()), every(2, 2));
        for (int step = 0; step < n_steps; ++step) {
          set_gradients(parameters, step, rank);
          optimizer.step();
        }
        expect_close(parameters, expected[static_cast<std::size_t>(rank)]);
        if (n_steps == 7) expect_same_on_all_ranks(parameters);
        EXPECT_EQ(optimizer.averager()->step(), n_steps);
      });
    }
  }
}

TEST(PostLocalSGDOptimizer, IsAnOptimizerLikeAnyOther) {
  world(2, [](int) {
    const auto parameters = make_parameters();
    PostLocalSGDOptimizer optimizer(
        std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1)), every(2));
    auto& options = static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
    torch::optim::StepLR scheduler(optimizer, 1, 0.5);
    ASSERT_EQ(optimizer.param_groups().size(), 1U);
    const auto before = parameters[0].detach().clone();
    set_gradients(parameters, 0);
    const auto gradient = parameters[0].grad().clone();
    const auto loss = optimizer.step([&] {
      optimizer.zero_grad();  // sees its groups though the wrapped optimizer is at work
      EXPECT_FALSE(parameters[0].grad().defined());
      set_gradients(parameters, 0);
      return at::full({}, 3.0F);
    });
    EXPECT_EQ(loss.item<float>(), 3.0F);
    expect_near(parameters[0].detach(), before - 0.1 * gradient, "the first step");
    scheduler.step();
    scheduler.step();  // libtorch's first step of a scheduler changes nothing
    EXPECT_EQ(options.lr(), 0.05);
    optimizer.step();
    expect_near(parameters[0].detach(), before - 0.1 * gradient - 0.05 * gradient, "after the scheduler");
    optimizer.zero_grad();
    EXPECT_FALSE(parameters[0].grad().defined());
    optimizer.add_param_group({{drawn(5, {2}).requires_grad_()}});
    EXPECT_EQ(optimizer.param_groups().size(), 2U);
    EXPECT_FALSE(optimizer.step().defined());
  });
}

TEST(PostLocalSGDOptimizer, SavesTheStepOfItsAveragerAndGoesOnFromThere) {
  world(2, [](int rank) {
    const auto train = [&](PostLocalSGDOptimizer& optimizer, const std::vector<at::Tensor>& parameters,
                           int from, int to) {
      for (int step = from; step < to; ++step) {
        set_gradients(parameters, step, rank);
        optimizer.step();
      }
    };
    const auto straight = make_parameters();
    PostLocalSGDOptimizer whole(torch::optim::Adam(straight, torch::optim::AdamOptions(0.05)), every(3));
    train(whole, straight, 0, 4);
    std::stringstream file;
    torch::save(whole, file);
    const OptimizerStateDict dict = whole.state_dict();
    EXPECT_EQ(std::get<std::int64_t>(dict.extra.at("step")), 4);
    EXPECT_EQ(std::get<std::int64_t>(dict.state.at(0).at("step")), 4);

    for (const bool by_file : {false, true}) {
      std::vector<at::Tensor> copies;
      for (const auto& parameter : straight) copies.push_back(parameter.detach().clone().requires_grad_());
      PostLocalSGDOptimizer again(torch::optim::Adam(copies, torch::optim::AdamOptions(9)), every(3));
      if (by_file) {
        torch::serialize::InputArchive archive;
        file.seekg(0);
        archive.load_from(file);
        again.load(archive);
      } else {
        again.load_state_dict(dict);
      }
      EXPECT_EQ(again.averager()->step(), 4);
      EXPECT_EQ(again.param_groups()[0].options().get_lr(), 0.05);
      const auto reference = make_parameters();
      PostLocalSGDOptimizer other(torch::optim::Adam(reference, torch::optim::AdamOptions(0.05)), every(3));
      train(other, reference, 0, 8);
      train(again, copies, 4, 8);
      expect_close(copies, reference);
    }
  });
}

TEST(PostLocalSGDOptimizer, WarnsOfAStateWithoutAStepAndBeginsAtZero) {
  Warnings warnings("has no step of an averager");
  world(2, [](int) {
    const auto parameters = make_parameters();
    PostLocalSGDOptimizer optimizer(torch::optim::SGD(parameters, sgd_options()), every(2));
    auto dict = optimizer.state_dict();
    optimizer.averager()->set_step(5);
    dict.extra.clear();
    optimizer.load_state_dict(dict);
    EXPECT_EQ(optimizer.averager()->step(), 0);
  });
  EXPECT_EQ(warnings.count(), 2);
}

TEST(PostLocalSGDOptimizer, RefusesToBeMadeOfNothing) {
  world(1, [](int) {
    refused([] { PostLocalSGDOptimizer(std::unique_ptr<torch::optim::Optimizer>(), every(2)); },
            "no optimizer");
    refused([] { PostLocalSGDOptimizer(torch::optim::SGD(make_parameters(), sgd_options()), nullptr); },
            "no averager");
  });
}

TEST(OptimizerStateDict, IsRefusedWhenItDoesNotFit) {
  const auto parameters = make_parameters();
  torch::optim::SGD optimizer(parameters, sgd_options());
  set_gradients(parameters, 0);
  optimizer.step();
  const auto good = get_optimizer_state_dict(optimizer);
  EXPECT_EQ(good.state.size(), 5U);
  EXPECT_EQ(std::get<double>(good.param_groups.at(0).options.at("momentum")), 0.9);
  const auto bad = [&](const auto& spoil, const char* words) {
    auto dict = good;
    spoil(dict);
    refused([&] { set_optimizer_state_dict(optimizer, dict); }, words);
    EXPECT_EQ(optimizer.state().size(), 5U);
  };
  bad([](auto& dict) { dict.param_groups.pop_back(); }, "0 parameter groups, the optimizer 1");
  bad([](auto& dict) { dict.param_groups[0].params.pop_back(); }, "has 4 parameters, the optimizer's 5");
  bad([](auto& dict) { dict.param_groups[0].params[0] = 1; }, "stands there twice");
  bad([](auto& dict) { dict.state[17] = {}; }, "parameter 17, which is in no group");
  bad([](auto& dict) { dict.param_groups[0].options.erase("momentum"); }, "not of this optimizer");
}

}  // namespace
}  // namespace lockstep::testing
