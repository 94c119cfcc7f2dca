// A forked child and the memory that its parent shares with the other ranks: the child has the same pages
// mapped, and copies of every handle on them.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/base/fork_testing.h"
#include "lockstep/collective/collective.h"
#include "lockstep/group/group.h"

namespace lockstep {
namespace {

using fork_testing::Children;

constexpr std::int64_t kCount = 1 << 20;

// By hand: libtorch's own threads do not exist in a child.
bool is_all(const at::Tensor& tensor, float value) {
  const float* data = tensor.const_data_ptr<float>();
  return std::all_of(data, data + tensor.numel(), [&](float one) { return one == value; });
}

// Freed pages are given back to the system, so they would read as zeros in the parent, and in every rank that
// maps them.
TEST(ForkedChild, FreesNoSharedMemoryOfItsParent) {
  run_threads(2, [](int rank) {
    at::Tensor shared = empty_shared({kCount}, at::kFloat).fill_(7);
    ASSERT_TRUE(is_all(shared, 7));
    if (rank == 0) {
      Children children;
      children.start([&] {
        CHILD_EXPECT(is_all(shared, 7), "not the parent's memory");
        shared.reset();
      });
      EXPECT_EQ(children.status(0), 0);
    }
    EXPECT_TRUE(is_all(shared, 7));
    // Its address is still the tensor's: another one gets other memory, and the ranks reduce both.
    at::Tensor other = empty_shared({kCount}, at::kFloat).fill_(1);
    EXPECT_TRUE(is_all(shared, 7));
    all_reduce(shared);
    all_reduce(other);
    EXPECT_TRUE(is_all(shared, 14));
    EXPECT_TRUE(is_all(other, 2));
  });
}

}  // namespace
}  // namespace lockstep
