// For the tests of this folder and of collective/: worlds of threads, sample tensors and the expected results
// of the collectives.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/collective/collective.h"
#include "lockstep/debug/debug.h"

namespace lockstep::testing {

inline constexpr int kSizes[] = {1, 2, 3, 4, 7, 8};
inline constexpr Milliseconds kPatience{60'000};

inline void world(int n, const std::function<void(int)>& fn) {
  at::set_num_threads(1);
  run_threads(n, fn, {.timeout = kPatience});
}

// Small whole numbers, so that every type holds every sum exactly; different on every rank.
inline at::Tensor sample(int rank, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto n = c10::multiply_integers(sizes);
  auto values = at::arange(n, at::kLong).add_(rank).remainder_(3).add_(rank % 2).reshape(sizes);
  return values.to(dtype);
}

inline at::Tensor fold(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  const bool logical = a.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return logical ? a.logical_or(b) : a + b;
    case ReduceOp::kProduct:
      return logical ? a.logical_and(b) : a * b;
    case ReduceOp::kMin:
      return at::minimum(a, b);
    case ReduceOp::kMax:
      return at::maximum(a, b);
    case ReduceOp::kBand:
      return a.bitwise_and(b);
    case ReduceOp::kBor:
      return a.bitwise_or(b);
    case ReduceOp::kBxor:
      return a.bitwise_xor(b);
  }
  return {};
}

inline at::Tensor reduced(const std::function<at::Tensor(int)>& input, int n, ReduceOp op) {
  const auto dtype = input(0).scalar_type();
  const auto wide = at::isFloatingType(dtype) ? at::kDouble : dtype;
  auto total = input(0).to(wide);
  for (int r = 1; r < n; ++r) total = fold(total, input(r).to(wide), op);
  if (op == ReduceOp::kAvg) total = total / n;
  return total.to(dtype);
}

// Equal to a few units in the last place of the type (AVG divides).
inline void expect_near(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  const bool half = actual.scalar_type() == at::kHalf || actual.scalar_type() == at::kBFloat16;
  const double tolerance = half ? 1e-2 : 1e-6;
  EXPECT_TRUE(at::allclose(actual.to(at::kDouble), expected.to(at::kDouble), tolerance, 0)) << what;
}

inline void expect_equal(const at::Tensor& actual, const at::Tensor& expected, const std::string& what = "") {
  EXPECT_TRUE(at::equal(actual, expected)) << what << " got\n" << actual << "\nexpected\n" << expected;
}

// The error `fn` raises; fails the test when it raises none.
inline Failure caught(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error.failure();
  }
  ADD_FAILURE() << "nothing was raised";
  return {};
}
inline bool says(const Failure& failure, const std::string& part) {
  return failure.message.find(part) != std::string::npos;
}
// `fn` raises kUsage with `part` in its message.
inline void refused(const std::function<void()>& fn, const std::string& part) {
  const auto failure = caught(fn);
  EXPECT_EQ(failure.kind, ErrorKind::kUsage) << failure.message;
  EXPECT_TRUE(says(failure, part)) << failure.message;
}

// The sum of what each member adds: its rank in the world, plus one.
inline float sum_over(const Group& group) {
  auto tensor = at::full({3}, static_cast<float>(get_rank() + 1));
  all_reduce(tensor, {.group = group});
  return tensor[2].item<float>();
}

inline std::vector<int> range(int from, int to, int step = 1) {
  std::vector<int> ranks;
  for (int rank = from; rank < to; rank += step) ranks.push_back(rank);
  return ranks;
}

inline constexpr at::ScalarType kFloats[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
inline constexpr at::ScalarType kInts[] = {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kBool};

}  // namespace lockstep::testing
