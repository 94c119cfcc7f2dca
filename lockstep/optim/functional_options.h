// Options of optimizers that torch has only in Python, in the style of torch::optim; defaults are Python's.
// Thread safety: values, no shared state.
#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <tuple>

namespace lockstep {

struct AdadeltaOptions : public torch::optim::OptimizerCloneableOptions<AdadeltaOptions> {
  AdadeltaOptions(double lr = 1.0) : lr_(lr) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(double, rho) = 0.9;
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_decay) = 0;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

struct RpropOptions : public torch::optim::OptimizerCloneableOptions<RpropOptions> {
  RpropOptions(double lr = 1e-2) : lr_(lr) {}
  using Pair = std::tuple<double, double>;
  TORCH_ARG(double, lr);                          // initial step size
  TORCH_ARG(Pair, etas) = Pair(0.5, 1.2);         // factors with and without a change of sign
  TORCH_ARG(Pair, step_sizes) = Pair(1e-6, 50.);  // bounds

 public:
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

struct AdamaxOptions : public torch::optim::OptimizerCloneableOptions<AdamaxOptions> {
  AdamaxOptions(double lr = 2e-3) : lr_(lr) {}
  using Pair = std::tuple<double, double>;
  TORCH_ARG(double, lr);
  TORCH_ARG(Pair, betas) = Pair(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;

 public:
  double get_lr() const override { return lr(); }
  void set_lr(const double value) override { lr(value); }
};

}  // namespace lockstep
