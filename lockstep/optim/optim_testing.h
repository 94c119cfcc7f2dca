// Shared by the tests of this folder: parameters with values of their own, and gradients that depend on rank
// and step.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>

#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/log.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/tensor/tensor_testing.h"

namespace lockstep::testing {

using tensor_testing::drawn;

inline std::vector<at::Tensor> make_parameters(std::uint64_t seed = 1) {
  std::vector<at::Tensor> parameters;
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{4, 3}, {7}, {2, 5}, {1}, {3, 3}})
    parameters.push_back(drawn(++seed, sizes).requires_grad_());
  return parameters;
}

// The gradient of a made-up loss: it depends on the parameter, so that errors grow.
inline void set_gradients(const std::vector<at::Tensor>& parameters, int step, int rank = 0) {
  std::uint64_t seed = 1000 + 100 * static_cast<std::uint64_t>(step) + 10 * static_cast<std::uint64_t>(rank);
  for (const at::Tensor& parameter : parameters)
    parameter.mutable_grad() = drawn(++seed, parameter.sizes()) + 0.1 * parameter.detach();
}

inline void expect_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                         const std::string& what = "") {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::allclose(actual[i].detach(), expected[i].detach(), 1e-6, 1e-7))
        << what << " parameter " << i << "\n"
        << actual[i] << "\nexpected\n"
        << expected[i];
  }
}

// All ranks of the default group hold the same bits.
inline void expect_same_on_all_ranks(const std::vector<at::Tensor>& tensors, const std::string& what = "") {
  for (const at::Tensor& tensor : tensors) {
    auto first = tensor.detach().clone();
    broadcast(first, {.src = 0});
    expect_equal(tensor.detach(), first, what);
  }
}

// Counts warnings that contain some text, from all threads, while it lives. One at a time.
class Warnings {
 public:
  explicit Warnings(std::string_view part) {
    part_ = part;
    n_ = 0;
    set_log_sink([](LogLevel level, std::string_view text) {
      if (level == LogLevel::kWarn && text.find(part_) != std::string_view::npos) ++n_;
    });
  }
  ~Warnings() { set_log_sink(nullptr); }
  int count() const { return n_; }

 private:
  static inline std::string_view part_;
  static inline std::atomic<int> n_{0};
};

}  // namespace lockstep::testing
