#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <set>

#include "lockstep/optim/average_parameters.h"
#include "lockstep/optim/model_averager.h"
#include "lockstep/optim/optim_testing.h"

namespace lockstep::testing {
namespace {

at::Tensor of_rank(int rank, at::IntArrayRef sizes, at::ScalarType type) {
  return drawn(50 + static_cast<std::uint64_t>(rank), sizes).to(type);
}

TEST(AverageParameters, GivesEveryRankTheMeanInItsOwnType) {
  const std::pair<std::vector<std::int64_t>, at::ScalarType> kinds[] = {
      {{3, 5}, at::kFloat}, {{4}, at::kDouble}, {{7}, at::kHalf}, {{0}, at::kFloat}, {{}, at::kBFloat16}};
  for (const int n : kSizes) {
    world(n, [&](int rank) {
      std::vector<at::Tensor> parameters;
      for (const auto& [sizes, type] : kinds) parameters.push_back(of_rank(rank, sizes, type));
      parameters.push_back(of_rank(rank, {6, 4}, at::kFloat).t().requires_grad_());
      const void* memory = parameters[0].data_ptr();
      average_parameters(parameters);
      EXPECT_EQ(parameters[0].data_ptr(), memory);
      EXPECT_EQ(parameters.back().stride(0), 1);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const bool last = i + 1 == parameters.size();
        auto mean = at::zeros(parameters[i].sizes(), at::kDouble);
        for (int r = 0; r < n; ++r)
          mean += last ? of_rank(r, {6, 4}, at::kFloat).t() : of_rank(r, kinds[i].first, kinds[i].second);
        mean /= n;
        ASSERT_EQ(parameters[i].scalar_type(), last ? at::kFloat : kinds[i].second);
        EXPECT_TRUE(at::allclose(parameters[i].detach(), mean.to(parameters[i].scalar_type()), 1e-6, 1e-7))
            << i;
      }
      expect_same_on_all_ranks(parameters);
    });
  }
}

TEST(AverageParameters, TakesComplexNumbersToo) {
  world(3, [](int rank) {
    const auto parameter = at::full({5}, c10::complex<double>(rank, -rank), at::kComplexDouble);
    average_parameters({parameter});
    expect_near(at::view_as_real(parameter),
                at::view_as_real(at::full({5}, c10::complex<double>(1, -1), at::kComplexDouble)), "complex");
  });
}

TEST(AverageParameters, GoesInChunksWhenThereIsMuch) {
  // 3 1/2 chunks of 4 Mi floats, with parameters that begin in one and end in another.
  world(2, [](int rank) {
    std::vector<at::Tensor> parameters;
    for (const std::int64_t n : {3'000'000, 5, 9'000'000, 2'700'000})
      parameters.push_back(at::arange(n, at::kFloat).remainder_(1000).add_(rank));
    average_parameters(parameters);
    for (const auto& parameter : parameters)
      EXPECT_TRUE(at::equal(parameter, at::arange(parameter.numel(), at::kFloat).remainder_(1000).add_(0.5)));
  });
}

TEST(AverageParameters, BumpsTheVersionsOfChangedParameters) {
  world(2, [](int rank) {
    const auto parameter = at::full({3}, static_cast<float>(rank)).requires_grad_();
    const auto before = parameter._version();
    average_parameters({parameter});
    EXPECT_GT(parameter._version(), before);
    EXPECT_TRUE(parameter.requires_grad());
    EXPECT_TRUE(parameter.is_leaf());
  });
}

TEST(AverageParameters, LeavesNonMembersAlone) {
  world(3, [](int rank) {
    const auto pair = new_group({0, 2});
    const auto parameter = at::full({2}, static_cast<float>(rank));
    average_parameters({parameter}, {.group = pair});
    expect_equal(parameter, at::full({2}, 1.0F));  // the mean of 0 and 2, and rank 1's own
  });
}

TEST(AverageParameters, RefusesWhatHasNoMean) {
  world(2, [](int) {
    refused([] { average_parameters({at::ones({2}), at::Tensor()}); }, "parameter 1 is an undefined tensor");
    refused([] { average_parameters({at::ones({2}, at::kLong)}); }, "no mean");
    const auto unsupported = [](const at::Tensor& tensor) {
      const auto failure = caught([&] { average_parameters({tensor}); });
      EXPECT_EQ(failure.kind, ErrorKind::kUnsupported) << failure.message;
    };
    unsupported(at::ones({2}).to_sparse());
    unsupported(at::empty({2}, at::TensorOptions(at::kMeta)));
    EXPECT_EQ(sum_over({}), 3);  // nothing was sent: the group goes on
  });
}

TEST(AverageParameters, IsAnErrorEverywhereWhenRanksBringDifferentNumbers) {
  world(2, [](int rank) {
    const auto failure = caught(
        [&] { average_parameters(rank == 0 ? std::vector{at::ones({3})} : std::vector<at::Tensor>{}); });
    EXPECT_EQ(failure.kind, ErrorKind::kUsage) << failure.message;
  });
}

TEST(GetParamsToAverage, LeavesOutWhatHasNoGradient) {
  auto parameters = make_parameters();
  set_gradients(parameters, 0);
  parameters[1].mutable_grad().reset();
  const auto kept = get_params_to_average(parameters);
  ASSERT_EQ(kept.size(), 4U);
  EXPECT_TRUE(kept[1].is_same(parameters[2]));
  const std::vector<torch::optim::OptimizerParamGroup> groups{{{parameters[1], parameters[3]}},
                                                              {{parameters[0]}}};
  const auto grouped = get_params_to_average(groups);
  ASSERT_EQ(grouped.size(), 2U);
  EXPECT_TRUE(grouped[0].is_same(parameters[3]));
  EXPECT_TRUE(grouped[1].is_same(parameters[0]));
}

// What a parameter of value `rank` becomes at each of `n_steps` calls.
std::vector<float> seen(ModelAverager& averager, int rank, int n_steps) {
  std::vector<float> values;
  for (int step = 0; step < n_steps; ++step) {
    EXPECT_EQ(averager.step(), step);
    const auto trained = at::full({2}, static_cast<float>(rank)).requires_grad_();
    trained.mutable_grad() = at::ones({2});
    const auto untouched = at::full({2}, static_cast<float>(rank)).requires_grad_();
    averager.average_parameters(std::vector{untouched, trained});
    expect_equal(untouched.detach(), at::full({2}, static_cast<float>(rank)));
    values.push_back(trained.detach()[1].item<float>());
  }
  return values;
}

TEST(PeriodicModelAverager, AveragesAtItsPeriodOnceWarm) {
  for (const int n : {1, 2, 3}) {
    world(n, [&](int rank) {
      PeriodicModelAverager averager({.period = 3, .warmup_steps = 2});
      const auto mine = static_cast<float>(rank);
      const auto mean = static_cast<float>(n - 1) / 2;
      EXPECT_EQ(seen(averager, rank, 9),
                (std::vector<float>{mine, mine, mean, mine, mine, mean, mine, mine, mean}));
    });
  }
}

TEST(PeriodicModelAverager, CountsFromTheGivenStep) {
  world(2, [](int rank) {
    PeriodicModelAverager averager({.period = 4});
    averager.set_step(8);
    const auto parameter = at::full({1}, static_cast<float>(rank)).requires_grad_();
    parameter.mutable_grad() = at::ones({1});
    averager.average_parameters(std::vector<torch::optim::OptimizerParamGroup>{{{parameter}}});
    EXPECT_EQ(parameter.item<float>(), 0.5F);
    EXPECT_EQ(averager.step(), 9);
    refused([&] { averager.set_step(-1); }, "negative");
  });
}

TEST(PeriodicModelAverager, RefusesAndWarnsOfWhatMakesNoSense) {
  world(1, [](int) {
    refused([] { PeriodicModelAverager({.period = 0}); }, "period must be at least 1");
    refused([] { PeriodicModelAverager(PeriodicModelAveragerOptions{}); }, "period must be at least 1");
    refused([] { PeriodicModelAverager({.period = 2, .warmup_steps = -1}); },
            "warmup_steps must not be negative");
  });
  refused([] { PeriodicModelAverager({.period = 2}); }, "init_process_group");
  Warnings warnings("DistributedDataParallel alone");
  world(1, [](int) { PeriodicModelAverager({.period = 2}); });
  EXPECT_EQ(warnings.count(), 0);
  world(1, [](int) { PeriodicModelAverager({.period = 1}); });
  EXPECT_EQ(warnings.count(), 1);
}

TEST(HierarchicalModelAverager, TakesTheLargestPeriodThatDividesTheStep) {
  world(4, [](int rank) {
    HierarchicalModelAverager averager({.period_group_size_dict = {{2, 2}, {4, 4}}, .warmup_steps = 1});
    const auto mine = static_cast<float>(rank);
    const float pair = rank < 2 ? 0.5F : 2.5F;
    EXPECT_EQ(seen(averager, rank, 7), (std::vector<float>{mine, mine, pair, mine, 1.5F, mine, pair}));
  });
}

TEST(HierarchicalModelAverager, DividesTheGroupItIsGiven) {
  world(5, [](int rank) {
    const auto group = new_group({1, 2, 3, 4});
    HierarchicalModelAverager averager({.period_group_size_dict = {{1, 2}, {3, 4}}, .group = group});
    const float pair = rank < 3 ? 1.5F : 3.5F;
    const auto expected =
        rank == 0 ? std::vector<float>{0, 0, 0, 0} : std::vector<float>{2.5F, pair, pair, 2.5F};
    EXPECT_EQ(seen(averager, rank, 4), expected);
  });
}

TEST(HierarchicalModelAverager, RefusesAndWarnsOfWhatMakesNoSense) {
  using Options = HierarchicalModelAveragerOptions;
  world(2, [](int) {
    const auto bad = [](Options options, const char* words) {
      refused([&] { HierarchicalModelAverager averager(options); }, words);
    };
    bad({}, "is empty");
    bad({.period_group_size_dict = {{0, 2}}}, "must be positive");
    bad({.period_group_size_dict = {{4, 1}, {2, 2}}}, "must ascend");
    bad({.period_group_size_dict = {{2, 1}, {2, 2}}}, "must ascend");
    bad({.period_group_size_dict = {{2, 2}, {4, 1}}}, "the last group size");
    bad({.period_group_size_dict = {{2, 3}, {4, 2}}}, "3");
    bad({.period_group_size_dict = {{2, 2}}, .warmup_steps = -1}, "warmup_steps");
  });
  Warnings warnings("DistributedDataParallel alone");
  world(2, [](int) { HierarchicalModelAverager({.period_group_size_dict = {{1, 2}}}); });
  EXPECT_EQ(warnings.count(), 2);  // once per rank
}

}  // namespace
}  // namespace lockstep::testing
