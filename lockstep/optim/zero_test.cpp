#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>

#include "lockstep/optim/optim_testing.h"
#include "lockstep/optim/partition.h"
#include "lockstep/optim/zero_redundancy_optimizer.h"

namespace lockstep::testing {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::OptimizerParamGroup;
using Groups = std::vector<OptimizerParamGroup>;
using Owners = std::vector<std::vector<int>>;
using ZeroAdam = ZeroRedundancyOptimizer<Adam>;

TEST(Partition, GivesTheLargestFirstToTheRankThatHasLeast) {
  // 12 -> 0, 10 -> 1, 9 -> 1 has 10 < 12, 7 -> 0 has 12 < 19, 1 -> both 19: 0.
  EXPECT_EQ(partition_parameters({{12, 7, 10, 1, 9}}, 2), (Owners{{0, 0, 1, 0, 1}}));
  EXPECT_EQ(partition_parameters({{5, 5, 5, 5}}, 3), (Owners{{0, 1, 2, 0}}));
  EXPECT_EQ(partition_parameters({{5}}, 4), (Owners{{0}}));
  EXPECT_EQ(partition_parameters({}, 2), Owners{});
}

TEST(Partition, GoesOnInTheNextGroupAndMovesNoneOfTheEarlier) {
  EXPECT_EQ(partition_parameters({{3, 8}}, 2), (Owners{{1, 0}}));
  EXPECT_EQ(partition_parameters({{3, 8}, {4, 4}}, 2), (Owners{{1, 0}, {1, 1}}));
  EXPECT_EQ(partition_parameters({{3, 8}, {}, {6}}, 2), (Owners{{1, 0}, {}, {1}}));
}

template <class Optim, class Options>
std::vector<at::Tensor> train_alone(const Options& options, int n_steps) {
  const auto parameters = make_parameters();
  Optim optimizer(parameters, options);
  for (int step = 0; step < n_steps; ++step) {
    set_gradients(parameters, step);
    optimizer.step();
  }
  return parameters;
}

template <class Optim, class Options>
void trains_as_alone(const Options& options) {
  const auto expected = train_alone<Optim>(options, 5);
  for (const int n : {1, 2, 3, 7}) {  // 7: more ranks than parameters
    for (const bool views : {false, true}) {
      world(n, [&](int rank) {
        const auto parameters = make_parameters();
        ZeroRedundancyOptimizer<Optim> optimizer(parameters, options, {.parameters_as_bucket_view = views});
        for (int step = 0; step < 5; ++step) {
          set_gradients(parameters, step);
          optimizer.step();
          expect_same_on_all_ranks(parameters);
        }
        expect_close(parameters, expected, base::cat("of ", n, " ranks"));
        const auto& owners = optimizer.owners()[0];
        EXPECT_EQ(static_cast<std::ptrdiff_t>(optimizer.state().size()),
                  std::count(owners.begin(), owners.end(), rank));
      });
    }
  }
}

TEST(ZeroRedundancyOptimizer, TrainsAsSgdAlone) {
  trains_as_alone<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
}
TEST(ZeroRedundancyOptimizer, TrainsAsAdamAlone) {
  trains_as_alone<Adam>(AdamOptions(0.05).amsgrad(true));
}
TEST(ZeroRedundancyOptimizer, TrainsAsAdamWAlone) {
  trains_as_alone<torch::optim::AdamW>(torch::optim::AdamWOptions(0.05));
}
TEST(ZeroRedundancyOptimizer, TrainsAsAdagradAlone) {
  trains_as_alone<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.05).initial_accumulator_value(0.1));
}
TEST(ZeroRedundancyOptimizer, TrainsAsRmspropAlone) {
  trains_as_alone<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.05).momentum(0.5).centered(true));
}

Groups two_groups(const std::vector<at::Tensor>& parameters) {
  Groups groups;
  groups.emplace_back(std::vector(parameters.begin(), parameters.begin() + 2));
  groups.emplace_back(std::vector(parameters.begin() + 2, parameters.end()),
                      std::make_unique<AdamOptions>(AdamOptions(0.01).weight_decay(0.1)));
  return groups;
}

template <class Optimizer>
void train_with_scheduler(Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
  torch::optim::StepLR scheduler(optimizer, 2, 0.5);
  for (int step = 0; step < 6; ++step) {
    set_gradients(parameters, step);
    optimizer.step();
    scheduler.step();
    if (step == 3) static_cast<AdamOptions&>(optimizer.param_groups()[1].options()).weight_decay(0);
  }
}

TEST(ZeroRedundancyOptimizer, TakesGroupsAndFollowsChangesOfTheirOptions) {
  const auto expected = make_parameters();
  Adam alone(two_groups(expected), AdamOptions(0.05));
  train_with_scheduler(alone, expected);
  for (const int n : {1, 2, 3}) {
    world(n, [&](int) {
      const auto parameters = make_parameters();
      ZeroAdam optimizer(two_groups(parameters), AdamOptions(0.05), {.parameters_as_bucket_view = n == 2});
      const auto* options = &optimizer.param_groups()[0].options();
      train_with_scheduler(optimizer, parameters);
      expect_close(parameters, expected);
      EXPECT_EQ(options, &optimizer.param_groups()[0].options());  // references to options stay good
    });
  }
}

TEST(ZeroRedundancyOptimizer, RunsTheClosureWithEverythingInItsPlace) {
  const auto expected = train_alone<Adam>(AdamOptions(0.05), 3);
  world(2, [&](int) {
    const auto parameters = make_parameters();
    ZeroAdam optimizer(parameters, AdamOptions(0.05));
    int n_states = 0;
    for (int step = 0; step < 3; ++step) {
      const auto loss = optimizer.step([&] {
        optimizer.zero_grad();
        for (const auto& parameter : parameters) EXPECT_FALSE(parameter.grad().defined());
        EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.05);
        n_states = static_cast<int>(optimizer.state().size());
        set_gradients(parameters, step);
        return at::full({}, static_cast<float>(step));
      });
      EXPECT_EQ(loss.item<float>(), static_cast<float>(step));
    }
    EXPECT_GT(n_states, 0);
    expect_close(parameters, expected);
    EXPECT_THROW(optimizer.step([]() -> at::Tensor { throw std::runtime_error("no loss today"); }),
                 std::runtime_error);
    EXPECT_EQ(static_cast<int>(optimizer.state().size()), n_states);  // back in their places
  });
}

TEST(ZeroRedundancyOptimizer, KeepsParametersInOneBucketPerRankWhenAsked) {
  world(3, [](int) {
    auto parameters = make_parameters();
    parameters[0] = drawn(9, {3, 4}).t().requires_grad_();
    parameters[3].requires_grad_(false);
    const auto before = parameters[0].detach().clone();
    const auto frozen = parameters[3].data_ptr();
    ZeroAdam optimizer(parameters, AdamOptions(0.05), {.parameters_as_bucket_view = true});
    expect_equal(parameters[0].detach(), before);
    EXPECT_EQ(parameters[0].stride(0), 1);
    EXPECT_TRUE(parameters[0].is_leaf() && parameters[0].requires_grad());
    EXPECT_EQ(parameters[3].data_ptr(), frozen);
    const auto& owners = optimizer.owners()[0];
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      for (std::size_t k = 0; k < i; ++k) {
        const bool together = owners[i] == owners[k] && i != 3 && k != 3;
        EXPECT_EQ(parameters[i].storage().is_alias_of(parameters[k].storage()), together)
            << i << " and " << k;
      }
    }
  });
}

TEST(ZeroRedundancyOptimizer, RebuildsItsBucketsWhenParametersAreFrozenOrThawed) {
  Warnings warnings("built anew");
  const auto train = [](auto& optimizer, const std::vector<at::Tensor>& parameters) {
    for (int step = 0; step < 6; ++step) {
      parameters[0].requires_grad_(step % 3 != 1);
      set_gradients(parameters, step);
      if (!parameters[0].requires_grad()) parameters[0].mutable_grad().reset();
      optimizer.step();
    }
  };
  const auto expected = make_parameters();
  Adam alone(expected, AdamOptions(0.05));
  train(alone, expected);
  world(2, [&](int) {
    const auto parameters = make_parameters();
    ZeroAdam optimizer(parameters, AdamOptions(0.05), {.parameters_as_bucket_view = true});
    train(optimizer, parameters);
    expect_close(parameters, expected);
    expect_same_on_all_ranks(parameters);
  });
  EXPECT_EQ(warnings.count(), 8);  // 4 changes on 2 ranks
}

TEST(ZeroRedundancyOptimizer, LeavesFrozenParametersAloneThoughTheyHaveAGradient) {
  for (const bool views : {false, true}) {
    world(2, [&](int) {
      const auto parameters = make_parameters();
      ZeroAdam optimizer(parameters, AdamOptions(0.05), {.parameters_as_bucket_view = views});
      set_gradients(parameters, 0);
      parameters[1].requires_grad_(false);
      const auto before = parameters[1].clone();
      const auto gradient = parameters[1].grad();
      optimizer.step();
      expect_equal(parameters[1], before);
      EXPECT_TRUE(parameters[1].grad().is_same(gradient));
    });
  }
}

TEST(ZeroRedundancyOptimizer, BumpsTheVersionsOfChangedParameters) {
  for (const bool views : {false, true}) {
    world(2, [&](int) {
      const auto parameters = make_parameters();
      ZeroAdam optimizer(parameters, AdamOptions(0.05), {.parameters_as_bucket_view = views});
      std::vector<std::uint32_t> versions;
      for (const auto& parameter : parameters) versions.push_back(parameter._version());
      set_gradients(parameters, 0);
      optimizer.step();
      for (std::size_t i = 0; i < parameters.size(); ++i)
        EXPECT_GT(parameters[i]._version(), versions[i]) << i;
    });
  }
}

TEST(ZeroRedundancyOptimizer, HasTheWholeStateOnOneRankOnceConsolidated) {
  const auto alone_parameters = make_parameters();
  Adam alone(two_groups(alone_parameters), AdamOptions(0.05));
  for (int step = 0; step < 3; ++step) {
    set_gradients(alone_parameters, step);
    alone.step();
  }
  const auto expected = get_optimizer_state_dict(alone);
  for (const int n : {1, 2, 3}) {
    world(n, [&](int rank) {
      const auto parameters = make_parameters();
      ZeroAdam optimizer(two_groups(parameters), AdamOptions(0.05));
      for (int step = 0; step < 3; ++step) {
        set_gradients(parameters, step);
        optimizer.step();
      }
      refused([&] { optimizer.state_dict(); }, "consolidate_state_dict(to = ");
      refused([&] { optimizer.consolidate_state_dict(n); }, "is not a rank of the group");
      const int to = n - 1;
      optimizer.consolidate_state_dict(to);
      if (rank != to) {
        refused([&] { optimizer.state_dict(); }, "consolidate_state_dict");
      } else {
        const auto dict = optimizer.state_dict();
        ASSERT_EQ(dict.state.size(), expected.state.size());
        for (const auto& [number, values] : expected.state) {
          const auto& ours = dict.state.at(number);
          EXPECT_EQ(encode(ours.at("step")), encode(values.at("step")));
          expect_near(std::get<at::Tensor>(ours.at("exp_avg")), std::get<at::Tensor>(values.at("exp_avg")),
                      "exp_avg");
        }
        ASSERT_EQ(dict.param_groups.size(), 2U);
        for (std::size_t g = 0; g < 2; ++g) {
          EXPECT_EQ(dict.param_groups[g].params, expected.param_groups[g].params);
          EXPECT_EQ(encode(dict.param_groups[g].options), encode(expected.param_groups[g].options));
        }
      }
      optimizer.step();  // what was gathered is now of the past
      refused([&] { optimizer.state_dict(); }, "after the last step");
    });
  }
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> copies;
  for (const auto& parameter : parameters) copies.push_back(parameter.detach().clone().requires_grad_());
  return copies;
}

void train(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters, int from, int to) {
  for (int step = from; step < to; ++step) {
    set_gradients(parameters, step);
    optimizer.step();
  }
}

TEST(ZeroRedundancyOptimizer, ExchangesItsStateWithThePlainOptimizer) {
  const auto expected = make_parameters();
  Adam alone(expected, AdamOptions(0.05));
  train(alone, expected, 0, 3);
  const auto at_three = copies_of(expected);
  std::stringstream saved_alone;
  torch::save(alone, saved_alone);
  const std::string alone_bytes = saved_alone.str();
  train(alone, expected, 3, 6);

  world(3, [&](int rank) {
    // From the plain one, by a file, to shares; and back.
    const auto parameters = copies_of(at_three);
    ZeroAdam optimizer(parameters, AdamOptions(9), {.parameters_as_bucket_view = true});
    std::stringstream file(alone_bytes);
    torch::load(optimizer, file);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.05);
    EXPECT_LT(optimizer.state().size(), 5U);
    train(optimizer, parameters, 3, 5);
    optimizer.consolidate_state_dict(1);
    if (rank == 1) {
      const auto later = copies_of(parameters);
      Adam plain(later, AdamOptions(9));
      std::stringstream back;
      torch::save(optimizer, back);
      torch::load(plain, back);
      train(plain, later, 5, 6);
      expect_close(later, expected);
    }
    barrier();
    train(optimizer, parameters, 5, 6);
    expect_close(parameters, expected);
  });
}

TEST(ZeroRedundancyOptimizer, RefusesAStateThatDoesNotFitAndKeepsItsOwn) {
  world(2, [](int) {
    const auto parameters = make_parameters();
    ZeroAdam optimizer(parameters, AdamOptions(0.05));
    train(optimizer, parameters, 0, 1);
    const auto n_states = optimizer.state().size();
    refused([&] { optimizer.load_state_dict({}); }, "0 parameter groups, the optimizer 1");
    OptimizerStateDict dict{.param_groups = {{.params = {0, 1, 2, 3, 4}}}};
    refused([&] { optimizer.load_state_dict(dict); }, "not of this optimizer");
    EXPECT_EQ(optimizer.state().size(), n_states);
    train(optimizer, parameters, 1, 2);
  });
}

TEST(ZeroRedundancyOptimizer, LoadsAStateThatLacksParametersAsIfTheyWereNew) {
  world(2, [](int) {
    const auto parameters = make_parameters();
    ZeroRedundancyOptimizer<torch::optim::Adagrad> optimizer(parameters, torch::optim::AdagradOptions(0.05));
    train(optimizer, parameters, 0, 1);
    std::vector<OptimizerStateDict> dict(1);
    optimizer.consolidate_state_dict();
    if (get_rank() == 0) dict[0] = optimizer.state_dict();
    broadcast_object_list(dict);
    ASSERT_EQ(dict[0].state.size(), 5U);
    dict[0].state.clear();
    optimizer.load_state_dict(dict[0]);
    train(optimizer, parameters, 1, 2);
    for (const auto& [key, state] : optimizer.state())
      EXPECT_EQ(static_cast<torch::optim::AdagradParamState&>(*state).step(), 1);
  });
}

TEST(ZeroRedundancyOptimizer, TakesFurtherGroupsWhileTraining) {
  for (const bool through_base : {false, true}) {
    const auto run = [&](auto& optimizer, const std::vector<at::Tensor>& parameters) {
      const std::vector first(parameters.begin(), parameters.begin() + 3);
      train(optimizer, first, 0, 2);
      const OptimizerParamGroup more(std::vector(parameters.begin() + 3, parameters.end()),
                                     std::make_unique<AdamOptions>(0.2));
      if (through_base) {
        static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(more);
      } else {
        optimizer.add_param_group(more);
      }
      train(optimizer, parameters, 2, 5);
    };
    const auto first_of = [](const std::vector<at::Tensor>& parameters) {
      return std::vector(parameters.begin(), parameters.begin() + 3);
    };
    const auto expected = make_parameters();
    Adam alone(first_of(expected), AdamOptions(0.05));
    run(alone, expected);
    for (const int n : {1, 2, 3}) {
      world(n, [&](int) {
        const auto parameters = make_parameters();
        ZeroAdam optimizer(first_of(parameters), AdamOptions(0.05), {.parameters_as_bucket_view = n == 3});
        const auto owners = optimizer.owners();
        run(optimizer, parameters);
        expect_close(parameters, expected);
        expect_same_on_all_ranks(parameters);
        EXPECT_EQ(optimizer.owners()[0], owners[0]);
        refused([&] { optimizer.add_param_group(OptimizerParamGroup({parameters[0]})); }, "was given before");
        EXPECT_EQ(optimizer.param_groups().size(), 2U);
      });
    }
  }
}

TEST(ZeroRedundancyOptimizer, RefusesParametersItCannotShare) {
  world(2, [](int) {
    const auto bad = [](const std::vector<at::Tensor>& parameters, const char* words) {
      refused([&] { ZeroAdam optimizer(parameters, AdamOptions(0.1)); }, words);
    };
    const auto good = at::ones({2}).requires_grad_();
    bad({}, "no parameters");
    bad({good, at::Tensor()}, "parameter 1 of group 0 is an undefined tensor");
    bad({good, at::ones({2}, at::kDouble)}, "one optimizer per type");
    bad({good, at::ones({2}).to_sparse()}, "of one dense type");
    bad({good, good}, "was given before");
    bad({good, good * 2}, "not a leaf");
    refused([] { ZeroAdam optimizer(Groups{}, AdamOptions(0.1)); }, "no parameters");
    EXPECT_THROW(ZeroAdam({good}, AdamOptions(-1)), c10::Error);  // as torch says it
  });
  world(3, [](int rank) {
    const auto pair = new_group({0, 2});
    const auto make = [&] { return ZeroAdam(make_parameters(), AdamOptions(0.1), {.group = pair}); };
    if (rank == 1) {
      refused([&] { make(); }, "not a member");
    } else {
      EXPECT_EQ(make().group(), pair);
    }
  });
}

TEST(ZeroRedundancyOptimizer, RefusesToStepWhenAGroupsParametersWereExchanged) {
  world(2, [](int) {
    ZeroAdam optimizer(make_parameters(), AdamOptions(0.1));
    optimizer.param_groups()[0].params().pop_back();
    refused([&] { optimizer.step(); }, "only add_param_group may change them");
  });
}

TEST(ZeroRedundancyOptimizer, WorksInAGroupOfSomeRanks) {
  const auto expected = train_alone<Adam>(AdamOptions(0.05), 3);
  world(3, [&](int rank) {
    const auto pair = new_group({1, 2});
    if (rank == 0) return;
    const auto parameters = make_parameters();
    ZeroAdam optimizer(parameters, AdamOptions(0.05), {.group = pair, .parameters_as_bucket_view = true});
    train(optimizer, parameters, 0, 3);
    expect_close(parameters, expected);
    optimizer.consolidate_state_dict(1);
    if (rank == 2) {
      EXPECT_EQ(optimizer.state_dict().state.size(), 5U);
    }
  });
}

}  // namespace
}  // namespace lockstep::testing
