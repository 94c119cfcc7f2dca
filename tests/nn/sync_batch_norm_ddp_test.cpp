// SyncBatchNorm under DistributedDataParallel, also on uneven inputs: ranks that exhaust theirs participate
// with nothing.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/base/detail/text.h"
#include "lockstep/base/error.h"
#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/join/join.h"
#include "lockstep/nn/nn.h"
#include "lockstep/store/hash_store.h"
#include "lockstep/tensor/tensor_testing.h"

namespace lockstep {
namespace {

constexpr std::int64_t kRows = 4, kIn = 5;

using tensor_testing::drawn;

at::Tensor batch(int step, int rank) {
  return drawn(static_cast<std::uint64_t>(100 * step + rank), {kRows, kIn});
}

// The layers run in another order than they are registered in, and one of them twice.
template <class Norm>
struct NetImpl : torch::nn::Module {
  NetImpl() {
    wide = register_module("wide", Norm(8));
    narrow = register_module("narrow", Norm(kIn));
    in = register_module("in", torch::nn::Linear(kIn, 8));
    out = register_module("out", torch::nn::Linear(8, kIn));
    torch::NoGradGuard no_grad;
    std::uint64_t seed = 0;
    for (auto& parameter : parameters()) parameter.copy_(0.4 * drawn(++seed, parameter.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) {
    return narrow(out(torch::tanh(wide(in(torch::tanh(narrow(x)))))));
  }
  Norm wide{nullptr}, narrow{nullptr};
  torch::nn::Linear in{nullptr}, out{nullptr};
};

at::Tensor loss_of(const at::Tensor& y) {
  return (y - 0.3).abs().sum() + y.pow(3).sum();
}

// Sums of gradients are divided by all ranks throughout; ranks without input add nothing.
std::vector<at::Tensor> train_whole(const std::vector<int>& n_batches) {
  NetImpl<torch::nn::BatchNorm1d> net;
  torch::optim::SGD sgd(net.parameters(), 0.01);
  for (int step = 0; step < *std::max_element(n_batches.begin(), n_batches.end()); ++step) {
    std::vector<at::Tensor> parts;
    for (std::size_t r = 0; r < n_batches.size(); ++r) {
      if (step < n_batches[r]) parts.push_back(batch(step, static_cast<int>(r)));
    }
    sgd.zero_grad();
    (loss_of(net.forward(torch::cat(parts))) / static_cast<double>(n_batches.size())).backward();
    sgd.step();
  }
  auto result = net.parameters();
  for (const auto& buffer : net.buffers()) result.push_back(buffer);
  return result;
}

void expect_like_whole(const std::vector<int>& n_batches, const DdpOptions& options,
                       const CommHook& hook = {}, double tolerance = 2e-5) {
  const auto want = train_whole(n_batches);
  run_threads(static_cast<int>(n_batches.size()), [&](int rank) {
    auto net = std::make_shared<NetImpl<SyncBatchNorm>>();
    auto model = DistributedDataParallel(net, options);
    if (hook.run) model->register_comm_hook(hook);
    torch::optim::SGD sgd(net->parameters(), 0.01);
    // Twice, to see that a model can be joined again; the second time there is no input.
    for (const bool with_input : {true, false}) {
      join({*model}, [&] {
        for (int step = 0; with_input && step < n_batches[static_cast<std::size_t>(rank)]; ++step) {
          sgd.zero_grad();
          loss_of(model->forward(batch(step, rank))).backward();
          sgd.step();
        }
      });
    }
    auto got = net->parameters();
    for (const auto& buffer : net->buffers()) got.push_back(buffer);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i)
      EXPECT_TRUE(torch::allclose(got[i], want[i], tolerance, tolerance))
          << "rank " << rank << " tensor " << i;
    // And it goes on working outside of join.
    EXPECT_TRUE(net->wide->forward(drawn(1, {2, 8})).defined());
  });
}

TEST(SyncBatchNormJoin, TrainsAsOneProcessOnWhatTheRanksHaveTogether) {
  expect_like_whole({2, 5}, {});
  expect_like_whole({4, 2, 4}, {.bucket_cap_mb = 0.0001, .gradient_as_bucket_view = true});
  expect_like_whole({3, 3}, {.broadcast_buffers = false});
}

TEST(SyncBatchNormJoin, ARankWithoutAnyInputTakesPart) {
  expect_like_whole({0, 3, 2}, {});
}

TEST(SyncBatchNormJoin, AHookThatWaitsInsideBackwardDoesNotLockUp) {
  // It waits for each bucket before the next gradients are computed.
  const CommHook waits{.run =
                           [](GradBucket& bucket) {
                             Work work = all_reduce(bucket.buffer().div_(2),
                                                    {.group = default_group(), .async_op = true});
                             work.wait();
                             return work.get_future();
                           },
                       .name = "waits"};
  expect_like_whole({2, 5}, {.bucket_cap_mb = 0.0001}, waits);
}

TEST(SyncBatchNormJoin, WorksWithCheckpointsEvaluationAndAccumulation) {
  run_threads(2, [](int rank) {
    auto net = std::make_shared<NetImpl<SyncBatchNorm>>();
    auto model = DistributedDataParallel(net);
    join({*model}, [&] {
      for (int step = 0; step < 2 + 3 * rank; ++step) {
        {
          const auto guard = model->no_sync();
          loss_of(model->forward(batch(step, rank))).backward();
        }
        loss_of(model->forward(batch(step + 50, rank)) + checkpoint(net->narrow, batch(step, rank)))
            .backward();
        const at::NoGradGuard no_grad;
        model->forward(batch(step, rank));
      }
    });
    at::Tensor means = torch::empty({2, 8});
    all_gather_into_tensor(means, net->wide->running_mean);
    EXPECT_TRUE(torch::equal(means[0], means[1]));
  });
}

TEST(SyncBatchNormJoin, WorksOverAGroupThatIsNotOfTheDefaultWorld) {
  const auto store = std::make_shared<HashStore>();
  run_threads(2, [&](int rank) {
    const Group group = create_group({.store = store, .rank = 1 - rank, .size = 2, .name = "backwards"});
    destroy_process_group();  // there is no default world at all
    torch::nn::Sequential net(torch::nn::Linear(kIn, 3), SyncBatchNorm(3, {.group = group}));
    auto model = DistributedDataParallel(net, {.group = group});
    join({*model}, [&] {
      for (int step = 0; step < 1 + rank; ++step) model->forward(batch(step, rank)).sum().backward();
    });
    auto weights = torch::empty({2, 3, kIn});
    all_gather_into_tensor(weights, net->ptr<torch::nn::LinearImpl>(0)->weight.grad(), {.group = group});
    EXPECT_TRUE(torch::equal(weights[0], weights[1])) << "averaged";
  });
}

TEST(SyncBatchNormJoin, ALayerWithOtherRanksIsRefused) {
  run_threads(2, [](int) {
    const Group alone = new_subgroups(1).mine;
    torch::nn::Sequential net(torch::nn::Linear(kIn, 3), SyncBatchNorm(3, {.group = alone}));
    auto model = DistributedDataParallel(net);
    try {
      join({*model}, [] {});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("another group than the model"), std::string::npos)
          << error.what();
    }
  });
}

// A network with it under DistributedDataParallel, against one process on the whole batch with BatchNorm.
TEST(SyncBatchNormDdp, TrainsAsOneProcessOnTheWholeBatch) {
  const auto make = [] {
    torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6), torch::nn::Tanh(),
                              torch::nn::Linear(6, 6), torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 1));
    torch::NoGradGuard no_grad;
    std::uint64_t seed = 0;
    for (auto& parameter : net->parameters())
      parameter.add_(0.3 * drawn(++seed, parameter.sizes()) - parameter);
    return net;
  };
  run_threads(2, [&](int rank) {
    auto whole = make(), part = make();
    torch::optim::SGD whole_sgd(whole->parameters(), 0.1), sgd(part->parameters(), 0.1);  // before converting
    convert_sync_batchnorm(part);
    auto model = DistributedDataParallel(part);
    for (int step = 0; step < 8; ++step) {
      const at::Tensor x = drawn(static_cast<std::uint64_t>(100 + step), {8, 4});
      whole_sgd.zero_grad(), sgd.zero_grad();
      whole->forward(x).square().mean().backward();
      model->forward(x.narrow(0, 4 * rank, 4)).square().mean().backward();
      whole_sgd.step(), sgd.step();
    }
    const auto want = whole->parameters(), got = part->parameters();
    for (std::size_t i = 0; i < want.size(); ++i)
      EXPECT_TRUE(torch::allclose(got[i], want[i], 1e-5, 1e-5)) << "parameter " << i;
    EXPECT_TRUE(torch::allclose(part->buffers()[0], whole->buffers()[0], 1e-5, 1e-5)) << "running mean";
  });
}

}  // namespace
}  // namespace lockstep
