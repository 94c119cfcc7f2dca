// PowerSGD against a written-out reference. All ranks are simulated in double precision in one place: with
// mean M of what the ranks hold (gradient plus error), the result is M projected on the span of M Q.
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "lockstep/base/log.h"
#include "lockstep/ddp/hooks/compose.h"
#include "lockstep/ddp/hooks/hooks_testing.h"
#include "lockstep/ddp/hooks/internal/low_rank.h"
#include "lockstep/ddp/hooks/power_sgd.h"

namespace lockstep {
namespace {

using namespace hooks_testing;
using internal::MatrixShape;
using lockstep::testing::refused;
using lockstep::testing::world;

// ---- the parts ----

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

// ---- the whole, against the reference ----

struct Case {
  const char* name;
  Shapes shapes;
  PowerSGDOptions options{};
  bool square = false;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

class Reference {
 public:
  Reference(const Case& c, int n_ranks) : case_(c), n_ranks_(n_ranks), seeds_(c.options.random_seed) {}

  // The mean of all ranks' gradients as the hook should give it. One bucket.
  at::Tensor step(const std::vector<at::Tensor>& flat) {
    const auto list = matrices(flat[0].numel());
    if (qs_.empty() || !case_.options.warm_start) draw(list);
    std::vector<at::Tensor> results;
    for (const Matrix& matrix : list) {
      std::vector<at::Tensor> held;
      for (int r = 0; r < n_ranks_; ++r) {
        at::Tensor part = at::zeros({matrix.n * matrix.m}, at::kDouble);
        part.narrow(0, 0, matrix.length)
            .copy_(flat[static_cast<std::size_t>(r)].narrow(0, matrix.at, matrix.length));
        held.push_back(part.view({matrix.n, matrix.m}));
      }
      const at::Tensor result = is_compressed(matrix) ? compressed(std::move(held), matrix.at) : mean(held);
      results.push_back(result.reshape({-1}).narrow(0, 0, matrix.length));
    }
    return at::cat(results);
  }
  void skip_seeds(std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) seeds_.next();
  }

 private:
  struct Matrix {
    std::int64_t n, m, length, at;
  };
  std::vector<Matrix> matrices(std::int64_t numel) const {
    if (case_.square) {
      std::int64_t side = 0;
      while (side * side < numel) ++side;
      return {{side, side, numel, 0}};
    }
    std::vector<Matrix> list;
    std::int64_t at = 0;
    for (const auto& shape : case_.shapes) {
      const std::int64_t n = c10::multiply_integers(shape);
      list.push_back({shape[0], n / shape[0], n, at});
      at += n;
    }
    return list;
  }
  std::int64_t rank_of(const Matrix& matrix) const {
    return std::min({matrix.n, matrix.m, case_.options.matrix_approximation_rank});
  }
  bool is_compressed(const Matrix& matrix) const {
    const auto sent = static_cast<double>((matrix.n + matrix.m) * rank_of(matrix));
    return case_.square ||
           sent * case_.options.min_compression_rate < static_cast<double>(matrix.n * matrix.m);
  }
  // Those of one shape after the other, in the order in which shapes come first.
  void draw(const std::vector<Matrix>& list) {
    at::Generator generator;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const auto same = [&](const Matrix& other) { return other.n == list[i].n && other.m == list[i].m; };
      if (std::any_of(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(i), same)) continue;
      for (const Matrix& matrix : list) {
        if (!same(matrix) || !is_compressed(matrix)) continue;
        if (!generator.defined()) generator = at::detail::createCPUGenerator(seeds_.next());
        const std::vector<std::int64_t> sizes{1, matrix.m, rank_of(matrix)};
        qs_[matrix.at] = at::randn(sizes, generator, at::TensorOptions(at::kFloat))[0].to(at::kDouble);
      }
    }
  }

  static at::Tensor mean(const std::vector<at::Tensor>& held) {
    at::Tensor sum = held[0].clone();
    for (std::size_t r = 1; r < held.size(); ++r) sum += held[r];
    return sum / static_cast<double>(held.size());
  }

  at::Tensor compressed(std::vector<at::Tensor> held, std::int64_t at) {
    if (case_.options.use_error_feedback) {
      for (int r = 0; r < n_ranks_; ++r) {
        const at::Tensor& error = errors_[{r, at}];
        if (error.defined()) held[static_cast<std::size_t>(r)] = held[static_cast<std::size_t>(r)] + error;
      }
    }
    const at::Tensor m = mean(held);
    const at::Tensor p = std::get<0>(at::linalg_qr(at::matmul(m, std::get<0>(at::linalg_qr(qs_[at])))));
    qs_[at] = at::matmul(m.t(), p);
    const at::Tensor result = at::matmul(p, qs_[at].t());
    for (int r = 0; r < n_ranks_; ++r) errors_[{r, at}] = held[static_cast<std::size_t>(r)] - result;
    return result;
  }

  const Case case_;
  const int n_ranks_;
  internal::SeedSequence seeds_;
  std::map<std::int64_t, at::Tensor> qs_;  // by place in the bucket
  std::map<std::pair<int, std::int64_t>, at::Tensor> errors_;
};

PowerSGDOptions with(PowerSGDOptions options) {
  options.start_powerSGD_iter = 2;
  return options;
}

const Shapes kMixed = {{12, 10}, {10}, {6, 4, 5}, {3, 2}, {12, 10}};
const Case kCases[] = {
    {"RankOne", kMixed, with({})},
    {"RankTwo", kMixed, with({.matrix_approximation_rank = 2, .min_compression_rate = 1.2})},
    {"RankThreeByQr", {{20, 30}, {8, 9}}, with({.matrix_approximation_rank = 3})},
    {"NothingKept", kMixed, with({.use_error_feedback = false, .warm_start = false})},
    {"NoFeedback", kMixed, with({.use_error_feedback = false})},
    {"NoWarmStart", kMixed, with({.warm_start = false})},
    {"AnotherSeed", kMixed, with({.random_seed = 77})},
    {"NothingToCompress", {{10}, {2, 2}}, with({})},
    {"Square", kMixed, with({}), true},
    {"SquareRankThree", {{9, 9}}, with({.matrix_approximation_rank = 3}), true},
};

class PowerSgd : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Cases, PowerSgd, ::testing::ValuesIn(kCases),
                         [](const auto& each) { return std::string(each.param.name); });

CommHook hook_of(const Case& c, const std::shared_ptr<PowerSGDState>& state) {
  return c.square ? batched_powerSGD_hook(state) : powerSGD_hook(state);
}

TEST_P(PowerSgd, AveragesFirstAndThenFollowsTheReference) {
  const Case& c = GetParam();
  const std::int64_t n = count(c.shapes);
  for (const int size : {2, 3}) {
    world(size, [&](int rank) {
      const auto state = std::make_shared<PowerSGDState>(c.options);
      const CommHook hook = hook_of(c, state);
      Reference reference(c, size);
      for (int step = 0; step < 6; ++step) {
        const at::Tensor flat = gradients_of(rank, step, n);
        const at::Tensor result = reduced_by(hook, flat, c.shapes);
        EXPECT_EQ(result.const_data_ptr(), flat.const_data_ptr());
        std::vector<at::Tensor> all;
        for (int r = 0; r < size; ++r) all.push_back(gradients_of(r, step, n));
        const at::Tensor want = step < 2
                                    ? mean_over(size, [&](int r) { return all[static_cast<std::size_t>(r)]; })
                                    : reference.step(all);
        expect_close(flat, want, 1e-4, base::cat(c.name, ", step ", step));
        expect_same_on_all_ranks(flat);
        EXPECT_EQ(state->iter(), step + 1);
      }
    });
  }
}

TEST(PowerSgdBatching, GivesWhatOneByOneGives) {
  const Shapes shapes = {{12, 10}, {5}, {12, 10}, {10, 12}, {12, 10}};
  world(2, [&](int rank) {
    // One matrix after another draws the same random numbers only when there is one shape; so keep Q out of
    // it: rank one gradients are found from any start.
    const auto one = powerSGD_hook(std::make_shared<PowerSGDState>(with({})));
    const auto together =
        powerSGD_hook(std::make_shared<PowerSGDState>(with({.batch_tensors_with_same_shape = true})));
    for (int step = 0; step < 4; ++step) {
      std::vector<at::Tensor> parts;
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        const auto seed = static_cast<std::uint64_t>(100 * step) + i;
        parts.push_back(shapes[i].size() == 1 ? drawn(seed, shapes[i])
                                              : at::matmul(drawn(seed, {shapes[i][0], 1}),
                                                           drawn(seed + 50, {1, shapes[i][1]})) *
                                                    (rank + 1));
        parts.back() = parts.back().reshape({-1});
      }
      const at::Tensor flat = at::cat(parts);
      const at::Tensor a = reduced_by(one, flat.clone(), shapes),
                       b = reduced_by(together, flat.clone(), shapes);
      expect_close(a, b, 1e-4);
      // Of rank one on every rank, with one span: nothing is lost.
      expect_close(b.narrow(0, 0, 120), flat.narrow(0, 0, 120) / (rank + 1) * 1.5, 1e-4);
    }
  });
}

TEST(PowerSgdError, IsWhatWasNotSentAndNothingGetsLost) {
  constexpr int kRanks = 3, kSteps = 5;
  const Shapes shapes = {{12, 10}, {7}};
  world(kRanks, [&](int rank) {
    const auto state = std::make_shared<PowerSGDState>(with({}));
    const CommHook hook = powerSGD_hook(state);
    at::Tensor given = at::zeros({127}, at::kDouble), sent = at::zeros({127}, at::kDouble);
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor flat = gradients_of(rank, step, 127);
      reduced_by(hook, flat, shapes);
      EXPECT_EQ(state->error(0).defined(), step >= 2);
      given += mean_over(kRanks, [&](int r) { return gradients_of(r, step, 127); });
      sent += flat.to(at::kDouble);
    }
    at::Tensor error = state->error(0).to(at::kDouble);
    EXPECT_EQ(error.narrow(0, 120, 7).abs().max().item<double>(), 0)
        << "what is averaged as it is has no error";
    EXPECT_GT(error.abs().max().item<double>(), 0.1);
    all_reduce(error, {.op = ReduceOp::kAvg});
    expect_close(sent + error, given, 1e-5);
  });
}

TEST(PowerSgdOrder, HoldsForManyBucketsWhoseFuturesAreAwaitedLate) {
  const Shapes shapes = {{16, 16}, {4}};
  for (const int size : {2, 3}) {
    world(size, [&](int rank) {
      const Case c{"", shapes, with({})};
      const auto state = std::make_shared<PowerSGDState>(c.options);
      const CommHook hook = powerSGD_hook(state);
      std::map<std::size_t, Reference> references;
      // The reference of bucket b draws the b-th seed.
      for (int step = 0; step < 5; ++step) {
        std::vector<at::Tensor> flats;
        std::vector<GradFuture> futures;
        for (std::size_t b = 0; b < 5; ++b) {
          flats.push_back(gradients_of(rank, 10 * step + static_cast<int>(b), 260));
          Bucket bucket(flats.back(), shapes, b, b == 4);
          futures.push_back(hook.run(*bucket));
        }
        for (const auto& future : futures) future->waitAndThrow();
        for (const auto& flat : flats) expect_same_on_all_ranks(flat);
        if (step < 2) continue;
        for (std::size_t b = 0; b < 5; ++b) {
          std::vector<at::Tensor> all;
          for (int r = 0; r < size; ++r) all.push_back(gradients_of(r, 10 * step + static_cast<int>(b), 260));
          auto found = references.find(b);
          if (found == references.end()) {
            found = references.emplace(b, Reference(c, size)).first;
            found->second.skip_seeds(b);
          }
          expect_close(flats[b], found->second.step(all), 1e-4, base::cat("step ", step, " bucket ", b));
        }
      }
      EXPECT_EQ(state->iter(), 5);
    });
  }
}

TEST(PowerSgdOrder, AStepThatWasGivenUpDoesNotHoldUpTheNext) {
  world(2, [](int rank) {
    const Shapes shapes = {{16, 16}};
    const auto state = std::make_shared<PowerSGDState>(
        PowerSGDOptions{.start_powerSGD_iter = 0, .use_error_feedback = false, .warm_start = false});
    const CommHook hook = powerSGD_hook(state);
    Bucket first(gradients_of(rank, 0, 256), shapes, 0, false);
    const GradFuture lost = hook.run(*first);
    Bucket again(gradients_of(rank, 1, 256), shapes, 0, true);
    reduced_by(hook, *again);
    EXPECT_TRUE(lost->hasError());
    EXPECT_EQ(lost->tryRetrieveErrorMessage(),
              "powerSGD_hook: the step of bucket 0 was given up before its end");
  });
}

TEST(PowerSgdWrapped, WorksOnHalfTypes) {
  const Shapes shapes = {{16, 16}, {5}};
  world(2, [&](int rank) {
    const auto state =
        std::make_shared<PowerSGDState>(with({.matrix_approximation_rank = 3, .min_compression_rate = 1}));
    const CommHook hook = fp16_compress_wrapper(powerSGD_hook(state));
    const at::Tensor u = drawn(5, {16, 1}), v = drawn(6, {1, 16});
    for (int step = 0; step < 4; ++step) {
      const at::Tensor flat = at::cat({(at::matmul(u, v) * (rank + 1)).view({-1}), at::ones({5})});
      const at::Tensor want = at::cat({(at::matmul(u, v) * 1.5).view({-1}), at::ones({5})});
      reduced_by(hook, flat, shapes);
      expect_close(flat, want, 2e-2, base::cat("step ", step));
    }
    EXPECT_EQ(state->error(0).scalar_type(), at::kHalf);
  });
}

at::Tensor rank_one(int rank, int step) {
  const auto seed = static_cast<std::uint64_t>(900 + step);
  return at::matmul(drawn(seed, {20, 1}), drawn(seed + 50, {1, 20})).view({-1}) * (rank + 1);
}

TEST(PowerSgdZeros, StayZerosAndWhatFollowsIsWhole) {
  for (const std::int64_t r : {1, 2, 3}) {
    world(2, [&](int rank) {
      const auto state = std::make_shared<PowerSGDState>(with({.matrix_approximation_rank = r}));
      for (int step = 0; step < 6; ++step) {
        const bool empty = step == 2 || step == 3;
        const at::Tensor flat = empty ? at::zeros({400}) : rank_one(rank, step);
        const at::Tensor want = empty ? at::zeros({400}) : rank_one(0, step) * 1.5;
        reduced_by(powerSGD_hook(state), flat, {{20, 20}});
        expect_close(flat, want, 1e-4, base::cat("rank ", r, ", step ", step));
      }
    });
  }
}

TEST(PowerSgdNaN, ReachesAllRanksAndIsForgotten) {
  world(2, [](int rank) {
    for (const std::int64_t r : {1, 2, 3}) {
      const auto state = std::make_shared<PowerSGDState>(with({.matrix_approximation_rank = r}));
      for (int step = 0; step < 6; ++step) {
        at::Tensor flat = rank_one(rank, step);
        if (step == 3 && rank == 1) flat[17] = std::numeric_limits<float>::infinity();
        reduced_by(powerSGD_hook(state), flat, {{20, 20}});
        if (step == 3) {
          EXPECT_FALSE(flat.isfinite().all().item<bool>());
        } else {
          expect_close(flat, rank_one(0, step) * 1.5, 1e-4, base::cat("rank ", r, ", step ", step));
        }
      }
    }
  });
}

// ---- the state ----

TEST(PowerSgdState, CountsWhatItSends) {
  world(2, [](int rank) {
    const auto state = std::make_shared<PowerSGDState>(with({}));
    EXPECT_EQ(state->compression_stats().compress_rate, 0);
    for (int step = 0; step < 4; ++step)
      reduced_by(powerSGD_hook(state), gradients_of(rank, step, 110), {{10, 10}, {10}});
    const CompressionStats stats = state->compression_stats();
    EXPECT_EQ(stats.numel_before, 2U * 110);
    EXPECT_EQ(stats.numel_after, 2U * (10 + 10 + 10));
    EXPECT_DOUBLE_EQ(stats.compress_rate, 110.0 / 30);

    const auto square = std::make_shared<PowerSGDState>(with({.matrix_approximation_rank = 2}));
    for (int step = 0; step < 3; ++step)
      reduced_by(batched_powerSGD_hook(square), gradients_of(rank, step, 90));
    EXPECT_EQ(square->compression_stats().numel_before, 90U);
    EXPECT_EQ(square->compression_stats().numel_after, 2U * 2 * 10);
  });
}

TEST(PowerSgdState, HasTorchsDefaults) {
  const PowerSGDOptions options;
  EXPECT_EQ(options.group, nullptr);
  EXPECT_EQ(options.matrix_approximation_rank, 1);
  EXPECT_EQ(options.start_powerSGD_iter, 1000);
  EXPECT_EQ(options.min_compression_rate, 2);
  EXPECT_TRUE(options.use_error_feedback);
  EXPECT_TRUE(options.warm_start);
  EXPECT_EQ(options.orthogonalization_epsilon, 0);
  EXPECT_EQ(options.random_seed, 0u);
  EXPECT_EQ(options.compression_stats_logging_frequency, 10'000);
  EXPECT_FALSE(options.batch_tensors_with_same_shape);
}

TEST(PowerSgdState, RefusesOptionsThatCannotWork) {
  world(1, [](int) {
    const auto make = [](PowerSGDOptions options) { return [options] { PowerSGDState state(options); }; };
    refused(make({.matrix_approximation_rank = 0}), "matrix_approximation_rank must be positive, it is 0");
    refused(make({.start_powerSGD_iter = 1}), "start_powerSGD_iter must be at least 2");
    refused(make({.start_powerSGD_iter = 1, .use_error_feedback = false}), "at least 2");
    refused(make({.start_powerSGD_iter = 1, .warm_start = false}), "at least 2");
    refused(make({.min_compression_rate = 0}), "min_compression_rate");
    refused(make({.orthogonalization_epsilon = -1}), "orthogonalization_epsilon");
    refused(make({.compression_stats_logging_frequency = 0}), "compression_stats_logging_frequency");
    refused([] { powerSGD_hook(nullptr); }, "state is null");
    refused([] { batched_powerSGD_hook(nullptr); }, "state is null");
    PowerSGDState early({.start_powerSGD_iter = 0, .use_error_feedback = false, .warm_start = false});
    EXPECT_EQ(early.iter(), 0);
  });
}

std::vector<std::string> lines;
void keep_line(LogLevel, std::string_view text) {
  lines.emplace_back(text);
}

TEST(PowerSgdState, GoesOnAfterBeingSavedAsIfNothingHadHappened) {
  const Shapes shapes = {{12, 10}, {7}};
  for (const bool warm : {true, false}) {
    world(2, [&](int rank) {
      auto state = std::make_shared<PowerSGDState>(with({.warm_start = warm, .random_seed = 3}));
      for (int step = 0; step < 4; ++step)
        reduced_by(powerSGD_hook(state), gradients_of(rank, step, 127), shapes);
      const Bytes bytes = state->save();
      const auto loaded = PowerSGDState::load(bytes, {.group = default_group()});
      EXPECT_EQ(loaded->iter(), 4);
      EXPECT_EQ(loaded->options().random_seed, 3U);
      EXPECT_EQ(loaded->compression_stats().numel_before, state->compression_stats().numel_before);
      for (int step = 4; step < 7; ++step) {
        const at::Tensor a = reduced_by(powerSGD_hook(state), gradients_of(rank, step, 127), shapes);
        const at::Tensor b = reduced_by(powerSGD_hook(loaded), gradients_of(rank, step, 127), shapes);
        EXPECT_TRUE(at::equal(a, b)) << step;
      }
      refused([&] { PowerSGDState::load(std::span(bytes).first(bytes.size() / 2)); }, "");
    });
  }
}

TEST(PowerSgdState, LoadsIntoTheDefaultGroupWithAWarning) {
  Bytes bytes;
  world(1, [&](int) { bytes = PowerSGDState().save(); });
  lines.clear();
  set_log_sink(keep_line);
  world(1, [&](int) { EXPECT_EQ(PowerSGDState::load(bytes)->options().group, default_group()); });
  set_log_sink(nullptr);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("the state uses the default group"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
