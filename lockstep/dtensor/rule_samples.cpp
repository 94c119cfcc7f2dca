#include "lockstep/dtensor/internal/rule_samples.h"

#include <ATen/ATen.h>

#include <set>

#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal {
namespace samples {

at::Tensor some(at::IntArrayRef sizes, double shift) {
  const auto n = c10::multiply_integers(sizes);
  return ((at::arange(n, at::kDouble) * 0.7 + shift + 0.3).sin() * 0.4 + 0.5).to(at::kFloat).reshape(sizes);
}
at::Tensor whole_numbers(at::IntArrayRef sizes, std::int64_t below, std::int64_t shift) {
  return (at::arange(c10::multiply_integers(sizes), at::kLong) * 7 + shift).remainder(below).reshape(sizes);
}
at::Tensor truths(at::IntArrayRef sizes) {
  return whole_numbers(sizes, 2).to(at::kBool);
}
Table element_samples() {
  return {
      {"aten::topk", {Stack{some({4, 6}), 3, 1, true, true}}},
      {"aten::kthvalue", {Stack{some({4, 6}), 3, 1, false}}},
      {"aten::linalg_vector_norm",
       {Stack{some({4, 6}), 2, Integers{1}, false, none()}, Stack{some({4, 6}), 3, none(), false, none()},
        Stack{some({4, 6}), std::numeric_limits<double>::infinity(), Integers{0}, true, none()}}},
      {"aten::norm.Scalar", {Stack{some({4, 6}), 2}}},
      {"aten::norm.ScalarOpt_dim", {Stack{some({4, 6}), 2, Integers{1}, true}}},
      {"aten::norm.ScalarOpt_dim_dtype",
       {Stack{some({4, 6}), 2, Integers{1}, true, static_cast<std::int64_t>(at::kFloat)}}},
      {"aten::clamp.Tensor", {Stack{some({5, 6}), some({6}, 1) - 0.3, some({5, 6}, 2) + 0.2}}},
      {"aten::fill.Tensor", {Stack{some({5, 6}), at::scalar_tensor(2.5f)}}},
      {"aten::_foreach_add_.Tensor", {Stack{Tensors{some({5, 6}), some({4})}, at::scalar_tensor(2.5f), 1}}},
      {"aten::_foreach_mul_.Tensor", {Stack{Tensors{some({5, 6}), some({4})}, at::scalar_tensor(2.5f)}}},
      {"aten::_foreach_div_.Tensor", {Stack{Tensors{some({5, 6}), some({4})}, at::scalar_tensor(2.5f)}}},
      {"aten::_foreach_add.Tensor", {Stack{Tensors{some({5, 6}), some({4})}, at::scalar_tensor(2.5f), 1}}},
      {"aten::_foreach_mul.Tensor", {Stack{Tensors{some({5, 6}), some({4})}, at::scalar_tensor(2.5f)}}},
      {"aten::_foreach_div.Tensor", {Stack{Tensors{some({5, 6}), some({4})}, at::scalar_tensor(2.5f)}}},
      {"aten::_foreach_mm",
       {Stack{Tensors{some({4, 3}), some({2, 5})}, Tensors{some({3, 6}, 1), some({5, 3}, 1)}}}},
      {"aten::where.self", {Stack{truths({4, 6}), some({4, 6}), some({6}, 1)}}},
      {"aten::complex", {Stack{some({4, 6}), some({4, 6}, 1)}}},
      {"aten::mvlgamma", {Stack{some({4, 6}) + 3, 2}}},
      {"aten::polygamma", {Stack{1, some({4, 6})}}},
      {"aten::masked_fill.Tensor", {Stack{some({4, 6}), truths({4, 6}), at::scalar_tensor(2.5f)}}},
      {"aten::div.Tensor_mode", {Stack{some({4, 6}), some({4, 6}, 1), "floor"}}},
      {"aten::div.Scalar_mode", {Stack{some({4, 6}), 0.3, "trunc"}}},
      {"aten::log_sigmoid_backward", {Stack{some({4, 6}), some({4, 6}, 1), some({4, 6}, 2)}}},
      {"aten::elu_backward", {Stack{some({4, 6}), 1.0, 1.0, 1.0, false, some({4, 6}, 1) - 0.5}}},
      {"aten::copy", {Stack{some({4, 6}), some({6}, 1), false}}},
      {"aten::_conj", {Stack{at::complex(some({4, 6}), some({4, 6}, 1))}}},
      {"aten::_conj_physical", {Stack{at::complex(some({4, 6}), some({4, 6}, 1))}}},
      {"aten::isin.Tensor_Scalar", {Stack{whole_numbers({4, 6}, 3), 1, false, false}}},
      {"aten::any", {Stack{truths({4, 6})}}},
      {"aten::all", {Stack{truths({4, 6})}}},
      {"aten::any.dim", {Stack{truths({4, 6}), 1, false}}},
      {"aten::all.dim", {Stack{truths({4, 6}), 1, false}}},
      {"aten::any.dims", {Stack{truths({4, 6}), Integers{1}, false}}},
      {"aten::all.dims", {Stack{truths({4, 6}), Integers{1}, false}}},
      {"aten::mean", {Stack{some({5, 6}), none()}}},
      {"aten::mean.dim",
       {Stack{some({5, 6}), Integers{0}, false, none()}, Stack{some({5, 6}), Integers{0, 1}, true, none()}}},
      {"aten::sum.dim_IntList",
       {Stack{some({5, 6}), Integers{0}, false, none()}, Stack{some({5, 6}), Integers{1}, true, none()}}},
  };
}

}  // namespace samples

namespace {

using namespace samples;
using c10::IValue;

// By their names without overload and underscore: floating samples would be refused.
const std::set<std::string> kIntegerOperators{
    "bitwise_and",        "bitwise_or",          "bitwise_xor", "bitwise_not",
    "bitwise_left_shift", "bitwise_right_shift", "gcd",         "lcm"};

// Dimensions differ in size, and not all sizes divide by the number of ranks, so that pieces are even and
// uneven. Several samples of one operator are for its branches.
const Table& table() {
  static const Table all = [] {
    auto joined = element_samples();
    joined.merge(view_samples());
    joined.merge(layer_samples());
    return joined;
  }();
  return all;
}

// A value for an argument of no special meaning.
IValue by_type(const c10::Argument& argument, const std::string& operator_base, int& n_tensors) {
  auto type = argument.type();
  const auto& name = argument.name();
  if (type->kind() == c10::TypeKind::OptionalType && name == "min") return 0.3;
  if (type->kind() == c10::TypeKind::OptionalType && name == "max") return 0.7;
  if (argument.default_value()) return *argument.default_value();
  if (type->kind() == c10::TypeKind::OptionalType) return none();
  switch (type->kind()) {
    case c10::TypeKind::TensorType: {
      const auto nth = n_tensors++;
      if (name == "mask") return truths({5, 6});
      if (kIntegerOperators.contains(operator_base)) return whole_numbers({5, 6}, 5, nth + 1);
      return some({5, 6}, nth);
    }
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return 1;
    case c10::TypeKind::BoolType:
      return false;
    case c10::TypeKind::FloatType:
      return 0.5;
    case c10::TypeKind::NumberType:
      if (kIntegerOperators.contains(operator_base)) return 3;
      return 0.5;
    case c10::TypeKind::ListType: {
      const auto element = type->castRaw<c10::ListType>()->getElementType();
      if (element->kind() == c10::TypeKind::TensorType) {
        const auto nth = n_tensors++;
        return Tensors{some({5, 6}, nth), some({4}, nth)};
      }
      if (element->kind() == c10::TypeKind::NumberType) {
        c10::List<at::Scalar> numbers({at::Scalar(0.5), at::Scalar(2.0)});
        return numbers;
      }
      if (element->kind() == c10::TypeKind::FloatType) return std::vector<double>{0.5, 2};
      return Integers{1};
    }
    default:
      return none();
  }
}

// As above, but the second tensor broadcasts.
void narrow_second(Stack& sample) {
  int n = 0;
  for (auto& value : sample) {
    if (value.isTensor() && value.toTensor().defined() && n++ == 1) value = value.toTensor()[0];
  }
}

}  // namespace

// An in-place operator uses the samples of its functional form.
std::vector<Stack> samples_of(const Operator& op) {
  if (const auto found = table().find(op.name); found != table().end()) return found->second;
  if (op.in_place && op.functional && op.rule) {
    if (const auto found = table().find(op.rule->op); found != table().end()) return found->second;
  }
  const auto& schema = op.handle.schema();
  auto base = schema.name().substr(schema.name().find("::") + 2);
  if (base.ends_with('_')) base.pop_back();
  Stack sample;
  int n_tensors = 0;
  for (const auto& argument : schema.arguments()) sample.push_back(by_type(argument, base, n_tensors));
  if (const auto scalars = op.argument("scalars");
      op.loops && scalars >= 0 && op.arguments[static_cast<std::size_t>(scalars)] == ArgumentKind::kTensor) {
    sample[static_cast<std::size_t>(scalars)] = at::tensor({0.5f, 2.0f});  // one per item
  }
  if (schema.name().starts_with("aten::_fused_")) {
    // Steps are counted in tensors of one element.
    const auto at = op.argument("state_steps");
    const auto unused = op.argument("max_exp_avg_sqs");
    if (unused >= 0) sample[static_cast<std::size_t>(unused)] = Tensors{};
    if (at >= 0)
      sample[static_cast<std::size_t>(at)] = Tensors{at::scalar_tensor(1.0f), at::scalar_tensor(1.0f)};
    if (const auto rate = op.argument("lr");
        rate >= 0 && op.arguments[static_cast<std::size_t>(rate)] == ArgumentKind::kTensor)
      sample[static_cast<std::size_t>(rate)] = at::scalar_tensor(0.1f);
  }
  std::vector<Stack> samples{sample};
  // Where the rule is by letters and the operator broadcasts its second input.
  const bool broadcasts = n_tensors == 2 && op.rule && op.rule->letters && !op.writes &&
                          base.find("backward") == std::string::npos &&
                          base.find("loss") == std::string::npos;
  if (broadcasts) {
    narrow_second(sample);
    samples.push_back(sample);
  }
  return samples;
}

}  // namespace lockstep::dtensor_internal
