#include "lockstep/optim/named_optimizer.h"

#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>

#include "lockstep/optim/optim_testing.h"

namespace lockstep::testing {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using Names = torch::OrderedDict<std::string, at::Tensor>;

Names named(const std::vector<at::Tensor>& parameters) {
  Names names;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    names.insert(base::cat("layer", i, ".weight"), parameters[i]);
  return names;
}

void train(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters, int from, int to) {
  for (int step = from; step < to; ++step) {
    set_gradients(parameters, step);
    optimizer.step();
  }
}

TEST(NamedOptimizer, KeysItsStateByNameAndFindsItAgainInAnotherOrder) {
  const auto expected = make_parameters();
  Adam alone(expected, AdamOptions(0.05));
  train(alone, expected, 0, 6);

  const auto parameters = make_parameters();
  NamedOptimizer optimizer(named(parameters), Adam(parameters, AdamOptions(0.05)));
  train(optimizer, parameters, 0, 3);
  const NamedStateDict dict = decode<NamedStateDict>(encode(optimizer.state_dict()));
  EXPECT_EQ(dict.state.size(), 5U);
  EXPECT_EQ(std::get<at::Tensor>(dict.state.at("layer2.weight").at("exp_avg")).sizes(),
            parameters[2].sizes());
  EXPECT_EQ(dict.param_groups.at(0).params.at(4), "layer4.weight");

  // Two groups, reversed, without one parameter: numbers would not do.
  std::vector<at::Tensor> copies;
  for (const auto& parameter : parameters) copies.push_back(parameter.detach().clone().requires_grad_());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{copies[4], copies[2]});
  groups.emplace_back(std::vector{copies[1], copies[0]});
  NamedOptimizer other(named(copies), std::make_unique<Adam>(groups, AdamOptions(9)));
  other.load_state_dict(dict);
  EXPECT_EQ(other.param_groups()[1].options().get_lr(), 0.05);
  train(other, copies, 3, 6);
  for (const std::size_t i : {0, 1, 2, 4})
    expect_close({copies[i]}, {expected[i]}, base::cat("parameter ", i));
}

TEST(NamedOptimizer, SavesItselfLikeTheOptimizerItWraps) {
  const auto parameters = make_parameters();
  NamedOptimizer optimizer(named(parameters), Adam(parameters, AdamOptions(0.05)));
  train(optimizer, parameters, 0, 2);
  std::stringstream file;
  torch::save(optimizer, file);
  Adam plain(parameters, AdamOptions(9));
  torch::load(plain, file);
  EXPECT_EQ(plain.state().size(), 5U);
  std::stringstream back;
  torch::save(plain, back);
  torch::load(optimizer, back);
  EXPECT_EQ(optimizer.state().size(), 5U);
}

TEST(NamedOptimizer, RefusesWhatHasNoName) {
  const auto parameters = make_parameters();
  refused([&] { NamedOptimizer(named(parameters), std::unique_ptr<torch::optim::Optimizer>()); },
          "no optimizer");
  refused([&] { NamedOptimizer(Names(), Adam(parameters, AdamOptions(1))); }, "of sizes [4, 3] has no name");
  NamedOptimizer optimizer(named(parameters), Adam(parameters, AdamOptions(1)));
  train(optimizer, parameters, 0, 1);
  auto dict = optimizer.state_dict();
  dict.param_groups[0].params.pop_back();
  refused([&] { optimizer.load_state_dict(dict); }, "layer4.weight");
  refused([&] { optimizer.load_state_dict({}); }, "no group of the state dict has all");
  EXPECT_EQ(optimizer.state().size(), 5U);
  optimizer.add_param_group({{drawn(3, {2}).requires_grad_()}});
  refused([&] { optimizer.state_dict(); }, "has no name");
}

}  // namespace
}  // namespace lockstep::testing
