#include "lockstep/tensor/torch_compat.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>

namespace lockstep::compat {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

class Counted final : public Node {
 public:
  Counted(int& alive, edge_list&& edges) : Node(std::move(edges)), alive_(alive) { ++alive_; }
  ~Counted() override { --alive_; }

 protected:
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }

 private:
  int& alive_;
};

TEST(OwnedNode, LivesAsLongAsItsLastOwner) {
  int alive = 0;
  NodePtr kept;
  {
    const NodeOwner<Counted> node = own_node(new Counted(alive, {}));
    kept = node;
    EXPECT_EQ(kept.get(), node.get());
    EXPECT_EQ(node->getptr().get(), node.get());
  }
  EXPECT_EQ(alive, 1);
  kept = nullptr;
  EXPECT_EQ(alive, 0);
}

TEST(OwnedNode, CanBeHeldWeakly) {
  int alive = 0;
  NodePtr node = own_node(new Counted(alive, {}));
  const WeakNodePtr weak(node);
  EXPECT_EQ(weak.lock().get(), node.get());
  EXPECT_FALSE(weak.expired());
  node = nullptr;
  EXPECT_TRUE(weak.expired());
  EXPECT_FALSE(weak.lock());
}

// Each node owns the next: a destructor that called the next one's would exhaust the stack.
TEST(OwnedNode, EndsALongChainWithoutRecursion) {
  constexpr int kLength = 300'000;
  int alive = 0;
  NodePtr head;
  for (int i = 0; i < kLength; ++i) {
    edge_list edges;
    if (head) edges.emplace_back(head, 0);
    head = own_node(new Counted(alive, std::move(edges)));
  }
  EXPECT_EQ(alive, kLength);
  head = nullptr;
  EXPECT_EQ(alive, 0);
}

}  // namespace
}  // namespace lockstep::compat
