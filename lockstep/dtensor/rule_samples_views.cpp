// Arguments of views, and of operators that choose, place and join.
#include <ATen/ATen.h>

#include "lockstep/dtensor/internal/rule_samples.h"

namespace lockstep::dtensor_internal::samples {
namespace {

c10::List<std::optional<at::Tensor>> indices(std::vector<std::optional<at::Tensor>> list) {
  return c10::List<std::optional<at::Tensor>>(c10::ArrayRef<std::optional<at::Tensor>>(list));
}

}  // namespace

Table view_samples() {
  return {
      {"aten::view",
       {Stack{some({4, 6, 5}), Integers{24, 5}}, Stack{some({4, 6, 5}), Integers{4, 30}},
        Stack{some({24, 5}), Integers{4, 6, 5}}, Stack{some({4, 6}), Integers{2, 2, 3, 2}},
        Stack{some({5, 3}), Integers{5, 1, 3}}, Stack{some({4, 6}), Integers{-1}}}},
      {"aten::_unsafe_view", {Stack{some({4, 6, 5}), Integers{24, 5}}}},
      {"aten::view_copy", {Stack{some({4, 6, 5}), Integers{24, 5}}}},
      {"aten::_reshape_alias", {Stack{some({4, 6}), Integers{24}, Integers{1}}}},
      {"aten::transpose.int", {Stack{some({4, 5, 6}), 0, -1}}},
      {"aten::permute", {Stack{some({4, 5, 6}), Integers{2, 0, 1}}}},
      {"aten::unsqueeze", {Stack{some({4, 5}), 1}, Stack{some({4, 5}), -1}}},
      {"aten::squeeze", {Stack{some({4, 1, 5})}}},
      {"aten::squeeze.dim", {Stack{some({4, 1, 5}), 1}, Stack{some({4, 1, 5}), 0}}},
      {"aten::squeeze.dims", {Stack{some({4, 1, 5}), Integers{1}}}},
      {"aten::select.int", {Stack{some({4, 5, 6}), 1, 2}}},
      {"aten::slice.Tensor", {Stack{some({4, 6}), 1, 1, 4, 1}, Stack{some({4, 6}), 1, 0, 100, 1}}},
      {"aten::split.Tensor", {Stack{some({4, 6}), 4, 1}}},
      {"aten::split_with_sizes", {Stack{some({4, 6}), Integers{1, 5}, 1}}},
      {"aten::expand", {Stack{some({4, 1}), Integers{3, -1, 5}, false}}},
      {"aten::diagonal", {Stack{some({4, 5, 6}), 0, 0, 2}, Stack{some({4, 5, 6}), 1, 1, 2}}},
      {"aten::diagonal_backward", {Stack{some({4, 5}), Integers{4, 5, 6}, 0, 1, 2}}},
      {"aten::unfold", {Stack{some({4, 6}), 1, 3, 2}}},
      {"aten::unfold_backward", {Stack{some({4, 2, 3}), Integers{4, 6}, 1, 3, 2}}},
      {"aten::view_as_real", {Stack{at::complex(some({4, 5}), some({4, 5}, 1))}}},
      {"aten::view_as_complex", {Stack{some({4, 5, 2})}}},
      {"aten::view.dtype",
       {Stack{some({5, 6}), static_cast<std::int64_t>(at::kInt)},
        Stack{some({5, 6}), static_cast<std::int64_t>(at::kShort)}}},
      {"aten::as_strided", {Stack{some({5, 6}), Integers{3, 2}, Integers{6, 2}, 1}}},
      {"aten::slice_backward", {Stack{some({4, 3}), Integers{4, 6}, 1, 1, 4, 1}}},
      {"aten::select_backward", {Stack{some({4, 6}), Integers{4, 5, 6}, 1, 2}}},
      {"aten::new_zeros", {Stack{some({4, 6}), Integers{4, 6}, none(), none(), none(), none()}}},
      {"aten::new_ones", {Stack{some({4, 6}), Integers{3, 6}, none(), none(), none(), none()}}},
      {"aten::new_full", {Stack{some({4, 6}), Integers{4, 6}, 2.5, none(), none(), none(), none()}}},
      {"aten::flip", {Stack{some({4, 5}), Integers{1}}}},
      {"aten::roll", {Stack{some({4, 5}), Integers{2}, Integers{1}}}},
      {"aten::index_select", {Stack{some({4, 5, 6}), 1, whole_numbers({3}, 5)}}},
      {"aten::index_fill.int_Scalar", {Stack{some({4, 5}), 1, whole_numbers({2}, 5), 2.5}}},
      {"aten::index_add", {Stack{some({4, 5}), 1, whole_numbers({3}, 5), some({4, 3}), 1}}},
      {"aten::index_copy", {Stack{some({4, 5}), 1, at::tensor({3, 0, 4}, at::kLong), some({4, 3})}}},
      {"aten::gather", {Stack{some({4, 5}), 1, whole_numbers({4, 3}, 5), false}}},
      {"aten::scatter.src", {Stack{some({4, 5}), 1, whole_numbers({4, 2}, 5), some({4, 2}, 1)}}},
      {"aten::scatter.value", {Stack{some({4, 5}), 1, whole_numbers({4, 2}, 5), 2.5}}},
      {"aten::scatter_add", {Stack{some({4, 5}), 1, whole_numbers({4, 3}, 5), some({4, 3}, 1)}}},
      {"aten::cat", {Stack{Tensors{some({4, 2}), some({4, 3}, 1)}, 1}}},
      {"aten::stack", {Stack{Tensors{some({4, 3}), some({4, 3}, 1)}, 1}}},
      {"aten::tril", {Stack{some({4, 5, 5}), 0}}},
      {"aten::triu", {Stack{some({4, 5, 5}), 1}}},
      {"aten::repeat", {Stack{some({4, 5}), Integers{2, 1, 3}}}},
      {"aten::constant_pad_nd", {Stack{some({4, 5}), Integers{1, 2}, 0.5}}},
      {"aten::index.Tensor",
       {Stack{some({4, 5, 6}), indices({std::nullopt, whole_numbers({3}, 5)})},
        Stack{some({4, 5, 6}), indices({whole_numbers({3}, 4), std::nullopt, whole_numbers({3}, 6)})}}},
      {"aten::_unsafe_index.Tensor",
       {Stack{some({4, 5, 6}), indices({std::nullopt, whole_numbers({3}, 5)})}}},
      {"aten::index_put",
       {Stack{some({4, 5, 6}), indices({std::nullopt, at::tensor({3, 0, 2}, at::kLong)}), some({4, 3, 6}, 1),
              false},
        Stack{some({4, 5, 6}), indices({std::nullopt, whole_numbers({3}, 5)}), some({6}, 1), true}}},
      {"aten::_unsafe_index_put",
       {Stack{some({4, 5}), indices({std::nullopt, at::tensor({3, 0, 2}, at::kLong)}), some({4, 3}, 1),
              false}}},
  };
}

}  // namespace lockstep::dtensor_internal::samples
