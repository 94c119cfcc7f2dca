// Operators that work element by element, with broadcasting.
#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal::rules {
namespace {

// Partial inputs are reduced first: for most of these f(a + b) is not f(a) + f(b). add.Scalar is among them,
// since the constant would be added once per rank.
constexpr const char* kNonlinear[] = {
    "aten::abs",
    "aten::acos",
    "aten::acosh",
    "aten::addcdiv",
    "aten::addcmul",
    "aten::angle",
    "aten::asin",
    "aten::asinh",
    "aten::atan",
    "aten::atan2",
    "aten::atanh",
    "aten::bitwise_and.Scalar",
    "aten::bitwise_and.Tensor",
    "aten::bitwise_left_shift.Tensor",
    "aten::bitwise_not",
    "aten::bitwise_or.Scalar",
    "aten::bitwise_or.Tensor",
    "aten::bitwise_right_shift.Tensor",
    "aten::bitwise_xor.Scalar",
    "aten::bitwise_xor.Tensor",
    "aten::ceil",
    "aten::celu",
    "aten::clamp",
    "aten::clamp.Tensor",
    "aten::clamp_max",
    "aten::clamp_max.Tensor",
    "aten::clamp_min",
    "aten::clamp_min.Tensor",
    "aten::copysign.Scalar",
    "aten::copysign.Tensor",
    "aten::cos",
    "aten::cosh",
    "aten::deg2rad",
    "aten::digamma",
    "aten::div.Scalar_mode",
    "aten::div.Tensor_mode",
    "aten::elu",
    "aten::eq.Scalar",
    "aten::eq.Tensor",
    "aten::erf",
    "aten::erfc",
    "aten::erfinv",
    "aten::exp",
    "aten::exp2",
    "aten::expm1",
    "aten::fill.Scalar",
    "aten::fill.Tensor",
    "aten::floor",
    "aten::floor_divide",
    "aten::fmax",
    "aten::fmin",
    "aten::fmod.Scalar",
    "aten::fmod.Tensor",
    "aten::frac",

    "aten::gcd",
    "aten::ge.Scalar",
    "aten::ge.Tensor",
    "aten::gelu",
    "aten::gt.Scalar",
    "aten::gt.Tensor",
    "aten::hardshrink",
    "aten::hardsigmoid",
    "aten::hardswish",
    "aten::hardtanh",
    "aten::heaviside",
    "aten::hypot",
    "aten::i0",
    "aten::igamma",
    "aten::igammac",
    "aten::isinf",
    "aten::isnan",
    "aten::isneginf",
    "aten::isposinf",
    "aten::lcm",
    "aten::le.Scalar",
    "aten::le.Tensor",
    "aten::leaky_relu",
    "aten::lgamma",
    "aten::log",
    "aten::log10",
    "aten::log1p",
    "aten::log2",
    "aten::logaddexp",
    "aten::logaddexp2",
    "aten::logical_and",
    "aten::logical_not",
    "aten::logical_or",
    "aten::logical_xor",
    "aten::logit",
    "aten::lt.Scalar",
    "aten::lt.Tensor",
    "aten::masked_fill.Scalar",
    "aten::masked_fill.Tensor",
    "aten::maximum",
    "aten::minimum",
    "aten::mish",
    "aten::mvlgamma",
    "aten::nan_to_num",
    "aten::ne.Scalar",
    "aten::ne.Tensor",
    "aten::nextafter",

    "aten::polygamma",
    "aten::pow.Scalar",
    "aten::pow.Tensor_Scalar",
    "aten::pow.Tensor_Tensor",
    "aten::rad2deg",
    "aten::reciprocal",
    "aten::relu",
    "aten::remainder.Scalar",
    "aten::remainder.Tensor",
    "aten::round",
    "aten::round.decimals",
    "aten::rsqrt",
    "aten::rsub.Scalar",
    "aten::sgn",
    "aten::sigmoid",
    "aten::sign",
    "aten::signbit",
    "aten::silu",
    "aten::sin",
    "aten::sinc",
    "aten::sinh",
    "aten::softplus",
    "aten::softshrink",
    "aten::special_entr",
    "aten::special_erfcx",
    "aten::special_i0e",
    "aten::special_i1",
    "aten::special_i1e",
    "aten::special_log_ndtr",
    "aten::special_ndtri",
    "aten::special_xlog1py",
    "aten::special_zeta",
    "aten::sqrt",
    "aten::square",
    "aten::tan",
    "aten::tanh",
    "aten::threshold",
    "aten::trunc",
    "aten::where.self",
    "aten::xlogy.Scalar_Other",
    "aten::xlogy.Scalar_Self",
    "aten::xlogy.Tensor",
    "aten::add.Scalar",
    "aten::sub.Scalar",
    "aten::log_sigmoid_forward",
    "aten::polar",
    "aten::complex",
    "aten::_conj_physical",
    "aten::isin.Tensor_Scalar",
};

// Linear in the gradient, which is their first argument, or in the dividend.
constexpr const char* kLinearInFirst[] = {
    "aten::div.Tensor",          "aten::elu_backward",         "aten::gelu_backward",
    "aten::hardshrink_backward", "aten::hardsigmoid_backward", "aten::hardswish_backward",
    "aten::hardtanh_backward",   "aten::leaky_relu_backward",  "aten::log_sigmoid_backward",
    "aten::logit_backward",      "aten::mish_backward",        "aten::native_dropout_backward",
    "aten::sigmoid_backward",    "aten::silu_backward",        "aten::softplus_backward",
    "aten::softshrink_backward", "aten::tanh_backward",        "aten::threshold_backward",
};

// A product is linear in one factor while the other is replicated, but not in both at once.
constexpr const char* kLinearInEach[] = {"aten::mul.Tensor"};

// All inputs partial, the result partial: each rank works on its parts and nothing is sent.
constexpr const char* kLinearTogether[] = {
    "aten::add.Tensor", "aten::sub.Tensor",  "aten::rsub.Tensor", "aten::neg",       "aten::mul.Scalar",
    "aten::div.Scalar", "aten::lerp.Scalar", "aten::_to_copy",    "aten::copy",      "aten::empty_like",
    "aten::zeros_like", "aten::zero",        "aten::_conj",       "aten::_neg_view",
};

// Values as they are.
constexpr const char* kMoves[] = {"aten::clone",      "aten::detach",     "aten::alias",
                                  "aten::positive",   "aten::lift_fresh", "aten::resolve_conj",
                                  "aten::resolve_neg"};

// The same whatever the values.
constexpr const char* kConstant[] = {"aten::ones_like", "aten::full_like"};

}  // namespace

std::vector<Rule> pointwise_rules() {
  std::vector<Rule> rules;
  const auto add = [&](const auto& names, Linear linear) {
    for (const char* name : names) rules.push_back({.op = name, .letters = elementwise, .linear = linear});
  };
  add(kNonlinear, Linear::kNone);
  add(kLinearInFirst, Linear::kFirst);
  add(kLinearInEach, Linear::kEach);
  add(kLinearTogether, Linear::kTogether);
  add(kMoves, Linear::kMove);
  add(kConstant, Linear::kIgnored);
  for (auto& rule : rules) {
    if (rule.op == "aten::_to_copy" || rule.op == "aten::copy") rule.linear_if = converts_linearly;
  }
  // lerp.Tensor is linear in its ends only while the weight is fixed, which none of the kinds says; it gets
  // no partials.
  rules.push_back({.op = "aten::lerp.Tensor", .letters = elementwise});
  return rules;
}

}  // namespace lockstep::dtensor_internal::rules
