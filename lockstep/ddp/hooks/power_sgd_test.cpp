// PowerSGD against a written-out reference. All ranks are simulated in double precision in one place: with
// mean M of what the ranks hold (gradient plus error), the result is M projected on the span of M Q.
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "lockstep/base/detail/text.h"
#include "lockstep/ddp/hooks/compose.h"
#include "lockstep/ddp/hooks/hooks_testing.h"
#include "lockstep/ddp/hooks/internal/low_rank.h"
#include "lockstep/ddp/hooks/power_sgd.h"
#include "lockstep/ddp/hooks/power_sgd_testing.h"

namespace lockstep {
namespace {

using namespace hooks_testing;
using lockstep::testing::world;

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

const Shapes kMixed = {{12, 10}, {10}, {6, 4, 5}, {3, 2}, {12, 10}};
const Case kCases[] = {
    {"RankOne", kMixed, from_step_2({})},
    {"RankTwo", kMixed, from_step_2({.matrix_approximation_rank = 2, .min_compression_rate = 1.2})},
    {"RankThreeByQr", {{20, 30}, {8, 9}}, from_step_2({.matrix_approximation_rank = 3})},
    {"NothingKept", kMixed, from_step_2({.use_error_feedback = false, .warm_start = false})},
    {"NoFeedback", kMixed, from_step_2({.use_error_feedback = false})},
    {"NoWarmStart", kMixed, from_step_2({.warm_start = false})},
    {"AnotherSeed", kMixed, from_step_2({.random_seed = 77})},
    {"NothingToCompress", {{10}, {2, 2}}, from_step_2({})},
    {"Square", kMixed, from_step_2({}), true},
    {"SquareRankThree", {{9, 9}}, from_step_2({.matrix_approximation_rank = 3}), true},
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
    const auto one = powerSGD_hook(std::make_shared<PowerSGDState>(from_step_2({})));
    const auto together =
        powerSGD_hook(std::make_shared<PowerSGDState>(from_step_2({.batch_tensors_with_same_shape = true})));
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
    const auto state = std::make_shared<PowerSGDState>(from_step_2({}));
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
      const Case c{"", shapes, from_step_2({})};
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
    const auto state = std::make_shared<PowerSGDState>(
        from_step_2({.matrix_approximation_rank = 3, .min_compression_rate = 1}));
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
      const auto state = std::make_shared<PowerSGDState>(from_step_2({.matrix_approximation_rank = r}));
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
      const auto state = std::make_shared<PowerSGDState>(from_step_2({.matrix_approximation_rank = r}));
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

}  // namespace
}  // namespace lockstep
