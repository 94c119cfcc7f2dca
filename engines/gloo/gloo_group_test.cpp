// Process groups over Gloo, in a program that also holds libtorch's own gloo.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "lockstep/collective/collective.h"

namespace lockstep {
namespace {

TEST(GlooGroup, IsAvailableAndReportedAsSuch) {
  EXPECT_TRUE(is_gloo_available());
  EXPECT_TRUE(is_backend_available("cpu:gloo"));
  EXPECT_TRUE(is_backend_available("GLOO"));
}

TEST(GlooGroup, ReducesGathersAndBroadcastsTensors) {
  for (const std::string backend : {"gloo", "cpu:gloo"}) {
    for (const int size : {2, 3, 4}) {
      const auto body = [&](int rank) {
        for (const int count : {1, 1000, 200'000}) {
          const auto x = at::full({count}, rank + 1.0f);
          all_reduce(x);
          EXPECT_TRUE(at::equal(x, at::full({count}, static_cast<float>(size * (size + 1) / 2))));
          const auto y = rank == 1 ? at::arange(count) : at::full({count}, int64_t{-1});
          broadcast(y, {.src = 1});
          EXPECT_TRUE(at::equal(y, at::arange(count)));
          auto work = all_reduce(x, {.op = ReduceOp::kMax, .async_op = true});
          work.wait();
        }
        barrier();
      };
      run_threads(size, body, {.backend = backend});
    }
  }
}

TEST(GlooGroup, CallsThatDifferRaiseOnEveryRankAndNothingEndsTheProgram) {
  const auto body = [](int rank) {
    const auto x = at::ones({rank == 0 ? 10 : 20});
    try {
      all_reduce(x);
      ADD_FAILURE() << "different sizes were taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
      EXPECT_NE(std::string(error.what()).find("20 elements"), std::string::npos) << error.what();
    }
  };
  run_threads(2, body, {.backend = "gloo"});
}

}  // namespace
}  // namespace lockstep
