// The rules of the functional optimizers, each as its paper or torch's documentation states it.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "lockstep/base/detail/raise.h"
#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/functional_optimizer.h"

namespace lockstep {
namespace {

// A remembered tensor; of value `first` before the first step. The keys are those of torch's state dicts. The
// reference stays valid while others are added: StateValues is a std::map.
at::Tensor& remembered(StateValues& state, const char* key, const at::Tensor& like, double first = 0) {
  const auto found = state.find(key);
  if (found != state.end()) return std::get<at::Tensor>(found->second);
  return std::get<at::Tensor>(state.emplace(key, at::full_like(like, first)).first->second);
}

double count_step(StateValues& state) {
  auto& step = std::get<std::int64_t>(state.try_emplace("step", std::int64_t{0}).first->second);
  return static_cast<double>(++step);
}

// Does not write to the gradient, which is the caller's; without decay the result is the gradient itself.
at::Tensor decayed(const at::Tensor& gradient, const at::Tensor& parameter, double weight_decay) {
  return weight_decay == 0 ? gradient : gradient.add(parameter, weight_decay);
}

// mean <- weight * mean + (1 - weight) * value
void blend(at::Tensor& mean, const at::Tensor& value, double weight) {
  mean.mul_(weight).add_(value, 1 - weight);
}
void blend_square(at::Tensor& mean, const at::Tensor& value, double weight) {
  mean.mul_(weight).addcmul_(value, value, 1 - weight);
}

void check_range(bool good, const char* optimizer, const char* option, double value) {
  if (!good)
    base::raise(ErrorKind::kUsage, base::cat(optimizer, ": ", option, " is out of its range: ", value));
}
void check_not_negative(const char* optimizer, const char* option, double value) {
  check_range(value >= 0, optimizer, option, value);
}
void check_betas(const char* optimizer, const std::tuple<double, double>& betas) {
  check_range(std::get<0>(betas) >= 0 && std::get<0>(betas) < 1, optimizer, "the first beta",
              std::get<0>(betas));
  check_range(std::get<1>(betas) >= 0 && std::get<1>(betas) < 1, optimizer, "the second beta",
              std::get<1>(betas));
}

// Adam and AdamW differ in what becomes of weight_decay, before this.
template <class Options>
void adam(const Options& options, const at::Tensor& parameter, const at::Tensor& gradient,
          StateValues& state) {
  const auto [beta1, beta2] = options.betas();
  const double step = count_step(state);
  auto& mean = remembered(state, "exp_avg", parameter);
  auto& square = remembered(state, "exp_avg_sq", parameter);
  blend(mean, gradient, beta1);
  blend_square(square, gradient, beta2);
  // A handle, not a copy, so nothing below may write to it in place; sqrt() makes the new tensor.
  at::Tensor scale = square;
  if (options.amsgrad()) {
    auto& largest = remembered(state, "max_exp_avg_sq", parameter);
    largest.copy_(at::maximum(largest, square));
    scale = largest;
  }
  const double correction1 = 1 - std::pow(beta1, step);
  const double correction2 = 1 - std::pow(beta2, step);
  const at::Tensor divisor = scale.sqrt().div_(std::sqrt(correction2)).add_(options.eps());
  parameter.addcdiv_(mean, divisor, -options.lr() / correction1);
}

template <class Options>
void check_adam(const char* name, const Options& options) {
  check_not_negative(name, "lr", options.lr());
  check_not_negative(name, "eps", options.eps());
  check_not_negative(name, "weight_decay", options.weight_decay());
  check_betas(name, options.betas());
}

}  // namespace

template <>
void FunctionalSGD::check() const {
  check_not_negative("FunctionalSGD", "lr", options_.lr());
  check_not_negative("FunctionalSGD", "momentum", options_.momentum());
  check_not_negative("FunctionalSGD", "weight_decay", options_.weight_decay());
  if (options_.nesterov() && (options_.momentum() <= 0 || options_.dampening() != 0))
    base::raise(ErrorKind::kUsage, "FunctionalSGD: nesterov needs a momentum and no dampening");
}

template <>
void FunctionalSGD::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state) {
  at::Tensor direction = decayed(gradient, parameter, options_.weight_decay());
  if (options_.momentum() != 0) {
    const auto [entry, is_first] = state.try_emplace("momentum_buffer", at::Tensor());
    auto& velocity = std::get<at::Tensor>(entry->second);
    if (is_first) {
      // A copy: without weight decay `direction` is the caller's gradient, which the next pass overwrites.
      velocity = direction.clone();
    } else {
      velocity.mul_(options_.momentum()).add_(direction, 1 - options_.dampening());
    }
    direction = options_.nesterov() ? direction.add(velocity, options_.momentum()) : velocity;
  }
  parameter.add_(direction, -options_.lr());
}

template <>
void FunctionalAdam::check() const {
  check_adam("FunctionalAdam", options_);
}
template <>
void FunctionalAdam::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state) {
  adam(options_, parameter, decayed(gradient, parameter, options_.weight_decay()), state);
}

template <>
void FunctionalAdamW::check() const {
  check_adam("FunctionalAdamW", options_);
}
template <>
void FunctionalAdamW::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state) {
  // Decoupled: the decay does not go through the moments. This is all that differs from Adam.
  parameter.mul_(1 - options_.lr() * options_.weight_decay());
  adam(options_, parameter, gradient, state);
}

template <>
void FunctionalAdagrad::check() const {
  check_not_negative("FunctionalAdagrad", "lr", options_.lr());
  check_not_negative("FunctionalAdagrad", "lr_decay", options_.lr_decay());
  check_not_negative("FunctionalAdagrad", "eps", options_.eps());
  check_not_negative("FunctionalAdagrad", "weight_decay", options_.weight_decay());
  check_not_negative("FunctionalAdagrad", "initial_accumulator_value", options_.initial_accumulator_value());
}
template <>
void FunctionalAdagrad::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state) {
  const double step = count_step(state);
  const at::Tensor direction = decayed(gradient, parameter, options_.weight_decay());
  auto& sum = remembered(state, "sum", parameter, options_.initial_accumulator_value());
  sum.addcmul_(direction, direction);
  const double rate = options_.lr() / (1 + (step - 1) * options_.lr_decay());
  parameter.addcdiv_(direction, sum.sqrt().add_(options_.eps()), -rate);
}

template <>
void FunctionalRMSprop::check() const {
  check_not_negative("FunctionalRMSprop", "lr", options_.lr());
  check_not_negative("FunctionalRMSprop", "eps", options_.eps());
  check_not_negative("FunctionalRMSprop", "alpha", options_.alpha());
  check_not_negative("FunctionalRMSprop", "momentum", options_.momentum());
  check_not_negative("FunctionalRMSprop", "weight_decay", options_.weight_decay());
}
template <>
void FunctionalRMSprop::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state) {
  count_step(state);
  const at::Tensor direction = decayed(gradient, parameter, options_.weight_decay());
  auto& square = remembered(state, "square_avg", parameter);
  blend_square(square, direction, options_.alpha());
  // centered: the variance is E[g^2] - E[g]^2; otherwise the plain second moment.
  at::Tensor variance = square;
  if (options_.centered()) {
    auto& mean = remembered(state, "grad_avg", parameter);
    blend(mean, direction, options_.alpha());
    variance = square.addcmul(mean, mean, -1);
  }
  const at::Tensor divisor = variance.sqrt().add_(options_.eps());
  if (options_.momentum() == 0) {
    parameter.addcdiv_(direction, divisor, -options_.lr());
    return;
  }
  auto& velocity = remembered(state, "momentum_buffer", parameter);
  velocity.mul_(options_.momentum()).addcdiv_(direction, divisor);
  parameter.add_(velocity, -options_.lr());
}

// Zeiler, "ADADELTA: an adaptive learning rate method".
template <>
void FunctionalAdadelta::check() const {
  check_not_negative("FunctionalAdadelta", "lr", options_.lr());
  check_not_negative("FunctionalAdadelta", "eps", options_.eps());
  check_not_negative("FunctionalAdadelta", "weight_decay", options_.weight_decay());
  check_range(options_.rho() >= 0 && options_.rho() <= 1, "FunctionalAdadelta", "rho", options_.rho());
}
template <>
void FunctionalAdadelta::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state) {
  count_step(state);
  const at::Tensor direction = decayed(gradient, parameter, options_.weight_decay());
  auto& square = remembered(state, "square_avg", parameter);
  auto& moved = remembered(state, "acc_delta", parameter);
  blend_square(square, direction, options_.rho());
  const at::Tensor change =
      moved.add(options_.eps()).sqrt_().div_(square.add(options_.eps()).sqrt_()).mul_(direction);
  blend_square(moved, change, options_.rho());
  parameter.add_(change, -options_.lr());
}

// Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning: the RPROP algorithm".
template <>
void FunctionalRprop::check() const {
  const auto [minus, plus] = options_.etas();
  check_not_negative("FunctionalRprop", "lr", options_.lr());
  check_range(minus > 0 && minus < 1, "FunctionalRprop", "the first eta", minus);
  check_range(plus > 1, "FunctionalRprop", "the second eta", plus);
}
template <>
void FunctionalRprop::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state) {
  count_step(state);
  auto& before = remembered(state, "prev", parameter);
  auto& size = remembered(state, "step_size", parameter, options_.lr());
  const auto [minus, plus] = options_.etas();
  const auto [least, most] = options_.step_sizes();
  const at::Tensor agreement = gradient.mul(before);
  // Where the sign changed, the step shrinks, the parameter stays, and 0 is remembered, so that the next step
  // neither grows nor shrinks there.
  const at::Tensor turned = agreement.lt(0);
  size.copy_(
      at::where(agreement.gt(0), size * plus, at::where(turned, size * minus, size)).clamp_(least, most));
  const at::Tensor used = gradient.masked_fill(turned, 0);  // no move where the sign changed
  parameter.addcmul_(used.sign(), size, -1);
  before.copy_(used);
}

// Kingma and Ba, "Adam", section 7.1.
template <>
void FunctionalAdamax::check() const {
  check_adam("FunctionalAdamax", options_);
}
template <>
void FunctionalAdamax::update(const at::Tensor& parameter, const at::Tensor& gradient, StateValues& state) {
  const auto [beta1, beta2] = options_.betas();
  const double step = count_step(state);
  const at::Tensor direction = decayed(gradient, parameter, options_.weight_decay());
  auto& mean = remembered(state, "exp_avg", parameter);
  auto& norm = remembered(state, "exp_inf", parameter);
  blend(mean, direction, beta1);
  norm.copy_(at::maximum(norm * beta2, direction.abs().add_(options_.eps())));
  parameter.addcdiv_(mean, norm, -options_.lr() / (1 - std::pow(beta1, step)));
}

}  // namespace lockstep
