// Arguments of products, layers and losses.
#include <ATen/ATen.h>

#include "lockstep/dtensor/internal/rule_samples.h"

namespace lockstep::dtensor_internal::samples {

Table layer_samples() {
  return {
      {"aten::mm", {Stack{some({6, 4}), some({4, 5})}}},
      {"aten::bmm", {Stack{some({4, 3, 5}), some({4, 5, 6})}}},
      {"aten::mv", {Stack{some({6, 4}), some({4})}}},
      {"aten::dot", {Stack{some({7}), some({7}, 1)}}},
      {"aten::vdot", {Stack{some({7}), some({7}, 1)}}},
      {"aten::ger", {Stack{some({6}), some({5})}}},
      {"aten::addmm",
       {Stack{some({5}), some({6, 4}), some({4, 5}), 1, 1},
        Stack{some({6, 5}), some({6, 4}), some({4, 5}), 0.5, 2}}},
      {"aten::addmm_", {Stack{some({6, 5}), some({6, 4}), some({4, 5}), 0.5, 2}}},
      {"aten::baddbmm", {Stack{some({4, 3, 6}), some({4, 3, 5}), some({4, 5, 6}), 1, 1}}},
      {"aten::addbmm", {Stack{some({3, 6}), some({4, 3, 5}), some({4, 5, 6}), 1, 1}}},
      {"aten::addmv", {Stack{some({6}), some({6, 4}), some({4}), 1, 1}}},
      {"aten::addr", {Stack{some({6, 5}), some({6}), some({5}), 1, 1}}},
      {"aten::_fused_rms_norm", {Stack{some({4, 5, 6}), Integers{6}, some({6}), 1e-5}}},
      {"aten::_softmax", {Stack{some({4, 6}), 1, false}}},
      {"aten::_log_softmax", {Stack{some({4, 6}), 1, false}}},
      {"aten::_softmax_backward_data",
       {Stack{some({4, 6}), some({4, 6}, 1).softmax(1), 1, static_cast<std::int64_t>(at::kFloat)}}},
      {"aten::_log_softmax_backward_data",
       {Stack{some({4, 6}), some({4, 6}, 1).log_softmax(1), 1, static_cast<std::int64_t>(at::kFloat)}}},
      {"aten::embedding", {Stack{some({7, 4}), whole_numbers({3, 5}, 7), -1, false, false}}},
      {"aten::embedding_dense_backward",
       {Stack{some({3, 5, 4}), whole_numbers({3, 5}, 7), 7, -1, false},
        Stack{some({3, 5, 4}), whole_numbers({3, 5}, 7), 7, 2, false},
        Stack{some({3, 5, 4}), whole_numbers({3, 5}, 7), 7, -1, true}}},
      {"aten::native_layer_norm",
       {Stack{some({4, 5, 6}), Integers{6}, some({6}), some({6}, 1), 1e-5},
        Stack{some({4, 5, 6}), Integers{5, 6}, none(), none(), 1e-5}}},
      {"aten::native_layer_norm_backward",
       [] {
         const auto x = some({4, 5, 6}, 2);
         const auto [y, mean, rstd] = at::native_layer_norm(x, {6}, some({6}), some({6}, 1), 1e-5);
         return std::vector<Stack>{{some({4, 5, 6}), x, Integers{6}, mean, rstd, some({6}), some({6}, 1),
                                    std::vector<bool>{true, true, true}}};
       }()},
      {"aten::convolution",
       {Stack{some({4, 3, 5, 5}), some({6, 3, 3, 3}), some({6}), Integers{1, 1}, Integers{1, 1},
              Integers{1, 1}, false, Integers{0, 0}, 1}}},
      {"aten::convolution_backward",
       {Stack{some({4, 6, 5, 5}), some({4, 3, 5, 5}), some({6, 3, 3, 3}), Integers{6}, Integers{1, 1},
              Integers{1, 1}, Integers{1, 1}, false, Integers{0, 0}, 1,
              std::vector<bool>{true, true, true}}}},
      {"aten::max_pool2d_with_indices",
       {Stack{some({4, 3, 6, 6}), Integers{2, 2}, Integers{2, 2}, Integers{0, 0}, Integers{1, 1}, false}}},
      {"aten::max_pool2d_with_indices_backward",
       [] {
         const auto x = some({4, 3, 6, 6});
         const auto [y, at] = at::max_pool2d_with_indices(x, {2, 2});
         return std::vector<Stack>{{some({4, 3, 3, 3}), x, Integers{2, 2}, Integers{2, 2}, Integers{0, 0},
                                    Integers{1, 1}, false, at}};
       }()},
      {"aten::avg_pool2d",
       {Stack{some({4, 3, 6, 6}), Integers{2, 2}, Integers{2, 2}, Integers{0, 0}, false, true, none()}}},
      {"aten::avg_pool2d_backward",
       {Stack{some({4, 3, 3, 3}), some({4, 3, 6, 6}), Integers{2, 2}, Integers{2, 2}, Integers{0, 0}, false,
              true, none()}}},
      {"aten::avg_pool1d", {Stack{some({4, 3, 6}), Integers{2}, Integers{2}, Integers{0}, false, true}}},
      {"aten::_adaptive_avg_pool2d", {Stack{some({4, 3, 6, 6}), Integers{2, 2}}}},
      {"aten::_adaptive_avg_pool2d_backward", {Stack{some({4, 3, 2, 2}), some({4, 3, 6, 6})}}},
      {"aten::upsample_nearest2d", {Stack{some({4, 3, 3, 3}), Integers{6, 6}, none(), none()}}},
      {"aten::upsample_bilinear2d", {Stack{some({4, 3, 3, 3}), Integers{6, 6}, false, none(), none()}}},
      {"aten::reflection_pad2d", {Stack{some({4, 3, 5, 5}), Integers{1, 1, 2, 0}}}},
      {"aten::replication_pad2d", {Stack{some({4, 3, 5, 5}), Integers{1, 1, 2, 0}}}},
      {"aten::reflection_pad1d", {Stack{some({4, 3, 5}), Integers{1, 2}}}},
      {"aten::replication_pad1d", {Stack{some({4, 3, 5}), Integers{1, 2}}}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       {Stack{some({2, 4, 6, 8}), some({2, 4, 6, 8}, 1), some({2, 4, 6, 8}, 2), 0.0, true, none(), none()}}},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
       [] {
         const auto q = some({2, 4, 6, 8}), k = some({2, 4, 6, 8}, 1), v = some({2, 4, 6, 8}, 2);
         const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, true);
         return std::vector<Stack>{{some({2, 4, 6, 8}, 3), q, k, v, out, lse, 0.0, true, none(), none()}};
       }()},
      {"aten::nll_loss_forward",
       [] {
         const auto x = some({5, 4}).log_softmax(1);
         return std::vector<Stack>{{x, whole_numbers({5}, 4), none(), 1, -100},
                                   {x, whole_numbers({5}, 4), some({4}), 1, 2},
                                   {x, whole_numbers({5}, 4), none(), 0, -100},
                                   {x, whole_numbers({5}, 4), none(), 2, -100}};
       }()},
      {"aten::nll_loss_backward",
       {Stack{at::scalar_tensor(1.5f), some({5, 4}), whole_numbers({5}, 4), none(), 1, -100,
              at::scalar_tensor(5.0f)},
        Stack{some({5}), some({5, 4}), whole_numbers({5}, 4), none(), 0, -100, at::scalar_tensor(0.0f)}}},
      {"aten::binary_cross_entropy_with_logits", {Stack{some({5, 6}), some({5, 6}, 1), none(), none(), 1}}},
      {"aten::native_dropout_backward", {Stack{some({4, 6}), truths({4, 6}), 2.0}}},
  };
}

}  // namespace lockstep::dtensor_internal::samples
