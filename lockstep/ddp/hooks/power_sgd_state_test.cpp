// The state of PowerSGD: its options and statistics, saved and loaded.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/log.h"
#include "lockstep/ddp/hooks/hooks_testing.h"
#include "lockstep/ddp/hooks/power_sgd.h"
#include "lockstep/ddp/hooks/power_sgd_testing.h"

namespace lockstep {
namespace {

using namespace hooks_testing;
using lockstep::testing::refused;
using lockstep::testing::world;

TEST(PowerSgdState, CountsWhatItSends) {
  world(2, [](int rank) {
    const auto state = std::make_shared<PowerSGDState>(from_step_2({}));
    EXPECT_EQ(state->compression_stats().compress_rate, 0);
    for (int step = 0; step < 4; ++step)
      reduced_by(powerSGD_hook(state), gradients_of(rank, step, 110), {{10, 10}, {10}});
    const CompressionStats stats = state->compression_stats();
    EXPECT_EQ(stats.numel_before, 2U * 110);
    EXPECT_EQ(stats.numel_after, 2U * (10 + 10 + 10));
    EXPECT_DOUBLE_EQ(stats.compress_rate, 110.0 / 30);

    const auto square = std::make_shared<PowerSGDState>(from_step_2({.matrix_approximation_rank = 2}));
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
      auto state = std::make_shared<PowerSGDState>(from_step_2({.warm_start = warm, .random_seed = 3}));
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
