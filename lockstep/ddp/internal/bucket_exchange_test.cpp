#include "lockstep/ddp/internal/bucket_exchange.h"

#include "lockstep/ddp/internal/reducer_testing.h"

namespace lockstep::internal {
namespace {

using namespace reducer_testing;

bool holds(const at::Tensor& tensor, double value) {
  return torch::equal(tensor, torch::full_like(tensor, value));
}

TEST(BucketExchange, AveragesOverTheRanksOrDividesBySomethingElse) {
  run_threads(3, [](int rank) {
    Parts parts(parameters_of_sizes({3, 2}), bucket_each());
    for (const std::size_t b : {0, 1}) parts.buckets[b].flat.fill_(rank + 1);
    parts.exchange.start(0, 3, false);
    parts.exchange.start(1, 2, true);  // one of the three has no input
    for (const std::size_t b : {0, 1}) parts.exchange.wait(b);
    EXPECT_TRUE(holds(parts.buckets[0].flat, 2));
    EXPECT_TRUE(holds(parts.buckets[1].flat, 3));
  });
}

TEST(BucketExchange, ReducesGradientsInPlaceBesideTheFlatTensor) {
  run_threads(2, [](int rank) {
    Parts parts(parameters_of_sizes({100, 2}), one_bucket(100));
    at::Tensor& large = parts.buckets[0].views[parts.buckets.slot_of(0).index];
    large = parts.buckets.make_in_place(0).fill_(rank * 4);
    parts.buckets[0].flat.fill_(rank * 2);
    parts.exchange.start(0, 2, true);
    parts.exchange.wait(0);
    EXPECT_TRUE(holds(large, 2));
    EXPECT_TRUE(holds(parts.buckets[0].flat, 1));
  });
}

TEST(BucketExchange, AHookSeesTheBucketAndWhetherItIsTheLastAndItsResultIsCopiedBack) {
  run_threads(2, [](int) {
    Parts parts(parameters_of_sizes({3, 2}), bucket_each());
    std::vector<std::size_t> seen;
    std::vector<bool> last;
    parts.exchange.set_hook({.run = [&](GradBucket& bucket) {
      seen.push_back(bucket.index());
      last.push_back(bucket.is_last());
      EXPECT_TRUE(bucket.parameters()[0].is_same(parts.parameter(1 - bucket.index())));
      return ready_future(bucket.buffer() + 1);
    }});
    for (const std::size_t b : {0, 1}) parts.buckets[b].flat.fill_(5);
    parts.exchange.start(0, 2, false);
    parts.exchange.start(1, 2, true);
    for (const std::size_t b : {0, 1}) {
      parts.exchange.wait(b);
      EXPECT_TRUE(holds(parts.buckets[b].flat, 6));
    }
    EXPECT_EQ(seen, (std::vector<std::size_t>{0, 1}));
    EXPECT_EQ(last, (std::vector<bool>{false, true}));
  });
}

TEST(BucketExchange, AHookWithoutAFutureIsAnErrorThatNamesIt) {
  run_threads(1, [](int) {
    Parts parts(parameters_of_sizes({3}), one_bucket());
    parts.exchange.set_hook({.run = [](GradBucket&) { return GradFuture(); }, .name = "forgetful"});
    EXPECT_TRUE(refuses(ErrorKind::kUsage, "forgetful", [&] { parts.exchange.start(0, 1, true); }));
  });
}

TEST(BucketExchange, WaitingForWhatWasNotStartedDoesNothing) {
  run_threads(1, [](int) {
    Parts parts(parameters_of_sizes({3, 0}), bucket_each());
    parts.exchange.wait(0);
    parts.exchange.start(0, 1, true);  // no elements: nothing to reduce
    parts.exchange.wait(0);
    parts.exchange.wait(1);
  });
}

}  // namespace
}  // namespace lockstep::internal
