// For the tests of this folder: sample values, and comparing a sharded tensor with a plain one.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

#include "lockstep/dtensor/dtensor.h"
#include "lockstep/group/group_testing.h"

namespace lockstep::testing {

// No two elements are equal; other ones for another shift.
inline at::Tensor waves(at::IntArrayRef sizes, double shift = 0) {
  return (at::arange(c10::multiply_integers(sizes), at::kFloat) * 0.37 + shift).sin().reshape(sizes);
}

// The whole of `actual`, which may be plain, is `expected`. Collective where it is sharded.
inline void expect_whole(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  const auto whole = is_dtensor(actual) ? full_tensor(actual.detach()) : actual.detach();
  ASSERT_EQ(whole.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(whole, expected.detach(), 1e-4, 1e-5))
      << what << ", " << describe(actual) << " got\n"
      << whole << "\nexpected\n"
      << expected.detach();
}

}  // namespace lockstep::testing
