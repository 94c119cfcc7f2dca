// What DistributedDataParallel does around a forward pass: buffers, and what ranks agree on under join().
#include <torch/torch.h>

#include "lockstep/ddp/internal/buffer_sync.h"
#include "lockstep/ddp/internal/ddp_join.h"
#include "lockstep/ddp/internal/reducer_testing.h"

namespace lockstep::internal {
namespace {

using namespace reducer_testing;

TEST(DdpJoin, RanksWithoutInputLearnWhatTheOthersAreAboutToDo) {
  run_threads(3, [](int rank) {
    DdpJoin join(default_group(), std::source_location::current());
    const bool active = rank != 2;
    for (const bool synced : {true, false}) {
      join.announce({.active = active, .with_gradients = active, .synced = active && synced}, 7);
      const DdpJoin::Agreed others = join.agreed();
      EXPECT_EQ(others.highest_active, 1);
      EXPECT_TRUE(others.with_gradients);
      EXPECT_EQ(others.synced, synced);
      EXPECT_FALSE(others.in_context);
    }
    EXPECT_EQ(join.last_active(rank != 2), 1);
  });
}

TEST(DdpJoin, ASyncedForwardPassMustBeAnsweredByAReduction) {
  run_threads(1, [](int) {
    DdpJoin join(default_group(), std::source_location::current());
    join.check_answered(0);
    join.announce({.active = true, .with_gradients = true, .synced = false}, 0);
    join.check_answered(0);  // inside no_sync: nothing is owed
    join.announce({.active = true, .with_gradients = true, .synced = true}, 0);
    EXPECT_TRUE(refuses(ErrorKind::kUsage, "needs its own backward()", [&] { join.check_answered(0); }));
    join.check_answered(1);
    join.enter();
    join.check_answered(0);  // of an earlier join()
  });
}

struct WithBuffer : torch::nn::Module {
  explicit WithBuffer(double value) { buffer = register_buffer("buffer", torch::full({2}, value)); }
  at::Tensor buffer;
};

TEST(BufferSync, BuffersAreTheRootsUnlessTheLastForwardPassWasNotSynced) {
  run_threads(3, [](int rank) {
    const auto module = std::make_shared<WithBuffer>(rank);
    BufferSync sync({.tensors = tensors_of(module), .group = default_group()});
    sync.before_forward([] { return 1; });
    EXPECT_EQ(module->buffer[0].item<float>(), 1);
    module->buffer.fill_(rank);
    sync.after_forward(false);
    sync.before_forward([] {
      ADD_FAILURE() << "nothing is sent";
      return 0;
    });
    EXPECT_EQ(module->buffer[0].item<float>(), rank);
    sync.after_forward(true);
    sync.before_forward([] { return 2; });
    EXPECT_EQ(module->buffer[0].item<float>(), 2);
  });
}

TEST(BufferSync, AHookRunsInsteadAndItsFuturesAreHandedOut) {
  run_threads(2, [](int rank) {
    for (const auto when : {BufferHook::When::kBeforeForward, BufferHook::When::kAfterForward}) {
      const auto module = std::make_shared<WithBuffer>(rank);
      BufferSync sync({.tensors = tensors_of(module), .group = default_group()});
      sync.set_hook({.run =
                         [](const torch::OrderedDict<std::string, at::Tensor>& buffers) {
                           return std::vector<GradFuture>{ready_future(buffers["buffer"])};
                         },
                     .when = when});
      const bool before = when == BufferHook::When::kBeforeForward;
      EXPECT_EQ(sync.before_forward([] { return 0; }).size(), before ? 1U : 0U);
      EXPECT_EQ(module->buffer[0].item<float>(), rank) << "not broadcast";
      EXPECT_EQ(sync.after_forward(true).size(), before ? 0U : 1U);
      EXPECT_TRUE(sync.after_forward(false).empty());
    }
  });
}

}  // namespace
}  // namespace lockstep::internal
