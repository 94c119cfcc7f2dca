#include "lockstep/ddp/internal/reduction_pass.h"

#include "lockstep/ddp/internal/reducer_testing.h"

namespace lockstep::internal {
namespace {

using namespace reducer_testing;
using Indices = std::vector<std::size_t>;

// A pass over parameters of 3, 2 and 1 elements, a bucket each: bucket 0 has p2. Gradients are rank + 1.
struct PassOf {
  explicit PassOf(int rank, Readiness policy = Readiness(AllParameters(3)))
      : parts(parameters_of_sizes({3, 2, 1}), bucket_each()), readiness(std::move(policy)) {
    for (std::size_t i = 0; i < 3; ++i) parts.set_grad(i, rank + 1);
  }
  void begin(bool shadow = false, bool skip_unused = false) {
    pass.begin(
        {.access = access, .shadow = shadow, .divisor = default_group()->size(), .skip_unused = skip_unused});
  }
  Parts parts;
  Readiness readiness;
  std::shared_ptr<GradientAccess> access = std::make_shared<GradField>();
  ReductionPass pass{
      {parts.parameters, parts.buckets, readiness, parts.transfer, parts.exchange, parts.timer},
      default_group()->timeout()};
};

TEST(ReductionPass, StartsBucketsInOrderWhateverTheOrderOfGradients) {
  run_threads(2, [](int rank) {
    PassOf of(rank);
    std::vector<std::size_t> started;
    of.parts.exchange.set_hook({.run = [&](GradBucket& bucket) {
      started.push_back(bucket.index());
      return all_reduce(bucket.buffer(), {.op = ReduceOp::kAvg, .async_op = true}).get_future();
    }});
    EXPECT_FALSE(of.pass.active());
    of.begin();
    of.pass.mark_ready(0);
    of.pass.mark_ready(1);
    EXPECT_EQ(started, Indices{}) << "the first bucket is not full";
    EXPECT_EQ(of.pass.missing(), (Indices{2}));
    EXPECT_FALSE(of.pass.all_started());
    of.pass.mark_ready(2);
    EXPECT_EQ(started, (Indices{0, 1, 2}));
    EXPECT_TRUE(of.pass.all_started() && of.pass.active());
    const ReductionPass::Totals totals = of.pass.finish();
    EXPECT_FALSE(of.pass.active());
    EXPECT_EQ(totals.n_buckets, 3U);
    EXPECT_EQ(totals.n_bytes, 24U);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(of.parts.grad_is(i, 1.5));
  });
}

TEST(ReductionPass, AGradientThatComesTwiceIsAnErrorAndThePassStaysOpen) {
  run_threads(1, [](int rank) {
    PassOf of(rank);
    of.begin();
    of.pass.mark_ready(1);
    EXPECT_TRUE(refuses(ErrorKind::kUsage, "1 (p1) got its gradient twice", [&] { of.pass.mark_ready(1); }));
    EXPECT_TRUE(of.pass.active());
    EXPECT_EQ(of.pass.missing(), (Indices{0, 2}));
  });
}

TEST(ReductionPass, AShadowedPassAddsZerosAndTakesTheAverages) {
  run_threads(2, [](int rank) {
    PassOf of(rank);
    of.begin(/*shadow=*/rank == 1);
    if (rank == 1) {
      of.pass.start_zeros();
    } else {
      for (const std::size_t index : {2, 1, 0}) of.pass.mark_ready(index);
    }
    EXPECT_TRUE(of.pass.all_started());
    of.pass.finish();
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(of.parts.grad_is(i, 0.5)) << rank;
  });
}

TEST(ReductionPass, BucketsToWhichNoRankContributesAreSkippedWhenRequested) {
  run_threads(2, [](int rank) {
    PassOf of(rank, Readiness(SearchedParameters(3, default_group(), std::source_location::current())));
    of.readiness.note_use(1);  // as if left from no_sync; nothing was reached
    of.begin(false, /*skip_unused=*/true);
    for (const std::size_t index : {0, 1, 2}) of.pass.mark_ready(index);
    const ReductionPass::Totals totals = of.pass.finish();
    EXPECT_EQ(totals.n_buckets, 1U);
    EXPECT_TRUE(of.parts.grad_is(1, 1.5));
    for (const std::size_t index : {0, 2}) EXPECT_TRUE(of.parts.grad_is(index, rank + 1)) << "left alone";
  });
}

TEST(ReductionPass, FinishCallsWhoWaitsForAveragesAndAwaitsTheOthers) {
  run_threads(1, [](int rank) {
    PassOf of(rank);
    int n_delivered = 0;
    of.pass.on_delivered([&] { ++n_delivered; });
    const auto failed = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    failed->setError(std::make_exception_ptr(std::runtime_error("no buffers")));
    of.pass.also_wait_for({nullptr, ready_future(torch::ones({1})), failed});
    of.begin();
    for (const std::size_t index : {2, 1, 0}) of.pass.mark_ready(index);
    try {
      of.pass.finish();
      ADD_FAILURE() << "the future failed";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("waiting for the buffer hook"), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(n_delivered, 1);
    EXPECT_TRUE(of.pass.active()) << "the next forward pass says so";
  });
}

}  // namespace
}  // namespace lockstep::internal
