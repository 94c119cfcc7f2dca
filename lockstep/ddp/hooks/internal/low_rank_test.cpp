// The parts of PowerSGD: seeds, the shapes of matrices, which are compressed, orthogonal columns.
#include "lockstep/ddp/hooks/internal/low_rank.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "lockstep/ddp/hooks/hooks_testing.h"

namespace lockstep {
namespace {

using hooks_testing::drawn;
using internal::MatrixShape;

TEST(LowRank, DrawsTheSeedsThatNumpyDraws) {
  internal::SeedSequence seeds(0);
  EXPECT_EQ(seeds.next(), 209652396U);  // numpy.random.RandomState(0).randint(1000000000), twice
  EXPECT_EQ(seeds.next(), 398764591U);
  internal::SeedSequence later(0);
  for (int i = 0; i < 50; ++i) seeds.next();
  later.skip(seeds.n_drawn());
  EXPECT_EQ(later.next(), seeds.next());
}

TEST(LowRank, SeesAGradientAsItsMemoryLies) {
  EXPECT_EQ(internal::matrix_shape(at::zeros({4, 3})), (MatrixShape{4, 3}));
  EXPECT_EQ(internal::matrix_shape(at::zeros({4, 3}).t()), (MatrixShape{4, 3}));
  EXPECT_EQ(internal::matrix_shape(at::zeros({4, 3, 2, 5})), (MatrixShape{4, 30}));
  EXPECT_EQ(internal::matrix_shape(at::zeros({4, 3, 2, 5}).contiguous(at::MemoryFormat::ChannelsLast)),
            (MatrixShape{4, 30}));
  EXPECT_EQ(internal::matrix_shape(at::zeros({7})), (MatrixShape{7, 1}));
  EXPECT_EQ(internal::matrix_shape(at::zeros({})), (MatrixShape{1, 1}));
  EXPECT_EQ(internal::matrix_shape(at::zeros({4, 3}, at::kComplexFloat)), (MatrixShape{4, 6}));
  EXPECT_EQ(internal::matrix_shape(at::zeros({0, 3})), (MatrixShape{0, 1}));
}

TEST(LowRank, CompressesWhatSavesEnough) {
  EXPECT_TRUE(internal::worth_compressing({8, 8}, 1, 2));   // 32 < 64
  EXPECT_FALSE(internal::worth_compressing({4, 4}, 1, 2));  // 16 < 16
  EXPECT_FALSE(internal::worth_compressing({8, 8}, 2, 2));  // 64 < 64
  EXPECT_FALSE(internal::worth_compressing({1000, 1}, 1, 2));
  EXPECT_TRUE(internal::worth_compressing({4, 4}, 1, 1.5));
}

TEST(LowRank, MakesColumnsOrthonormal) {
  for (const std::int64_t columns : {1, 2, 3, 5}) {
    const at::Tensor before = drawn(11, {2, 9, columns});
    const at::Tensor matrices = before.clone();
    internal::orthogonalise(matrices, 0);
    const at::Tensor gram = at::bmm(matrices.transpose(1, 2), matrices);
    EXPECT_TRUE(at::allclose(gram, at::eye(columns).expand({2, columns, columns}), 1e-5, 1e-6)) << gram;
    // The same span: projecting changes nothing.
    EXPECT_TRUE(
        at::allclose(at::bmm(matrices, at::bmm(matrices.transpose(1, 2), before)), before, 1e-4, 1e-5));
  }
}

TEST(LowRank, AColumnOfZerosStaysOne) {
  at::Tensor matrices = drawn(12, {2, 5, 2});
  matrices.select(0, 0).select(1, 0).zero_();
  internal::orthogonalise(matrices, 0);
  EXPECT_TRUE(matrices.isfinite().all().item<bool>());
  EXPECT_EQ(matrices.select(0, 0).select(1, 0).abs().max().item<float>(), 0);
  EXPECT_NEAR(matrices.select(0, 1).select(1, 0).norm().item<float>(), 1, 1e-5);
}

TEST(LowRank, AColumnThatAddsNothingBecomesZero) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const at::Tensor column = drawn(13, {1, 50, 1}).to(dtype);
    const at::Tensor matrices = at::cat({column, column * 3}, 2);
    internal::orthogonalise(matrices, 0);
    EXPECT_EQ(matrices.select(2, 1).abs().max().item<float>(), 0) << dtype << matrices;
    EXPECT_NEAR(matrices.select(2, 0).to(at::kFloat).norm().item<float>(), 1, 1e-2);
  }
}

TEST(LowRank, NearlyParallelColumnsBecomeOrthogonalAllTheSame) {
  const at::Tensor column = drawn(13, {1, 50, 1});
  const at::Tensor matrices = at::cat({column, column + 1e-4 * drawn(14, {1, 50, 1})}, 2);
  internal::orthogonalise(matrices, 0);
  const at::Tensor gram = at::bmm(matrices.transpose(1, 2), matrices);
  EXPECT_TRUE(at::allclose(gram, at::eye(2).unsqueeze(0), 0, 1e-6)) << gram;
}

TEST(LowRank, EpsilonShortensColumns) {
  at::Tensor matrices = at::ones({1, 4, 1});
  internal::orthogonalise(matrices, 2);
  EXPECT_TRUE(at::allclose(matrices, at::ones({1, 4, 1}) / 4));  // norm 2, plus 2
}

}  // namespace
}  // namespace lockstep
