// Mistakes that would otherwise be silent, or end in an error that does not name them; and what a model
// leaves behind.
#include <atomic>
#include <latch>

#include "lockstep/collective/collectives.h"
#include "lockstep/ddp/ddp_testing.h"
#include "lockstep/ddp/internal/gradient_pool.h"
#include "lockstep/group/groups.h"
#include "lockstep/group/world.h"
#include "lockstep/join/join.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

std::string refusal(const std::function<void()>& body, ErrorKind kind = ErrorKind::kUsage) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was raised";
  return {};
}

bool says(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

TEST(DdpMistake, AGroupThatThisRankIsNotInIsRefused) {
  run_threads(3, [](int rank) {
    const Group pair = new_group({0, 1});
    if (rank == 2) {
      const auto text = refusal([&] { auto model = DistributedDataParallel(Mlp(), {.group = pair}); });
      EXPECT_TRUE(says(text, "not a member")) << text;
    } else {
      auto model = DistributedDataParallel(Mlp(), {.group = pair});
      model->forward(drawn(static_cast<std::uint64_t>(rank), {2, kIn})).sum().backward();
      model->check_reducer_finalized();
    }
  });
}

TEST(DdpMistake, AModuleAddedAfterWrappingIsNamed) {
  run_threads(2, [](int) {
    Mlp net;
    auto model = DistributedDataParallel(net);
    net->register_module("extra", torch::nn::Linear(2, 2));
    const auto text = refusal([&] { model->forward(torch::ones({2, kIn})); });
    EXPECT_TRUE(says(text, "extra.weight")) << text;
    EXPECT_TRUE(says(text, "after it was wrapped")) << text;
  });
  run_threads(2, [](int) {  // one that is not trained does no harm
    Mlp net;
    auto model = DistributedDataParallel(net);
    net->register_parameter("frozen", torch::ones({2}), false);
    model->forward(torch::ones({2, kIn})).sum().backward();
    model->check_reducer_finalized();
  });
}

// As in Python, where the assignment would register the tensor.
struct TiedByAssignmentImpl : torch::nn::Module {
  TiedByAssignmentImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(10, 4));
    out = register_module("out", torch::nn::Linear(torch::nn::LinearOptions(4, 10).bias(false)));
    out->weight = tokens->weight;
  }
  at::Tensor forward(const at::Tensor& x) { return out(tokens(x)); }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(TiedByAssignment);

TEST(DdpMistake, WeightsTiedByAssignmentAreNamed) {
  run_threads(2, [](int) {
    const auto text = refusal([] { auto model = DistributedDataParallel(TiedByAssignment()); });
    EXPECT_TRUE(says(text, "out.weight")) << text;
    EXPECT_TRUE(says(text, "ties nothing")) << text;
    // The dead parameter is an unused one, and said to be.
    auto model = DistributedDataParallel(TiedByAssignment(), {.find_unused_parameters = true});
    model->forward(torch::zeros({2}, torch::kLong)).sum().backward();
    model->check_reducer_finalized();
  });
}

struct CountedImpl : torch::nn::Module {
  CountedImpl() {
    layer = register_module("layer", torch::nn::Linear(kIn, kOut));
    seen = register_buffer("seen", torch::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
  at::Tensor seen;
};
TORCH_MODULE(Counted);

TEST(DdpMistake, ForwardOnOneRankAloneSaysHowToEvaluateThere) {
  for (const bool buffers : {true, false}) {
    std::latch over(2);
    run_threads(2, [&](int rank) {
      const Group hasty = new_group({0, 1}, {.timeout = Milliseconds(300)});
      torch::nn::AnyModule net = buffers ? torch::nn::AnyModule(Counted()) : torch::nn::AnyModule(Mlp());
      auto model = DistributedDataParallel(net, {.group = hasty});
      const at::Tensor input = torch::ones({2, kIn});
      model->forward(input).sum().backward();
      if (rank == 0) {
        // Buffers come from rank 0; without any, the first step's order of gradients does.
        const at::AutoGradMode grad(!buffers);
        const auto text = refusal([&] { model->forward(input); }, ErrorKind::kTimeout);
        EXPECT_TRUE(says(text, "module()")) << text;
      }
      over.arrive_and_wait();
    });
  }
}

TEST(StaticGraph, WithFindUnusedStartsWithOneBucketPerType) {
  run_threads(2, [](int) {
    const auto n_buckets = [](const DdpOptions& options) {
      return DistributedDataParallel(Mlp(), options)->stats().bucket_bytes.size();
    };
    EXPECT_EQ(n_buckets({.bucket_cap_mb = 0.0001, .static_graph = true}), 1u);
    EXPECT_EQ(n_buckets({.bucket_cap_mb = 0.0001, .find_unused_parameters = true, .static_graph = true}), 1u);
    EXPECT_GT(n_buckets({.bucket_cap_mb = 0.0001, .find_unused_parameters = true}), 1u) << "they stay";
  });
}

TEST(StaticGraph, SetAfterWrappingWithFindUnusedStartsWithOneBucketPerTypeAndRebuildsIt) {
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(Mlp(), {.bucket_cap_mb = 0.0001, .find_unused_parameters = true});
    model->set_static_graph();
    EXPECT_EQ(model->stats().bucket_bytes.size(), 1u) << "as if the option had been given";
    EXPECT_EQ(model->logging_data().bucket_sizes, model->stats().bucket_bytes);
    const at::Tensor input = torch::ones({2, kIn});
    for (int step = 0; step < 2; ++step) model->forward(input).sum().backward();
    EXPECT_TRUE(model->stats().has_rebuilt_buckets);
    EXPECT_GT(model->stats().bucket_bytes.size(), 1u);
  });
}

TEST(AutogradHooks, AreRemovedByRequest) {
  run_threads(2, [](int rank) {
    Mlp net;
    auto model = DistributedDataParallel(net);
    const at::Tensor input = torch::full({2, kIn}, rank + 1.0f);
    model->forward(input).sum().backward();
    model->remove_autograd_hooks();
    model->zero_grad();
    model->forward(input).sum().backward();
    const auto own = torch::autograd::grad({net->forward(input).sum()}, {net->first->weight})[0];
    EXPECT_TRUE(torch::equal(net->first->weight.grad(), own)) << "not averaged";
    model->update_process_group(default_group());
    model->zero_grad();
    model->forward(input).sum().backward();
    all_reduce(own, {.op = ReduceOp::kAvg});
    EXPECT_TRUE(torch::allclose(net->first->weight.grad(), own)) << "averaged again";
  });
}

TEST(AutogradHooks, ThatWereRemovedAreMissedByJoin) {
  run_threads(2, [](int) {
    auto model = DistributedDataParallel(Mlp());
    model->remove_autograd_hooks();
    const auto text = refusal([&] { join({*model}, [] {}); });
    EXPECT_TRUE(says(text, "remove_autograd_hooks()")) << text;
  });
}

TEST(GradientPool, OfADeadModelIsNotKeptByOneGradient) {
  run_threads(2, [](int) {
    constexpr std::int64_t kElements = 1 << 16;
    const std::size_t n_bytes = kElements * sizeof(float);
    auto pool = internal::GradientPool::create(default_group(), {n_bytes, n_bytes, n_bytes});
    const at::Tensor like = torch::zeros({kElements});
    at::Tensor kept = pool->make(like).fill_(3);
    { const std::vector<at::Tensor> gradients = {pool->make(like), pool->make(like)}; }
    EXPECT_EQ(pool->free_bytes(), 2 * n_bytes);
    EXPECT_TRUE(pool->holds_whole(kept, like, {}));
    const std::weak_ptr<internal::GradientPool> gone = pool;
    pool = nullptr;
    EXPECT_TRUE(gone.expired()) << "the other blocks went with the model";
    EXPECT_TRUE(torch::equal(kept, torch::full({kElements}, 3.0f)));
    kept = at::Tensor();  // its block goes back to the group
  });
}

}  // namespace
}  // namespace lockstep
