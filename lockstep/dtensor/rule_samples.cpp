#include "lockstep/dtensor/internal/rule_samples.h"

#include <ATen/ATen.h>

#include <functional>
#include <limits>
#include <map>
#include <set>

#include "lockstep/dtensor/internal/rule.h"

namespace lockstep::dtensor_internal {
namespace {

using c10::IValue;
using torch::jit::Stack;
using Integers = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

// Different in every element, between 0.1 and 0.9, where most functions are defined and no two elements are
// equal.
at::Tensor some(at::IntArrayRef sizes, double shift = 0) {
  const auto n = c10::multiply_integers(sizes);
  return ((at::arange(n, at::kDouble) * 0.7 + shift + 0.3).sin() * 0.4 + 0.5).to(at::kFloat).reshape(sizes);
}
at::Tensor whole_numbers(at::IntArrayRef sizes, std::int64_t below, std::int64_t shift = 0) {
  return (at::arange(c10::multiply_integers(sizes), at::kLong) * 7 + shift).remainder(below).reshape(sizes);
}
at::Tensor truths(at::IntArrayRef sizes) {
  return whole_numbers(sizes, 2).to(at::kBool);
}
IValue none() {
  return {};
}

c10::List<std::optional<at::Tensor>> indices(std::vector<std::optional<at::Tensor>> list) {
  return c10::List<std::optional<at::Tensor>>(c10::ArrayRef<std::optional<at::Tensor>>(list));
}

// By their names without overload and underscore: floating samples would be refused.
const std::set<std::string> kIntegerOperators{
    "bitwise_and",        "bitwise_or",          "bitwise_xor", "bitwise_not",
    "bitwise_left_shift", "bitwise_right_shift", "gcd",         "lcm"};

using Table = std::map<std::string, std::function<std::vector<Stack>()>>;

// Dimensions differ in size, and not all sizes divide by the number of ranks, so that pieces are even and
// uneven. Several samples of one operator are for its branches.
const Table& table() {
  static const Table samples{
      {"aten::mm",
       [] {
         return std::vector<Stack>{{some({6, 4}), some({4, 5})}};
       }},
      {"aten::bmm",
       [] {
         return std::vector<Stack>{{some({4, 3, 5}), some({4, 5, 6})}};
       }},
      {"aten::mv",
       [] {
         return std::vector<Stack>{{some({6, 4}), some({4})}};
       }},
      {"aten::dot",
       [] {
         return std::vector<Stack>{{some({7}), some({7}, 1)}};
       }},
      {"aten::vdot",
       [] {
         return std::vector<Stack>{{some({7}), some({7}, 1)}};
       }},
      {"aten::ger",
       [] {
         return std::vector<Stack>{{some({6}), some({5})}};
       }},
      {"aten::addmm",
       [] {
         return std::vector<Stack>{{some({5}), some({6, 4}), some({4, 5}), 1, 1},
                                   {some({6, 5}), some({6, 4}), some({4, 5}), 0.5, 2}};
       }},
      {"aten::addmm_",
       [] {
         return std::vector<Stack>{{some({6, 5}), some({6, 4}), some({4, 5}), 0.5, 2}};
       }},
      {"aten::baddbmm",
       [] {
         return std::vector<Stack>{{some({4, 3, 6}), some({4, 3, 5}), some({4, 5, 6}), 1, 1}};
       }},
      {"aten::addbmm",
       [] {
         return std::vector<Stack>{{some({3, 6}), some({4, 3, 5}), some({4, 5, 6}), 1, 1}};
       }},
      {"aten::addmv",
       [] {
         return std::vector<Stack>{{some({6}), some({6, 4}), some({4}), 1, 1}};
       }},
      {"aten::addr",
       [] {
         return std::vector<Stack>{{some({6, 5}), some({6}), some({5}), 1, 1}};
       }},
      {"aten::view",
       [] {
         return std::vector<Stack>{{some({4, 6, 5}), Integers{24, 5}}, {some({4, 6, 5}), Integers{4, 30}},
                                   {some({24, 5}), Integers{4, 6, 5}}, {some({4, 6}), Integers{2, 2, 3, 2}},
                                   {some({5, 3}), Integers{5, 1, 3}},  {some({4, 6}), Integers{-1}}};
       }},
      {"aten::_unsafe_view",
       [] {
         return std::vector<Stack>{{some({4, 6, 5}), Integers{24, 5}}};
       }},
      {"aten::view_copy",
       [] {
         return std::vector<Stack>{{some({4, 6, 5}), Integers{24, 5}}};
       }},
      {"aten::_reshape_alias",
       [] {
         return std::vector<Stack>{{some({4, 6}), Integers{24}, Integers{1}}};
       }},
      {"aten::transpose.int",
       [] {
         return std::vector<Stack>{{some({4, 5, 6}), 0, -1}};
       }},
      {"aten::permute",
       [] {
         return std::vector<Stack>{{some({4, 5, 6}), Integers{2, 0, 1}}};
       }},
      {"aten::unsqueeze",
       [] {
         return std::vector<Stack>{{some({4, 5}), 1}, {some({4, 5}), -1}};
       }},
      {"aten::squeeze",
       [] {
         return std::vector<Stack>{{some({4, 1, 5})}};
       }},
      {"aten::squeeze.dim",
       [] {
         return std::vector<Stack>{{some({4, 1, 5}), 1}, {some({4, 1, 5}), 0}};
       }},
      {"aten::squeeze.dims",
       [] {
         return std::vector<Stack>{{some({4, 1, 5}), Integers{1}}};
       }},
      {"aten::select.int",
       [] {
         return std::vector<Stack>{{some({4, 5, 6}), 1, 2}};
       }},
      {"aten::slice.Tensor",
       [] {
         return std::vector<Stack>{{some({4, 6}), 1, 1, 4, 1}, {some({4, 6}), 1, 0, 100, 1}};
       }},
      {"aten::split.Tensor",
       [] {
         return std::vector<Stack>{{some({4, 6}), 4, 1}};
       }},
      {"aten::split_with_sizes",
       [] {
         return std::vector<Stack>{{some({4, 6}), Integers{1, 5}, 1}};
       }},
      {"aten::expand",
       [] {
         return std::vector<Stack>{{some({4, 1}), Integers{3, -1, 5}, false}};
       }},
      {"aten::slice_backward",
       [] {
         return std::vector<Stack>{{some({4, 3}), Integers{4, 6}, 1, 1, 4, 1}};
       }},
      {"aten::select_backward",
       [] {
         return std::vector<Stack>{{some({4, 6}), Integers{4, 5, 6}, 1, 2}};
       }},
      {"aten::new_zeros",
       [] {
         return std::vector<Stack>{{some({4, 6}), Integers{4, 6}, none(), none(), none(), none()}};
       }},
      {"aten::new_ones",
       [] {
         return std::vector<Stack>{{some({4, 6}), Integers{3, 6}, none(), none(), none(), none()}};
       }},
      {"aten::new_full",
       [] {
         return std::vector<Stack>{{some({4, 6}), Integers{4, 6}, 2.5, none(), none(), none(), none()}};
       }},
      {"aten::flip",
       [] {
         return std::vector<Stack>{{some({4, 5}), Integers{1}}};
       }},
      {"aten::roll",
       [] {
         return std::vector<Stack>{{some({4, 5}), Integers{2}, Integers{1}}};
       }},
      {"aten::topk",
       [] {
         return std::vector<Stack>{{some({4, 6}), 3, 1, true, true}};
       }},
      {"aten::kthvalue",
       [] {
         return std::vector<Stack>{{some({4, 6}), 3, 1, false}};
       }},
      {"aten::_softmax",
       [] {
         return std::vector<Stack>{{some({4, 6}), 1, false}};
       }},
      {"aten::_log_softmax",
       [] {
         return std::vector<Stack>{{some({4, 6}), 1, false}};
       }},
      {"aten::_softmax_backward_data",
       [] {
         return std::vector<Stack>{
             {some({4, 6}), some({4, 6}, 1).softmax(1), 1, static_cast<std::int64_t>(at::kFloat)}};
       }},
      {"aten::_log_softmax_backward_data",
       [] {
         return std::vector<Stack>{
             {some({4, 6}), some({4, 6}, 1).log_softmax(1), 1, static_cast<std::int64_t>(at::kFloat)}};
       }},
      {"aten::linalg_vector_norm",
       [] {
         return std::vector<Stack>{
             {some({4, 6}), 2, Integers{1}, false, none()},
             {some({4, 6}), 3, none(), false, none()},
             {some({4, 6}), std::numeric_limits<double>::infinity(), Integers{0}, true, none()}};
       }},
      {"aten::norm.Scalar",
       [] {
         return std::vector<Stack>{{some({4, 6}), 2}};
       }},
      {"aten::norm.ScalarOpt_dim",
       [] {
         return std::vector<Stack>{{some({4, 6}), 2, Integers{1}, true}};
       }},
      {"aten::norm.ScalarOpt_dim_dtype",
       [] {
         return std::vector<Stack>{
             {some({4, 6}), 2, Integers{1}, true, static_cast<std::int64_t>(at::kFloat)}};
       }},
      {"aten::embedding",
       [] {
         return std::vector<Stack>{{some({7, 4}), whole_numbers({3, 5}, 7), -1, false, false}};
       }},
      {"aten::embedding_dense_backward",
       [] {
         return std::vector<Stack>{{some({3, 5, 4}), whole_numbers({3, 5}, 7), 7, -1, false}};
       }},
      {"aten::native_layer_norm",
       [] {
         return std::vector<Stack>{{some({4, 5, 6}), Integers{6}, some({6}), some({6}, 1), 1e-5},
                                   {some({4, 5, 6}), Integers{5, 6}, none(), none(), 1e-5}};
       }},
      {"aten::native_layer_norm_backward",
       [] {
         const auto x = some({4, 5, 6}, 2);
         const auto [y, mean, rstd] = at::native_layer_norm(x, {6}, some({6}), some({6}, 1), 1e-5);
         return std::vector<Stack>{{some({4, 5, 6}), x, Integers{6}, mean, rstd, some({6}), some({6}, 1),
                                    std::vector<bool>{true, true, true}}};
       }},
      {"aten::convolution",
       [] {
         return std::vector<Stack>{{some({4, 3, 5, 5}), some({6, 3, 3, 3}), some({6}), Integers{1, 1},
                                    Integers{1, 1}, Integers{1, 1}, false, Integers{0, 0}, 1}};
       }},
      {"aten::convolution_backward",
       [] {
         return std::vector<Stack>{{some({4, 6, 5, 5}), some({4, 3, 5, 5}), some({6, 3, 3, 3}), Integers{6},
                                    Integers{1, 1}, Integers{1, 1}, Integers{1, 1}, false, Integers{0, 0}, 1,
                                    std::vector<bool>{true, true, true}}};
       }},
      {"aten::max_pool2d_with_indices",
       [] {
         return std::vector<Stack>{
             {some({4, 3, 6, 6}), Integers{2, 2}, Integers{2, 2}, Integers{0, 0}, Integers{1, 1}, false}};
       }},
      {"aten::max_pool2d_with_indices_backward",
       [] {
         const auto x = some({4, 3, 6, 6});
         const auto [y, at] = at::max_pool2d_with_indices(x, {2, 2});
         return std::vector<Stack>{{some({4, 3, 3, 3}), x, Integers{2, 2}, Integers{2, 2}, Integers{0, 0},
                                    Integers{1, 1}, false, at}};
       }},
      {"aten::avg_pool2d",
       [] {
         return std::vector<Stack>{
             {some({4, 3, 6, 6}), Integers{2, 2}, Integers{2, 2}, Integers{0, 0}, false, true, none()}};
       }},
      {"aten::avg_pool2d_backward",
       [] {
         return std::vector<Stack>{{some({4, 3, 3, 3}), some({4, 3, 6, 6}), Integers{2, 2}, Integers{2, 2},
                                    Integers{0, 0}, false, true, none()}};
       }},
      {"aten::avg_pool1d",
       [] {
         return std::vector<Stack>{{some({4, 3, 6}), Integers{2}, Integers{2}, Integers{0}, false, true}};
       }},
      {"aten::_adaptive_avg_pool2d",
       [] {
         return std::vector<Stack>{{some({4, 3, 6, 6}), Integers{2, 2}}};
       }},
      {"aten::_adaptive_avg_pool2d_backward",
       [] {
         return std::vector<Stack>{{some({4, 3, 2, 2}), some({4, 3, 6, 6})}};
       }},
      {"aten::upsample_nearest2d",
       [] {
         return std::vector<Stack>{{some({4, 3, 3, 3}), Integers{6, 6}, none(), none()}};
       }},
      {"aten::upsample_bilinear2d",
       [] {
         return std::vector<Stack>{{some({4, 3, 3, 3}), Integers{6, 6}, false, none(), none()}};
       }},
      {"aten::reflection_pad2d",
       [] {
         return std::vector<Stack>{{some({4, 3, 5, 5}), Integers{1, 1, 2, 0}}};
       }},
      {"aten::replication_pad2d",
       [] {
         return std::vector<Stack>{{some({4, 3, 5, 5}), Integers{1, 1, 2, 0}}};
       }},
      {"aten::reflection_pad1d",
       [] {
         return std::vector<Stack>{{some({4, 3, 5}), Integers{1, 2}}};
       }},
      {"aten::replication_pad1d",
       [] {
         return std::vector<Stack>{{some({4, 3, 5}), Integers{1, 2}}};
       }},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       [] {
         return std::vector<Stack>{
             {some({2, 4, 6, 8}), some({2, 4, 6, 8}, 1), some({2, 4, 6, 8}, 2), 0.0, true, none(), none()}};
       }},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
       [] {
         const auto q = some({2, 4, 6, 8}), k = some({2, 4, 6, 8}, 1), v = some({2, 4, 6, 8}, 2);
         const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true);
         return std::vector<Stack>{{some({2, 4, 6, 8}, 3), q, k, v, out, lse, 0.0, true, none(), none()}};
       }},
      {"aten::nll_loss_forward",
       [] {
         const auto x = some({5, 4}).log_softmax(1);
         return std::vector<Stack>{{x, whole_numbers({5}, 4), none(), 1, -100},
                                   {x, whole_numbers({5}, 4), some({4}), 1, 2},
                                   {x, whole_numbers({5}, 4), none(), 0, -100},
                                   {x, whole_numbers({5}, 4), none(), 2, -100}};
       }},
      {"aten::nll_loss_backward",
       [] {
         return std::vector<Stack>{
             {at::scalar_tensor(1.5f), some({5, 4}), whole_numbers({5}, 4), none(), 1, -100,
              at::scalar_tensor(5.0f)},
             {some({5}), some({5, 4}), whole_numbers({5}, 4), none(), 0, -100, at::scalar_tensor(0.0f)}};
       }},
      {"aten::index_select",
       [] {
         return std::vector<Stack>{{some({4, 5, 6}), 1, whole_numbers({3}, 5)}};
       }},
      {"aten::index_fill.int_Scalar",
       [] {
         return std::vector<Stack>{{some({4, 5}), 1, whole_numbers({2}, 5), 2.5}};
       }},
      {"aten::index_add",
       [] {
         return std::vector<Stack>{{some({4, 5}), 1, whole_numbers({3}, 5), some({4, 3}), 1}};
       }},
      {"aten::index_copy",
       [] {
         return std::vector<Stack>{{some({4, 5}), 1, at::tensor({3, 0, 4}, at::kLong), some({4, 3})}};
       }},
      {"aten::gather",
       [] {
         return std::vector<Stack>{{some({4, 5}), 1, whole_numbers({4, 3}, 5), false}};
       }},
      {"aten::scatter.src",
       [] {
         return std::vector<Stack>{{some({4, 5}), 1, whole_numbers({4, 2}, 5), some({4, 2}, 1)}};
       }},
      {"aten::scatter.value",
       [] {
         return std::vector<Stack>{{some({4, 5}), 1, whole_numbers({4, 2}, 5), 2.5}};
       }},
      {"aten::scatter_add",
       [] {
         return std::vector<Stack>{{some({4, 5}), 1, whole_numbers({4, 3}, 5), some({4, 3}, 1)}};
       }},
      {"aten::cat",
       [] {
         return std::vector<Stack>{{Tensors{some({4, 2}), some({4, 3}, 1)}, 1}};
       }},
      {"aten::stack",
       [] {
         return std::vector<Stack>{{Tensors{some({4, 3}), some({4, 3}, 1)}, 1}};
       }},
      {"aten::tril",
       [] {
         return std::vector<Stack>{{some({4, 5, 5}), 0}};
       }},
      {"aten::triu",
       [] {
         return std::vector<Stack>{{some({4, 5, 5}), 1}};
       }},
      {"aten::repeat",
       [] {
         return std::vector<Stack>{{some({4, 5}), Integers{2, 1, 3}}};
       }},
      {"aten::constant_pad_nd",
       [] {
         return std::vector<Stack>{{some({4, 5}), Integers{1, 2}, 0.5}};
       }},
      {"aten::index.Tensor",
       [] {
         return std::vector<Stack>{
             {some({4, 5, 6}), indices({std::nullopt, whole_numbers({3}, 5)})},
             {some({4, 5, 6}), indices({whole_numbers({3}, 4), std::nullopt, whole_numbers({3}, 6)})}};
       }},
      {"aten::_unsafe_index.Tensor",
       [] {
         return std::vector<Stack>{{some({4, 5, 6}), indices({std::nullopt, whole_numbers({3}, 5)})}};
       }},
      {"aten::index_put",
       [] {
         return std::vector<Stack>{
             {some({4, 5, 6}), indices({std::nullopt, at::tensor({3, 0, 2}, at::kLong)}), some({4, 3, 6}, 1),
              false},
             {some({4, 5, 6}), indices({std::nullopt, whole_numbers({3}, 5)}), some({6}, 1), true}};
       }},
      {"aten::_unsafe_index_put",
       [] {
         return std::vector<Stack>{{some({4, 5}), indices({std::nullopt, at::tensor({3, 0, 2}, at::kLong)}),
                                    some({4, 3}, 1), false}};
       }},
      {"aten::clamp.Tensor",
       [] {
         return std::vector<Stack>{{some({5, 6}), some({6}, 1) - 0.3, some({5, 6}, 2) + 0.2}};
       }},
      {"aten::fill.Tensor",
       [] {
         return std::vector<Stack>{{some({5, 6}), at::scalar_tensor(2.5f)}};
       }},
      {"aten::binary_cross_entropy_with_logits",
       [] {
         return std::vector<Stack>{{some({5, 6}), some({5, 6}, 1), none(), none(), 1}};
       }},
      {"aten::_foreach_add_.Tensor",
       [] {
         return std::vector<Stack>{{Tensors{some({5, 6}), some({4})}, at::scalar_tensor(2.5f), 1}};
       }},
      {"aten::_foreach_mul_.Tensor",
       [] {
         return std::vector<Stack>{{Tensors{some({5, 6}), some({4})}, at::scalar_tensor(2.5f)}};
       }},
      {"aten::_foreach_div_.Tensor",
       [] {
         return std::vector<Stack>{{Tensors{some({5, 6}), some({4})}, at::scalar_tensor(2.5f)}};
       }},
      {"aten::where.self",
       [] {
         return std::vector<Stack>{{truths({4, 6}), some({4, 6}), some({6}, 1)}};
       }},
      {"aten::complex",
       [] {
         return std::vector<Stack>{{some({4, 6}), some({4, 6}, 1)}};
       }},
      {"aten::mvlgamma",
       [] {
         return std::vector<Stack>{{some({4, 6}) + 3, 2}};
       }},
      {"aten::polygamma",
       [] {
         return std::vector<Stack>{{1, some({4, 6})}};
       }},
      {"aten::masked_fill.Tensor",
       [] {
         return std::vector<Stack>{{some({4, 6}), truths({4, 6}), at::scalar_tensor(2.5f)}};
       }},
      {"aten::native_dropout_backward",
       [] {
         return std::vector<Stack>{{some({4, 6}), truths({4, 6}), 2.0}};
       }},
      {"aten::div.Tensor_mode",
       [] {
         return std::vector<Stack>{{some({4, 6}), some({4, 6}, 1), "floor"}};
       }},
      {"aten::div.Scalar_mode",
       [] {
         return std::vector<Stack>{{some({4, 6}), 0.3, "trunc"}};
       }},
      {"aten::log_sigmoid_backward",
       [] {
         return std::vector<Stack>{{some({4, 6}), some({4, 6}, 1), some({4, 6}, 2)}};
       }},
      {"aten::elu_backward",
       [] {
         return std::vector<Stack>{{some({4, 6}), 1.0, 1.0, 1.0, false, some({4, 6}, 1) - 0.5}};
       }},
      {"aten::copy",
       [] {
         return std::vector<Stack>{{some({4, 6}), some({6}, 1), false}};
       }},
      {"aten::_conj",
       [] {
         return std::vector<Stack>{{at::complex(some({4, 6}), some({4, 6}, 1))}};
       }},
      {"aten::_conj_physical",
       [] {
         return std::vector<Stack>{{at::complex(some({4, 6}), some({4, 6}, 1))}};
       }},
      {"aten::isin.Tensor_Scalar",
       [] {
         return std::vector<Stack>{{whole_numbers({4, 6}, 3), 1, false, false}};
       }},
      {"aten::any",
       [] {
         return std::vector<Stack>{{truths({4, 6})}};
       }},
      {"aten::all",
       [] {
         return std::vector<Stack>{{truths({4, 6})}};
       }},
      {"aten::any.dim",
       [] {
         return std::vector<Stack>{{truths({4, 6}), 1, false}};
       }},
      {"aten::all.dim",
       [] {
         return std::vector<Stack>{{truths({4, 6}), 1, false}};
       }},
      {"aten::any.dims",
       [] {
         return std::vector<Stack>{{truths({4, 6}), Integers{1}, false}};
       }},
      {"aten::all.dims",
       [] {
         return std::vector<Stack>{{truths({4, 6}), Integers{1}, false}};
       }},
      {"aten::mean",
       [] {
         return std::vector<Stack>{{some({5, 6}), none()}};
       }},
      {"aten::mean.dim",
       [] {
         return std::vector<Stack>{{some({5, 6}), Integers{0}, false, none()},
                                   {some({5, 6}), Integers{0, 1}, true, none()}};
       }},
      {"aten::sum.dim_IntList",
       [] {
         return std::vector<Stack>{{some({5, 6}), Integers{0}, false, none()},
                                   {some({5, 6}), Integers{1}, true, none()}};
       }},
  };
  return samples;
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
  if (const auto found = table().find(op.name); found != table().end()) return found->second();
  if (op.in_place && op.functional && op.rule) {
    if (const auto found = table().find(op.rule->op); found != table().end()) return found->second();
  }
  const auto& schema = op.handle.schema();
  auto base = schema.name().substr(schema.name().find("::") + 2);
  if (base.ends_with('_')) base.pop_back();
  Stack sample;
  int n_tensors = 0;
  for (const auto& argument : schema.arguments()) sample.push_back(by_type(argument, base, n_tensors));
  if (schema.name().starts_with("aten::_fused_")) {
    // Steps are counted in tensors of one element.
    const auto at = op.argument("state_steps");
    const auto unused = op.argument("max_exp_avg_sqs");
    if (unused >= 0) sample[static_cast<std::size_t>(unused)] = Tensors{};
    if (at >= 0)
      sample[static_cast<std::size_t>(at)] = Tensors{at::scalar_tensor(1.0f), at::scalar_tensor(1.0f)};
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
