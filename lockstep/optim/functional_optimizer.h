// Optimizers without groups and without .grad: gradients are arguments, one list for all parameters or one at
// a time. For code that manages its own gradients: hooks that step inside backward, distributed autograd,
// gradients of another type than the parameter's.
//
//   lockstep::FunctionalAdam adam(parameters, torch::optim::AdamOptions(1e-3));
//   adam.step(torch::autograd::grad({loss}, parameters));
//
// Each takes the options of its torch::optim class, or those below where libtorch has none in C++, and
// computes what that class does. Thread safety: one thread at a time. Ownership: keeps its parameters alive.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/optim/functional_options.h"
#include "lockstep/optim/optimizer_state.h"

namespace lockstep {

struct FunctionalOptions {
  bool maximize = false;                // gradient ascent
  bool allow_empty_param_list = false;  // for use with step_param only
};

// The interface. For a custom rule derive from it, implement update(), and call register_functional_optim.
class FunctionalOptimizer {
 public:
  virtual ~FunctionalOptimizer() = default;
  FunctionalOptimizer(const FunctionalOptimizer&) = delete;
  FunctionalOptimizer& operator=(const FunctionalOptimizer&) = delete;

  // gradients[i] is for parameters()[i]; an undefined one skips the parameter. Raises kUsage, changing
  // nothing, when the lists differ in length or a gradient differs from its parameter in size; kUnsupported
  // for one that is not dense.
  void step(const std::vector<at::Tensor>& gradients);
  // Steps one parameter, which need not be in the list. No-op for an undefined gradient. Raises as step.
  void step_param(const at::Tensor& parameter, const at::Tensor& gradient);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // The state of a parameter ("exp_avg", "step"); empty before its first step.
  const StateValues& state_of(const at::Tensor& parameter) const;

 protected:
  // Raises kUsage when the list is empty and need not be, or holds an undefined tensor.
  FunctionalOptimizer(std::vector<at::Tensor> parameters, FunctionalOptions options);
  // One step of one parameter, without autograd. Neither tensor requires a gradient; the gradient must not be
  // written.
  virtual void update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state) = 0;

 private:
  struct Entry {
    at::Tensor parameter;  // keeps its address, the key, from being reused
    StateValues values;
  };
  const std::vector<at::Tensor> parameters_;
  const FunctionalOptions options_;
  std::unordered_map<const void*, Entry> state_;
};

template <class Options>
class Functional final : public FunctionalOptimizer {
 public:
  // Raises kUsage for options out of range.
  explicit Functional(std::vector<at::Tensor> parameters, Options options = {},
                      FunctionalOptions functional = {})
      : FunctionalOptimizer(std::move(parameters), functional), options_(std::move(options)) {
    check();
  }
  // May be changed between steps.
  Options& options() { return options_; }

 private:
  void check() const;
  void update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state) override;
  Options options_;
};

using FunctionalSGD = Functional<torch::optim::SGDOptions>;
using FunctionalAdam = Functional<torch::optim::AdamOptions>;
using FunctionalAdamW = Functional<torch::optim::AdamWOptions>;
using FunctionalAdagrad = Functional<torch::optim::AdagradOptions>;
using FunctionalRMSprop = Functional<torch::optim::RMSpropOptions>;
using FunctionalAdadelta = Functional<AdadeltaOptions>;
using FunctionalRprop = Functional<RpropOptions>;
using FunctionalAdamax = Functional<AdamaxOptions>;

// Defined in functional_rules.cpp.
template <>
void FunctionalSGD::check() const;
template <>
void FunctionalSGD::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state);
template <>
void FunctionalAdam::check() const;
template <>
void FunctionalAdam::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state);
template <>
void FunctionalAdamW::check() const;
template <>
void FunctionalAdamW::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state);
template <>
void FunctionalAdagrad::check() const;
template <>
void FunctionalAdagrad::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state);
template <>
void FunctionalRMSprop::check() const;
template <>
void FunctionalRMSprop::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state);
template <>
void FunctionalAdadelta::check() const;
template <>
void FunctionalAdadelta::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state);
template <>
void FunctionalRprop::check() const;
template <>
void FunctionalRprop::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state);
template <>
void FunctionalAdamax::check() const;
template <>
void FunctionalAdamax::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state);

// The functional optimizer for options of that class. Raises kUsage, naming the class, when none is
// registered.
std::unique_ptr<FunctionalOptimizer> as_functional_optim(std::vector<at::Tensor> parameters,
                                                         const torch::optim::OptimizerOptions& options,
                                                         FunctionalOptions functional = {});

using MakeFunctional = std::function<std::unique_ptr<FunctionalOptimizer>(
    std::vector<at::Tensor> parameters, const torch::optim::OptimizerOptions& options,
    FunctionalOptions functional)>;
// The eight above are preregistered. Raises kUsage when the class is already registered. Thread safety: any
// thread.
void register_functional_optim(std::type_index options_class, MakeFunctional make);
template <class Options>
void register_functional_optim(MakeFunctional make) {
  register_functional_optim(std::type_index(typeid(Options)), std::move(make));
}

}  // namespace lockstep
