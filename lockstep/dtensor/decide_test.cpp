// Decisions: what they may be remembered by, and which alternatives a call does not have.
#include "lockstep/dtensor/internal/decide.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "lockstep/dtensor/dtensor.h"
#include "lockstep/dtensor/internal/meta.h"
#include "lockstep/group/group_testing.h"

namespace lockstep {
namespace {

using testing::world;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor sines(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).sin().reshape(sizes);
}

void expect_values(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  EXPECT_TRUE(at::allclose(actual, expected, 1e-5, 1e-6)) << what << " got\n"
                                                          << actual << "\nexpected\n"
                                                          << expected;
}

TEST(Decisions, OfANormAreNotUsedForAnotherOrder) {
  world(2, [](int) {
    const auto whole = sines({4, 6});
    const auto x = distribute_tensor(whole, init_device_mesh("cpu", {2}), {Shard(0)});
    for (const double order : {2.0, kInfinity, -kInfinity, 1.0, 0.0}) {
      const auto what = "order " + std::to_string(order);
      expect_values(full_tensor(at::linalg_vector_norm(x, order)), at::linalg_vector_norm(whole, order),
                    what);
      expect_values(full_tensor(at::norm(x, order, {0})), at::norm(whole, order, {0}), "norm, " + what);
    }
  });
}

TEST(Decisions, OfAnIndexAreNotUsedForAMask) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto whole = sines({4, 4});
    const auto x = distribute_tensor(whole, mesh, {Shard(1)});
    const auto index = at::arange(16, at::kLong).remainder(4).reshape({4, 4});
    const auto mask = index.gt(1);
    for (const auto& at : {index, mask}) {
      const auto chosen = at::index(x, {from_local(at, mesh, {Replicate()})});
      expect_values(full_tensor(chosen), at::index(whole, {at}),
                    "indices of type " + std::string(at.toString()));
    }
  });
}

// Whatever the layout: the values of plain tensors, from a table whose rows are interleaved.
TEST(Decisions, MoveInterleavedPiecesWhereOneRangeIsNeeded) {
  world(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto table = sines({8, 3});
    const auto index = at::arange(8, at::kLong).mul(3).remainder(8).reshape({2, 4});
    const auto weight = distribute_tensor(table, mesh, {Shard(0, 2)}, {.src_data_rank = {}});
    const auto found = at::embedding(weight, from_local(index, mesh, {Replicate()}));
    expect_values(full_tensor(found), at::embedding(table, index), "embedding");

    auto plain = sines({5, 8}).requires_grad_();
    const auto target = at::arange(5, at::kLong);
    auto scores =
        distribute_tensor(plain.detach(), mesh, {Shard(1, 2)}, {.src_data_rank = {}}).requires_grad_();
    const auto loss = at::nll_loss(scores, from_local(target, mesh, {Replicate()}));
    const auto expected = at::nll_loss(plain, target);
    expect_values(full_tensor(loss), expected, "nll_loss");
    loss.backward();
    expected.backward();
    expect_values(full_tensor(scores.grad()), plain.grad(), "the gradient of nll_loss");
  });
}

TEST(Decisions, PassAPartialSumOnlyThroughConversionsThatKeepSums) {
  world(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2});
    const auto halves = from_local(at::full({3}, 0.5), mesh, {Partial()});
    expect_values(full_tensor(halves.to(at::kLong)), at::ones({3}, at::kLong), "to long");
    expect_values(full_tensor(at::sum(halves, at::kLong)), at::scalar_tensor(3, at::kLong), "sum as long");
    EXPECT_EQ(placements(halves.to(at::kDouble)), Placements{Partial()});
    // 1 and -1 are each true; their sum is not.
    const auto opposite = from_local(at::full({3}, rank == 0 ? 1 : -1, at::kLong), mesh, {Partial()});
    expect_values(full_tensor(opposite.to(at::kBool)), at::zeros({3}, at::kBool), "to bool");
    EXPECT_EQ(placements(opposite.to(at::kFloat)), Placements{Partial()});
    EXPECT_EQ(placements(opposite.sum()), Placements{Partial()});
  });
}

// torch sends operators here only for sharded tensors; what a library redispatches by hand is not known.
TEST(Decisions, AreRefusedWithoutAShardedTensor) {
  world(1, [](int) {
    distribute_tensor(sines({2}), init_device_mesh("cpu", {1}), {Shard(0)});  // installs the kernels
    const auto neg = c10::Dispatcher::singleton().findSchemaOrThrow("aten::neg", "");
    torch::jit::Stack stack{at::scalar_tensor(1.0)};
    try {
      neg.redispatchBoxed(c10::DispatchKeySet(dtensor_internal::kKey), &stack);
      FAIL() << "nothing raised";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInternal) << error.what();
      EXPECT_NE(std::string(error.what()).find("no sharded tensor"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace lockstep
