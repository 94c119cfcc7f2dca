// Large gradients that are born in shared memory and reduced there.
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <thread>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/ddp_testing.h"
#include "lockstep/ddp/hooks.h"
#include "lockstep/optim/in_backward.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

constexpr std::size_t kFrom = 128;  // the weights of Mlp, not its biases

struct InPlaceWay {
  bool views;
  std::size_t from;
};
class InPlace : public ::testing::TestWithParam<InPlaceWay> {};
INSTANTIATE_TEST_SUITE_P(Ways, InPlace,
                         ::testing::Values(InPlaceWay{false, kFrom}, InPlaceWay{true, kFrom},
                                           InPlaceWay{false, 1}, InPlaceWay{true, 1},
                                           InPlaceWay{false, SIZE_MAX}, InPlaceWay{true, SIZE_MAX}));

TEST_P(InPlace, TrainsAsOneProcess) {
  for (const bool set_to_none : {true, false}) {
    PerRank<std::vector<at::Tensor>> got;
    run_threads(3, [&](int rank) {
      const auto trained = train_rank<MlpImpl>(
          rank, 3, {.gradient_as_bucket_view = GetParam().views, .in_place_bytes = GetParam().from},
          set_to_none);
      got.put(rank, trained.parameters);
    });
    expect_same_bits(got);
    expect_close(got.values().at(0), train_alone<MlpImpl>(3).parameters);
  }
}

TEST(InPlaceGradients, AreReducedWhereAutogradMadeThem) {
  run_threads(2, [&](int rank) {
    Mlp net;
    auto model = DistributedDataParallel(net, {.in_place_bytes = kFrom});
    const std::uint64_t n_weights = 2;  // the last one is small
    for (std::uint64_t step = 1; step <= 4; ++step) {
      model->zero_grad();
      model->forward(input_of(static_cast<int>(step), rank)).sum().backward();
      EXPECT_EQ(model->stats().n_in_place, step * n_weights);
    }
    const void* const before = net->second->weight.grad().data_ptr();
    // Accumulated into in place, and reduced there again.
    model->forward(input_of(5, rank)).sum().backward();
    EXPECT_EQ(net->second->weight.grad().data_ptr(), before);
    EXPECT_EQ(model->stats().n_in_place, 5 * n_weights);
  });
}

TEST(InPlaceGradients, AreCopiedWhenAHookNeedsThemInOnePiece) {
  run_threads(2, [&](int rank) {
    Mlp net;
    auto model = DistributedDataParallel(net, {.in_place_bytes = kFrom});
    std::int64_t n_elements = 0;
    model->register_comm_hook({.run = [&](GradBucket& bucket) {
      n_elements += bucket.buffer().numel();
      return all_reduce(bucket.buffer(), {.op = ReduceOp::kAvg, .async_op = true}).get_future();
    }});
    model->forward(input_of(0, rank)).sum().backward();
    EXPECT_EQ(model->stats().n_in_place, 0U);
    std::int64_t want = 0;
    for (const auto& parameter : net->parameters()) want += parameter.numel();
    EXPECT_EQ(n_elements, want);
  });
}

TEST(InPlaceGradients, NeedNoMemoryBesideThem) {
  run_threads(2, [&](int rank) {
    const auto held = [&](DdpOptions options) {
      Mlp net;
      auto model = DistributedDataParallel(net, std::move(options));
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        model->forward(input_of(step, rank)).sum().backward();
      }
      return model->stats().held_bytes;
    };
    std::size_t gradients = 0;
    for (const auto& parameter : Mlp()->parameters()) gradients += parameter.nbytes();
    EXPECT_EQ(held({.in_place_bytes = SIZE_MAX}), gradients);
    EXPECT_EQ(held({.gradient_as_bucket_view = true, .in_place_bytes = SIZE_MAX}), 0U);
    EXPECT_EQ(held({.gradient_as_bucket_view = true, .in_place_bytes = 1}), 0U);
    EXPECT_EQ(held({.in_place_bytes = 1}), 0U);
  });
}

// Both gradients are views of one tensor, which autograd lets happen.
struct TwinsImpl : torch::nn::Module {
  TwinsImpl() {
    flat = register_parameter("flat", torch::ones({64}));
    square = register_parameter("square", torch::ones({8, 8}));
  }
  at::Tensor forward(const at::Tensor& x) { return (flat.view({4, 16}) + square.view({4, 16})) * x; }
  at::Tensor flat, square;
};
TORCH_MODULE(Twins);

TEST(InPlaceGradients, OfOneMemoryAreDistinguished) {
  run_threads(2, [&](int rank) {
    Twins net;
    auto model = DistributedDataParallel(net, {.in_place_bytes = 1});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model->forward(torch::full({4, 16}, rank == 0 ? 1.0 : 4.0)).sum().backward();
      EXPECT_TRUE(net->flat.grad().eq(2.5).all().item<bool>());
      EXPECT_TRUE(net->square.grad().eq(2.5).all().item<bool>());
    }
  });
}

// The gradient of `added` is a view of a tensor that is also on its way to `left` and `right`.
struct AddedImpl : torch::nn::Module {
  AddedImpl() {
    left = register_parameter("left", torch::full({4, 8}, 0.5));
    right = register_parameter("right", torch::full({8, 16}, 0.25));
    added = register_parameter("added", torch::ones({64}));
  }
  at::Tensor forward(const at::Tensor& x) { return (added.view({4, 16}) + left.mm(right)) * x; }
  at::Tensor left, right, added;
};
TORCH_MODULE(Added);

TEST(InPlaceGradients, ThatOthersStillReadAreCopied) {
  run_threads(2, [&](int rank) {
    Added net;
    auto model = DistributedDataParallel(net, {.bucket_cap_mb = 0.00001, .in_place_bytes = 1});
    at::Tensor want_left = torch::zeros_like(net->left);
    for (int r = 0; r < 2; ++r) {
      want_left +=
          torch::autograd::grad({net->forward(torch::full({4, 16}, 1.0 + 3 * r)).sum()}, {net->left})[0] / 2;
    }
    for (int step = 0; step < 20; ++step) {
      model->zero_grad();
      model->forward(torch::full({4, 16}, 1.0 + 3 * rank)).sum().backward();
      EXPECT_TRUE(net->added.grad().eq(2.5).all().item<bool>());
      EXPECT_TRUE(torch::allclose(net->left.grad(), want_left));
    }
  });
}

TEST(InPlaceGradients, OptimizersInsideBackwardDoNotTakeTheirMemory) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net, {.in_place_bytes = kFrom});
    const auto steps =
        apply_optimizer_in_backward<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.01));
    for (int step = 0; step < 10; ++step) model->forward(input_of(step, rank)).sum().backward();
    EXPECT_EQ(model->stats().n_in_place, 20U);
  });
}

TEST(InPlaceGradients, RankZeroDecidesFromWhichSizeOn) {
  run_threads(2, [&](int rank) {
    Mlp net;
    fill_parameters(*net, 1);
    auto model = DistributedDataParallel(net, {.in_place_bytes = rank == 0 ? kFrom : SIZE_MAX});
    model->forward(input_of(0, rank)).sum().backward();
    EXPECT_EQ(model->stats().n_in_place, 2U);
  });
}

TEST(InPlaceGradients, MayBeKeptAndOutliveTheModel) {
  run_threads(2, [&](int rank) {
    std::vector<at::Tensor> kept;
    std::vector<at::Tensor> copies;
    {
      Mlp net;
      fill_parameters(*net, 1);
      auto model = DistributedDataParallel(net, {.in_place_bytes = kFrom});
      for (int step = 0; step < 20; ++step) {  // more than the pool has
        model->zero_grad();
        model->forward(input_of(step, rank)).sum().backward();
        for (const auto& parameter : net->parameters()) {
          kept.push_back(parameter.grad());
          copies.push_back(parameter.grad().clone());
        }
      }
    }
    for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(torch::equal(kept[i], copies[i]));
    std::thread([&] { kept.clear(); }).join();
  });
}

TEST(InPlaceGradients, AccumulateUnderNoSync) {
  run_threads(2, [&](int rank) {
    for (const bool views : {false, true}) {
      Mlp net;
      fill_parameters(*net, 1);
      auto model = DistributedDataParallel(net, {.gradient_as_bucket_view = views, .in_place_bytes = kFrom});
      for (int round = 0; round < 2; ++round) {
        model->zero_grad();
        {
          const auto guard = model->no_sync();
          model->forward(input_of(0, rank)).sum().backward();
        }
        model->forward(input_of(1, rank)).sum().backward();
        at::Tensor want = torch::zeros_like(net->first->weight);
        for (int r = 0; r < 2; ++r) {
          for (int step = 0; step < 2; ++step) {
            want +=
                torch::autograd::grad({net->forward(input_of(step, r)).sum()}, {net->first->weight})[0] / 2;
          }
        }
        EXPECT_TRUE(torch::allclose(net->first->weight.grad(), want, 1e-4, 1e-6));
      }
    }
  });
}

TEST(InPlaceGradients, LeaveOtherAllocationsAlone) {
  run_threads(2, [&](int rank) {
    Mlp net;
    auto model = DistributedDataParallel(net, {.in_place_bytes = kFrom});
    model->forward(input_of(0, rank)).sum().backward();
    auto* const allocator = c10::GetCPUAllocator();
    for (const std::size_t n_bytes : {std::size_t{0}, std::size_t{192}, std::size_t{1 << 20}}) {
      void* const raw = allocator->raw_allocate(n_bytes);
      if (n_bytes != 0) std::memset(raw, 1, n_bytes);
      allocator->raw_deallocate(raw);
    }
    at::Tensor grown = torch::ones({3});
    grown.resize_({100}).fill_(2);
    EXPECT_TRUE(grown.eq(2).all().item<bool>());
  });
}

}  // namespace
}  // namespace lockstep
