// Gradients that are not simply averaged: sparse ones, hooks of the user's; buffers; and how outputs are
// looked through.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <variant>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/ddp_testing.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

// ---- sparse gradients ----

struct WordsImpl : torch::nn::Module {
  explicit WordsImpl(bool sparse) {
    words = register_module("words",
                            torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(20, kIn).sparse(sparse)));
    spare =
        register_module("spare", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, kIn).sparse(sparse)));
    last = register_module("last", torch::nn::Linear(kIn, kOut));
  }
  at::Tensor forward(const at::Tensor& x, bool with_spare) {
    at::Tensor h = words(x);
    if (with_spare) h = h + spare(x.select(1, 0) % 5);
    return last(h);
  }
  torch::nn::EmbeddingBag words{nullptr};
  torch::nn::Embedding spare{nullptr};
  torch::nn::Linear last{nullptr};
};

TEST(SparseGradients, TrainAsDenseOnesDo) {
  run_threads(3, [](int rank) {
    auto sparse = std::make_shared<WordsImpl>(true), dense = std::make_shared<WordsImpl>(false);
    fill_parameters(*sparse, 5);
    fill_parameters(*dense, 5);
    auto model = DistributedDataParallel(sparse), reference = DistributedDataParallel(dense);
    torch::optim::SGD dense_sgd(dense->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      const auto ids = torch::randint(
          0, 20, {4, 3}, at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * step + rank)),
          at::TensorOptions(at::kLong));
      sparse->zero_grad(true);
      dense_sgd.zero_grad();
      if (step == 1) {  // accumulates, sparse and all
        const auto a = model->no_sync();
        const auto b = reference->no_sync();
        model->forward(ids, true).sum().backward();
        reference->forward(ids, true).sum().backward();
      }
      model->forward(ids, true).square().sum().backward();
      reference->forward(ids, true).square().sum().backward();
      dense_sgd.step();
      ASSERT_EQ(sparse->words->weight.grad().layout(), at::kSparse);
      torch::NoGradGuard no_grad;
      for (auto& parameter : sparse->parameters()) parameter.add_(parameter.grad(), -0.1);
      for (std::size_t i = 0; i < sparse->parameters().size(); ++i) {
        EXPECT_TRUE(torch::allclose(sparse->parameters()[i], dense->parameters()[i], 1e-4, 1e-6))
            << "step " << step << " parameter " << i;
      }
    }
  });
}

TEST(SparseGradients, MayGoUnusedOnSomeRanks) {
  run_threads(2, [](int rank) {
    auto net = std::make_shared<WordsImpl>(true);
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(net, {.find_unused_parameters = true});
    const auto ids = torch::tensor({{1, 2}, {3, 4}});
    for (int step = 0; step < 2; ++step) {
      net->zero_grad(true);
      model->forward(ids, rank == 0 && step == 0).sum().backward();
      ASSERT_EQ(net->spare->weight.grad().defined(), step == 0);
      if (step == 0) {
        EXPECT_GT(net->spare->weight.grad().to_dense().abs().sum().item<float>(), 0);
      }
    }
  });
}

// ---- hooks ----

TEST(CommHook, ReplacesTheAverageAndSeesEveryBucketInOrder) {
  run_threads(2, [](int rank) {
    Mlp net;
    fill_parameters(*net, 5);
    auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.0002});
    std::vector<std::size_t> seen;
    std::size_t n_parameters = 0;
    model->register_comm_hook({.run =
                                   [&](GradBucket& bucket) {
                                     seen.push_back(bucket.index());
                                     n_parameters += bucket.parameters().size();
                                     EXPECT_EQ(bucket.gradients().size(), bucket.parameters().size());
                                     return all_reduce(bucket.buffer(), {.async_op = true}).get_future();
                                   },
                               .name = "sum"});
    for (int step = 0; step < 2; ++step) {
      seen.clear();
      n_parameters = 0;
      model->zero_grad(true);
      model->forward(input_of(step, rank)).sum().backward();
      EXPECT_EQ(n_parameters, net->parameters().size());
      EXPECT_TRUE(std::ranges::is_sorted(seen));
    }
    EXPECT_GT(seen.size(), 1U);
    const at::Tensor summed = net->last->weight.grad().clone();
    at::Tensor want = torch::zeros_like(summed);
    for (int r = 0; r < 2; ++r)
      want += torch::autograd::grad({net->forward(input_of(1, r)).sum()}, {net->last->weight})[0];
    EXPECT_TRUE(torch::allclose(summed, want, 1e-4, 1e-6));
  });
}

TEST(CommHook, AResultInOtherMemoryIsCopiedBack) {
  run_threads(2, [](int rank) {
    Mlp net;
    auto model = DistributedDataParallel(net, {.gradient_as_bucket_view = rank == 0});
    model->register_comm_hook(
        {.run = [](GradBucket& bucket) { return ready_future(torch::full_like(bucket.buffer(), 7)); }});
    model->forward(input_of(0, rank)).sum().backward();
    for (const auto& parameter : net->parameters())
      EXPECT_TRUE(torch::equal(parameter.grad(), torch::full_like(parameter, 7)));
  });
}

TEST(CommHook, MisuseIsRefused) {
  run_threads(2, [](int rank) {
    auto model = DistributedDataParallel(Mlp());
    EXPECT_NE(refusal([&] { model->register_comm_hook({}); }).find("empty"), std::string::npos);
    model->register_comm_hook(
        {.run = [](GradBucket&) { return ready_future(at::zeros({1})); }, .name = "short"});
    EXPECT_NE(refusal([&] {
                model->register_comm_hook({.run = [](GradBucket& b) { return ready_future(b.buffer()); }});
              }).find("short is registered already"),
              std::string::npos);
    const auto words = refusal([&] { model->forward(input_of(0, rank)).sum().backward(); });
    EXPECT_NE(words.find("1 elements for a bucket of"), std::string::npos) << words;
    auto late = DistributedDataParallel(Mlp());
    late->forward(input_of(0, rank)).sum().backward();
    EXPECT_NE(refusal([&] {
                late->register_comm_hook({.run = [](GradBucket& b) { return ready_future(b.buffer()); }});
              }).find("too late"),
              std::string::npos);
  });
}

TEST(CommHook, AFutureThatNeverEndsIsGivenUpAtTheGroupsTimeout) {
  run_threads(2, [](int rank) {
    const Group hasty = new_group({0, 1}, {.timeout = Milliseconds(100)});
    auto model = DistributedDataParallel(Mlp(), {.group = hasty});
    model->register_comm_hook(
        {.run = [](GradBucket&) { return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get()); },
         .name = "sleeper"});
    const auto words = refusal([&] { model->forward(input_of(0, rank)).sum().backward(); });
    EXPECT_NE(words.find("sleeper did not end within 100 ms"), std::string::npos) << words;
  });
}

// ---- buffers ----

struct CountingImpl : torch::nn::Module {
  CountingImpl() {
    layer = register_module("layer", torch::nn::Linear(kIn, kOut));
    seen = register_buffer("seen", torch::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    torch::NoGradGuard no_grad;
    seen += 1;
    const at::AutoGradMode with_grad(true);
    return layer(x);
  }
  torch::nn::Linear layer{nullptr};
  at::Tensor seen;
};

TEST(BufferHook, RunsInsteadOfTheBroadcastAndIsWaitedForInBackward) {
  for (const auto when : {BufferHook::When::kBeforeForward, BufferHook::When::kAfterForward}) {
    run_threads(2, [&](int rank) {
      auto net = std::make_shared<CountingImpl>();
      net->seen.fill_(10 * rank);
      auto model = DistributedDataParallel(net, {.init_sync = false});
      int n_calls = 0;
      model->register_buffer_hook({.run =
                                       [&](const torch::OrderedDict<std::string, at::Tensor>& buffers) {
                                         ++n_calls;
                                         EXPECT_EQ(buffers.keys(), std::vector<std::string>{"seen"});
                                         // What forward() changes must be over before it.
                                         const bool async = when == BufferHook::When::kAfterForward;
                                         return std::vector<GradFuture>{
                                             all_reduce(buffers["seen"], {.async_op = async}).get_future()};
                                       },
                                   .when = when});
      model->forward(input_of(0, rank)).sum().backward();
      EXPECT_EQ(n_calls, 1);
      // Before: (0 + 10) + 1. After: (0 + 1) + (10 + 1).
      EXPECT_EQ(net->seen.item<float>(), when == BufferHook::When::kBeforeForward ? 11 : 12);
      {
        const auto local = model->no_sync();
        model->forward(input_of(1, rank)).sum().backward();
      }
      EXPECT_EQ(n_calls, when == BufferHook::When::kBeforeForward ? 2 : 1);
      EXPECT_NE(refusal([&] { model->register_buffer_hook({}); }).find("empty"), std::string::npos);
    });
  }
}

TEST(BufferHook, AFutureThatFailsEndsTheBackwardPass) {
  run_threads(2, [](int rank) {
    auto model = DistributedDataParallel(std::make_shared<CountingImpl>());
    model->register_buffer_hook({.run = [](const auto&) {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->setError(std::make_exception_ptr(std::runtime_error("no buffers today")));
      return std::vector<GradFuture>{future};
    }});
    const auto words = refusal([&] { model->forward(input_of(0, rank)).sum().backward(); });
    EXPECT_NE(words.find("no buffers today"), std::string::npos) << words;
  });
}

}  // namespace
}  // namespace lockstep
