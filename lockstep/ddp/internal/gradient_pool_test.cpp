// The memory of large gradients alone: who has a block, when it is free again, and what outlives what.
#include "lockstep/ddp/internal/gradient_pool.h"

#include <torch/torch.h>

#include "lockstep/ddp/internal/reducer_testing.h"

namespace lockstep::internal {
namespace {

constexpr std::int64_t kFloats = 1 << 16;
constexpr std::size_t kBytes = kFloats * sizeof(float);

TEST(GradientPool, LendsABlockToOneTensorAtATime) {
  run_threads(2, [](int) {
    const auto pool = GradientPool::create(default_group(), {kBytes});
    const auto like = torch::empty({kFloats});
    // One gradient of this size, so three blocks.
    std::vector<at::Tensor> made;
    for (int i = 0; i < 4; ++i) made.push_back(pool->make(like));
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(pool->holds(made[i], like), i < 3) << i;
      for (std::size_t j = 0; j < i; ++j) EXPECT_NE(made[i].data_ptr(), made[j].data_ptr());
    }
    EXPECT_EQ(pool->free_bytes(), 0u);
    const void* const freed = made[1].data_ptr();
    made[1] = at::Tensor();
    EXPECT_EQ(pool->free_bytes(), kBytes);
    EXPECT_EQ(pool->make(like).data_ptr(), freed);
  });
}

TEST(GradientPool, HasNoBlocksOfOtherSizes) {
  run_threads(1, [](int) {
    const auto pool = GradientPool::create(default_group(), {kBytes});
    const auto other = torch::empty({kFloats / 2});
    EXPECT_FALSE(pool->holds(pool->make(other), other));
  });
}

TEST(GradientPool, AGradientThatSomebodyElseUsesIsNotWholly) {
  run_threads(1, [](int) {
    const auto pool = GradientPool::create(default_group(), {kBytes});
    const auto like = torch::empty({kFloats});
    const auto gradient = pool->make(like);
    EXPECT_TRUE(pool->holds_whole(gradient, like, {}));
    const auto view = gradient.view({-1});
    EXPECT_FALSE(pool->holds_whole(gradient, like, {}));
  });
}

TEST(GradientPool, AGradientOutlivesIt) {
  run_threads(1, [](int) {
    auto pool = GradientPool::create(default_group(), {kBytes});
    const auto gradient = pool->make(torch::empty({kFloats})).fill_(3);
    pool.reset();
    EXPECT_EQ(gradient.sum().item<double>(), 3.0 * kFloats);
  });
}

}  // namespace
}  // namespace lockstep::internal
