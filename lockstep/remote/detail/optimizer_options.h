// The options of torch::optim as plain numbers, in a fixed order: they have no default constructor, and no
// fields to list.
// Thread safety: functions without state.
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <tuple>
#include <type_traits>

#include "lockstep/optim/functional_options.h"

namespace lockstep::rpc::internal {

using Betas = std::tuple<double, double>;

// O as numbers; not specialised for types that are sent unchanged.
template <class O>
struct OptionNumbers;
template <class O>
concept HasNumbers = requires {
  typename OptionNumbers<O>::Numbers;
};

template <>
struct OptionNumbers<torch::optim::SGDOptions> {
  using O = torch::optim::SGDOptions;
  using Numbers = std::tuple<double, double, double, double, bool>;
  static Numbers of(const O& o) {
    return {o.lr(), o.momentum(), o.dampening(), o.weight_decay(), o.nesterov()};
  }
  static O make(const Numbers& n) {
    return O(std::get<0>(n))
        .momentum(std::get<1>(n))
        .dampening(std::get<2>(n))
        .weight_decay(std::get<3>(n))
        .nesterov(std::get<4>(n));
  }
};

template <class Options>
struct AdamNumbers {
  using Numbers = std::tuple<double, Betas, double, double, bool>;
  static Numbers of(const Options& o) { return {o.lr(), o.betas(), o.eps(), o.weight_decay(), o.amsgrad()}; }
  static Options make(const Numbers& n) {
    return Options(std::get<0>(n))
        .betas(std::get<1>(n))
        .eps(std::get<2>(n))
        .weight_decay(std::get<3>(n))
        .amsgrad(std::get<4>(n));
  }
};
template <>
struct OptionNumbers<torch::optim::AdamOptions> : AdamNumbers<torch::optim::AdamOptions> {};
template <>
struct OptionNumbers<torch::optim::AdamWOptions> : AdamNumbers<torch::optim::AdamWOptions> {};

template <>
struct OptionNumbers<torch::optim::AdagradOptions> {
  using O = torch::optim::AdagradOptions;
  using Numbers = std::tuple<double, double, double, double, double>;
  static Numbers of(const O& o) {
    return {o.lr(), o.lr_decay(), o.weight_decay(), o.initial_accumulator_value(), o.eps()};
  }
  static O make(const Numbers& n) {
    return O(std::get<0>(n))
        .lr_decay(std::get<1>(n))
        .weight_decay(std::get<2>(n))
        .initial_accumulator_value(std::get<3>(n))
        .eps(std::get<4>(n));
  }
};

template <>
struct OptionNumbers<torch::optim::RMSpropOptions> {
  using O = torch::optim::RMSpropOptions;
  using Numbers = std::tuple<double, double, double, double, double, bool>;
  static Numbers of(const O& o) {
    return {o.lr(), o.alpha(), o.eps(), o.weight_decay(), o.momentum(), o.centered()};
  }
  static O make(const Numbers& n) {
    return O(std::get<0>(n))
        .alpha(std::get<1>(n))
        .eps(std::get<2>(n))
        .weight_decay(std::get<3>(n))
        .momentum(std::get<4>(n))
        .centered(std::get<5>(n));
  }
};

template <>
struct OptionNumbers<AdadeltaOptions> {
  using Numbers = std::tuple<double, double, double, double>;
  static Numbers of(const AdadeltaOptions& o) { return {o.lr(), o.rho(), o.eps(), o.weight_decay()}; }
  static AdadeltaOptions make(const Numbers& n) {
    return AdadeltaOptions(std::get<0>(n))
        .rho(std::get<1>(n))
        .eps(std::get<2>(n))
        .weight_decay(std::get<3>(n));
  }
};

template <>
struct OptionNumbers<RpropOptions> {
  using Numbers = std::tuple<double, Betas, Betas>;
  static Numbers of(const RpropOptions& o) { return {o.lr(), o.etas(), o.step_sizes()}; }
  static RpropOptions make(const Numbers& n) {
    return RpropOptions(std::get<0>(n)).etas(std::get<1>(n)).step_sizes(std::get<2>(n));
  }
};

template <>
struct OptionNumbers<AdamaxOptions> {
  using Numbers = std::tuple<double, Betas, double, double>;
  static Numbers of(const AdamaxOptions& o) { return {o.lr(), o.betas(), o.eps(), o.weight_decay()}; }
  static AdamaxOptions make(const Numbers& n) {
    return AdamaxOptions(std::get<0>(n))
        .betas(std::get<1>(n))
        .eps(std::get<2>(n))
        .weight_decay(std::get<3>(n));
  }
};

template <class A>
struct WireForm {
  using type = A;
};
template <HasNumbers A>
struct WireForm<A> {
  using type = typename OptionNumbers<A>::Numbers;
};
// The type of an optimizer's constructor argument on the wire.
template <class A>
using OnWire = typename WireForm<std::decay_t<A>>::type;

template <class A>
OnWire<A> to_wire(const A& argument) {
  if constexpr (HasNumbers<A>) {
    return OptionNumbers<A>::of(argument);
  } else {
    return argument;
  }
}
template <class A>
A from_wire(const OnWire<A>& value) {
  if constexpr (HasNumbers<A>) {
    return OptionNumbers<A>::make(value);
  } else {
    return value;
  }
}

}  // namespace lockstep::rpc::internal
