#include "lockstep/optim/functional_optimizer.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "lockstep/optim/optim_testing.h"

namespace lockstep::testing {
namespace {

constexpr int kSteps = 5;

// In the third step the second parameter has no gradient.
std::vector<at::Tensor> gradients_at(int step, const std::vector<at::Tensor>& parameters) {
  set_gradients(parameters, step);
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
  if (step == 2) gradients[1].reset();
  return gradients;
}

std::vector<at::Tensor> train(FunctionalOptimizer& optimizer) {
  for (int step = 0; step < kSteps; ++step) {
    const auto gradients = gradients_at(step, optimizer.parameters());
    for (const auto& parameter : optimizer.parameters())
      parameter.mutable_grad().reset();  // .grad is never read
    optimizer.step(gradients);
  }
  return optimizer.parameters();
}

template <class Optim, class Options>
void agrees_with_torch(const Options& options) {
  const auto expected = make_parameters();
  Optim reference(expected, options);
  for (int step = 0; step < kSteps; ++step) {
    const auto gradients = gradients_at(step, expected);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i].mutable_grad() = gradients[i];
    reference.step();
  }
  Functional<Options> optimizer(make_parameters(), options);
  expect_close(train(optimizer), expected, "the class");
  const auto found = as_functional_optim(make_parameters(), options);
  expect_close(train(*found), expected, "by its options");
}

TEST(FunctionalSGD, AgreesWithTorch) {
  using torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  agrees_with_torch<SGD>(Options(0.1));
  agrees_with_torch<SGD>(Options(0.1).momentum(0.9).dampening(0.2).weight_decay(0.1));
  agrees_with_torch<SGD>(Options(0.1).momentum(0.9).nesterov(true));
}

TEST(FunctionalAdam, AgreesWithTorch) {
  using torch::optim::Adam;
  using Options = torch::optim::AdamOptions;
  agrees_with_torch<Adam>(Options(0.05));
  agrees_with_torch<Adam>(Options(0.05).betas({0.8, 0.9}).eps(1e-4).weight_decay(0.1).amsgrad(true));
}

TEST(FunctionalAdamW, AgreesWithTorch) {
  using torch::optim::AdamW;
  using Options = torch::optim::AdamWOptions;
  agrees_with_torch<AdamW>(Options(0.05));
  agrees_with_torch<AdamW>(Options(0.05).betas({0.8, 0.9}).weight_decay(0.3).amsgrad(true));
}

TEST(FunctionalAdagrad, AgreesWithTorch) {
  using torch::optim::Adagrad;
  using Options = torch::optim::AdagradOptions;
  agrees_with_torch<Adagrad>(Options(0.05));
  agrees_with_torch<Adagrad>(
      Options(0.05).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.2).eps(1e-3));
}

TEST(FunctionalRMSprop, AgreesWithTorch) {
  using torch::optim::RMSprop;
  using Options = torch::optim::RMSpropOptions;
  agrees_with_torch<RMSprop>(Options(0.05));
  agrees_with_torch<RMSprop>(
      Options(0.05).alpha(0.9).eps(1e-3).weight_decay(0.1).momentum(0.7).centered(true));
}

// libtorch has no such class in C++: every element by the formula, in double.
struct Element {
  double value;
  double a = 0;  // the two things it remembers
  double b = 0;
  int step = 0;
};

double element(const at::Tensor& tensor, std::size_t k) {
  return tensor.detach().reshape(-1)[static_cast<std::int64_t>(k)].item<double>();
}

template <class Options, class Formula>
void agrees_with_formula(const Options& options, double first_b, const Formula& formula) {
  Functional<Options> optimizer(make_parameters(), options);
  const std::vector<at::Tensor>& parameters = optimizer.parameters();
  std::vector<std::vector<Element>> elements(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    for (std::size_t k = 0; k < static_cast<std::size_t>(parameters[i].numel()); ++k)
      elements[i].push_back({.value = element(parameters[i], k), .b = first_b});
  }
  for (int step = 0; step < kSteps; ++step) {
    const auto gradients = gradients_at(step, parameters);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      for (std::size_t k = 0; k < elements[i].size(); ++k) {
        ++elements[i][k].step;
        formula(elements[i][k], element(gradients[i], k));
      }
    }
    optimizer.step(gradients);
  }
  for (std::size_t i = 0; i < elements.size(); ++i) {
    for (std::size_t k = 0; k < elements[i].size(); ++k) {
      const double actual = element(parameters[i], k);
      EXPECT_NEAR(actual, elements[i][k].value, 2e-6 * std::max(1.0, std::abs(actual))) << i << " " << k;
    }
  }
}

TEST(FunctionalAdadelta, AgreesWithItsFormula) {
  for (const double decay : {0.0, 0.1}) {
    agrees_with_formula(AdadeltaOptions(0.7).rho(0.8).eps(1e-3).weight_decay(decay), 0,
                        [&](Element& x, double g) {
                          g += decay * x.value;
                          x.a = 0.8 * x.a + 0.2 * g * g;
                          const double change = std::sqrt(x.b + 1e-3) / std::sqrt(x.a + 1e-3) * g;
                          x.b = 0.8 * x.b + 0.2 * change * change;
                          x.value -= 0.7 * change;
                        });
  }
}

TEST(FunctionalRprop, AgreesWithItsFormula) {
  agrees_with_formula(RpropOptions(0.1).etas({0.4, 1.3}).step_sizes({0.05, 0.15}), 0.1,
                      [](Element& x, double g) {
                        const double agreement = g * x.a;
                        if (agreement > 0) x.b *= 1.3;
                        if (agreement < 0) x.b *= 0.4;
                        x.b = std::min(0.15, std::max(0.05, x.b));
                        if (agreement < 0) g = 0;
                        if (g != 0) x.value -= (g > 0 ? 1 : -1) * x.b;
                        x.a = g;
                      });
}

TEST(FunctionalAdamax, AgreesWithItsFormula) {
  for (const double decay : {0.0, 0.1}) {
    agrees_with_formula(AdamaxOptions(0.05).betas({0.8, 0.9}).eps(1e-3).weight_decay(decay), 0,
                        [&](Element& x, double g) {
                          g += decay * x.value;
                          x.a = 0.8 * x.a + 0.2 * g;
                          x.b = std::max(0.9 * x.b, std::abs(g) + 1e-3);
                          x.value -= 0.05 / (1 - std::pow(0.8, x.step)) * x.a / x.b;
                        });
  }
}

TEST(FunctionalOptimizer, MaximizesWhenRequested) {
  const auto parameter = at::ones({2}).requires_grad_();
  FunctionalSGD optimizer({parameter}, torch::optim::SGDOptions(0.5), {.maximize = true});
  optimizer.step({at::ones({2})});
  expect_equal(parameter.detach(), at::full({2}, 1.5F));
}

TEST(FunctionalOptimizer, StepsOneParameterAtATimeWithAStateOfItsOwn) {
  const auto together = make_parameters();
  FunctionalAdam all(together, torch::optim::AdamOptions(0.05));
  train(all);
  const auto apart = make_parameters();
  FunctionalAdam one({}, torch::optim::AdamOptions(0.05), {.allow_empty_param_list = true});
  for (int step = 0; step < kSteps; ++step) {
    const auto gradients = gradients_at(step, apart);
    for (std::size_t i = apart.size(); i-- > 0;) one.step_param(apart[i], gradients[i]);
  }
  for (std::size_t i = 0; i < apart.size(); ++i) expect_equal(apart[i].detach(), together[i].detach());
  EXPECT_EQ(std::get<std::int64_t>(one.state_of(apart[0]).at("step")), kSteps);
  EXPECT_EQ(std::get<std::int64_t>(one.state_of(apart[1]).at("step")), kSteps - 1);
  EXPECT_TRUE(one.state_of(at::ones({1})).empty());
  EXPECT_TRUE(apart[0].is_leaf() && apart[0].requires_grad());
}

TEST(FunctionalOptimizer, FollowsChangesOfItsOptions) {
  const auto parameter = at::ones({2});
  FunctionalSGD optimizer({parameter}, torch::optim::SGDOptions(0.5));
  optimizer.options().lr(0.25);
  optimizer.step({at::ones({2})});
  expect_equal(parameter, at::full({2}, 0.75F));
}

TEST(FunctionalOptimizer, RefusesListsAndOptionsThatMakeNoSense) {
  using torch::optim::AdamOptions;
  using torch::optim::SGDOptions;
  const auto parameter = at::ones({2});
  refused([] { FunctionalSGD({}, SGDOptions(0.1)); }, "no parameters");
  refused(
      [&] {
        FunctionalSGD({parameter, at::Tensor()}, SGDOptions(0.1));
      },
      "parameter 1 is an undefined tensor");
  FunctionalSGD optimizer({parameter, parameter.clone()}, SGDOptions(0.1));
  refused([&] { optimizer.step({at::ones({2})}); }, "1 gradients for 2 parameters");
  refused(
      [&] {
        optimizer.step({at::ones({2}), at::ones({3})});
      },
      "gradient 1 has sizes [3], its parameter [2]");
  expect_equal(parameter, at::ones({2}));  // nothing was stepped
  EXPECT_EQ(caught([&] { optimizer.step_param(parameter, at::ones({2}).to_sparse()); }).kind,
            ErrorKind::kUnsupported);

  refused([&] { FunctionalSGD({parameter}, SGDOptions(-1)); }, "lr");
  refused([&] { FunctionalSGD({parameter}, SGDOptions(1).nesterov(true)); }, "nesterov");
  refused([&] { FunctionalAdam({parameter}, AdamOptions(1).betas({1.0, 0.9})); }, "the first beta");
  refused([&] { FunctionalAdamW({parameter}, torch::optim::AdamWOptions(1).eps(-1)); }, "eps");
  refused([&] { FunctionalAdagrad({parameter}, torch::optim::AdagradOptions(1).lr_decay(-1)); }, "lr_decay");
  refused([&] { FunctionalRMSprop({parameter}, torch::optim::RMSpropOptions(1).alpha(-1)); }, "alpha");
  refused([&] { FunctionalAdadelta({parameter}, AdadeltaOptions(1).rho(2)); }, "rho");
  refused([&] { FunctionalRprop({parameter}, RpropOptions(1).etas({0.5, 0.9})); }, "the second eta");
  refused([&] { FunctionalAdamax({parameter}, AdamaxOptions(1).betas({0.5, -1.0})); }, "the second beta");
}

struct StillOptions : torch::optim::OptimizerCloneableOptions<StillOptions> {};

class Still final : public FunctionalOptimizer {
 public:
  explicit Still(std::vector<at::Tensor> parameters) : FunctionalOptimizer(std::move(parameters), {}) {}

 private:
  void update(const at::Tensor&, const at::Tensor&, StateValues& state) override { state["seen"] = true; }
};

TEST(FunctionalRegistry, TakesRulesOfTheUsersOwn) {
  const auto parameter = at::ones({2});
  refused([&] { as_functional_optim({parameter}, StillOptions()); }, "StillOptions");
  const MakeFunctional make = [](std::vector<at::Tensor> parameters, const torch::optim::OptimizerOptions&,
                                 FunctionalOptions) {
    return std::make_unique<Still>(std::move(parameters));
  };
  register_functional_optim<StillOptions>(make);
  const auto optimizer = as_functional_optim({parameter}, StillOptions());
  optimizer->step({at::ones({2})});
  EXPECT_TRUE(std::get<bool>(optimizer->state_of(parameter).at("seen")));
  refused([&] { register_functional_optim<StillOptions>(make); }, "already");
  refused([&] { register_functional_optim<torch::optim::SGDOptions>(make); }, "already");
}

}  // namespace
}  // namespace lockstep::testing
