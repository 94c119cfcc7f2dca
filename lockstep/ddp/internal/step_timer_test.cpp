// The timer of steps alone: which are sampled, and what the times of overlapping buckets add up to.
#include "lockstep/ddp/internal/step_timer.h"

#include "lockstep/ddp/internal/reducer_testing.h"

namespace lockstep::internal {
namespace {

using reducer_testing::refuses;

TEST(StepTimer, SamplesTheFirstTenStepsAndThenEveryNth) {
  StepTimer timer;
  timer.set_sample_rate(4);
  for (std::uint64_t step = 1; step <= 24; ++step) {
    timer.forward_begins(step);
    EXPECT_EQ(timer.samples(), step <= 10 || step % 4 == 0) << step;
    timer.leave_out();
    EXPECT_FALSE(timer.samples());
  }
  EXPECT_EQ(timer.n_recorded(), 0u) << "steps that were left out";
  EXPECT_TRUE(refuses(ErrorKind::kUsage, "the rate is 1", [&] { timer.set_sample_rate(0); }));
  EXPECT_EQ(timer.sample_rate(), 4);
}

TEST(StepTimer, RecordsTheOrderOfTheGradients) {
  StepTimer timer;
  timer.forward_begins(1);
  timer.forward_ends();
  timer.backward_begins(3, 2);
  timer.parameter_ready(2, 0, false);
  timer.parameter_ready(0, 1, true);
  timer.parameter_ready(1, 0, true);
  timer.backward_ends();
  EXPECT_EQ(timer.n_recorded(), 1u);
  const StepTimes& last = timer.last();
  EXPECT_EQ(last.ready_order, (std::vector<std::size_t>{2, 0, 1}));
  EXPECT_EQ(last.compute_end, last.parameter_ready[1]) << "the last gradient";
  EXPECT_EQ(last.buckets[0].ready, last.parameter_ready[1]);
  EXPECT_EQ(last.buckets[1].ready, last.parameter_ready[0]);
  EXPECT_LE(last.forward_start, last.forward_end);
  EXPECT_LE(last.compute_end, last.backward_end);
}

// Buckets from 10 to 60 and from 50 to 150; one that never ended does not count. Gradients were computed until 100.
TEST(StepTimes, CountTimeThatBucketsShareOnce) {
  StepTimes times;
  times.compute_end = 100;
  times.backward_end = 200;
  times.buckets = {{0, 50, 150}, {0, 10, 60}, {0, 20, 0}};
  EXPECT_EQ(times.comm_time(), 140);
  EXPECT_EQ(times.overlap_time(), 90);
}

}  // namespace
}  // namespace lockstep::internal
