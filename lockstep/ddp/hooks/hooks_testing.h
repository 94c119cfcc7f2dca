// For the tests of this folder: buckets of drawn gradients, as a reducer would hand them to a hook.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cstdint>
#include <vector>

#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/internal/hook_future.h"
#include "lockstep/group/group_testing.h"
#include "lockstep/tensor/tensor_testing.h"

namespace lockstep::hooks_testing {

using Shapes = std::vector<std::vector<std::int64_t>>;

using tensor_testing::drawn;

// The flat gradients of one rank in one step; every rank can tell every other's.
inline at::Tensor gradients_of(int rank, int step, std::int64_t n) {
  return drawn(static_cast<std::uint64_t>(7000 + 100 * step + rank), {n});
}

inline at::Tensor mean_over(int n_ranks, const std::function<at::Tensor(int)>& value) {
  at::Tensor sum = value(0).to(at::kDouble);
  for (int r = 1; r < n_ranks; ++r) sum += value(r).to(at::kDouble);
  return sum / n_ranks;
}

inline std::int64_t count(const Shapes& shapes) {
  std::int64_t n = 0;
  for (const auto& shape : shapes) n += c10::multiply_integers(shape);
  return n;
}

// Owns what a GradBucket refers to.
class Bucket {
 public:
  Bucket(at::Tensor flat, const Shapes& shapes, std::size_t index = 0, bool is_last = true)
      : views_(cut(flat, shapes)), bucket_(index, flat, views_, views_, is_last) {}
  GradBucket& operator*() { return bucket_; }
  GradBucket* operator->() { return &bucket_; }

 private:
  static std::vector<at::Tensor> cut(const at::Tensor& flat, const Shapes& shapes) {
    std::vector<at::Tensor> views;
    std::int64_t at = 0;
    for (const auto& shape : shapes) {
      const std::int64_t n = c10::multiply_integers(shape);
      views.push_back(flat.narrow(0, at, n).view(shape));
      at += n;
    }
    return views;
  }
  std::vector<at::Tensor> views_;
  GradBucket bucket_;
};

// What the hook makes of one bucket, as the reducer would take it.
inline at::Tensor reduced_by(const CommHook& hook, GradBucket& bucket) {
  const at::Tensor like = bucket.buffer();
  const GradFuture future = hook.run(bucket);
  future->waitAndThrow();
  return internal::hook_result(*future, hook.name, like).view({-1});
}
inline at::Tensor reduced_by(const CommHook& hook, at::Tensor flat, const Shapes& shapes = {}) {
  Bucket bucket(flat, shapes.empty() ? Shapes{{flat.numel()}} : shapes);
  return reduced_by(hook, *bucket);
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                         const std::string& what = "") {
  ASSERT_EQ(actual.numel(), expected.numel()) << what;
  const at::Tensor a = actual.to(at::kDouble).view({-1}), e = expected.to(at::kDouble).view({-1});
  const double difference = (a - e).abs().max().item<double>();
  EXPECT_LE(difference, tolerance * e.abs().max().item<double>()) << what;
}

// Every rank holds the same bits.
inline void expect_same_on_all_ranks(const at::Tensor& tensor) {
  const int n = get_world_size();
  at::Tensor all = at::empty({n, tensor.numel()}, tensor.options());
  all_gather_into_tensor(all, tensor.contiguous());
  for (int r = 1; r < n; ++r) EXPECT_TRUE(at::equal(all[r], all[0])) << "rank " << r;
}

}  // namespace lockstep::hooks_testing
