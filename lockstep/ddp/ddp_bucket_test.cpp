// The buckets of DistributedDataParallel: what lies in them, when they are rebuilt, and the order in which
// they are reduced.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/collective/collective.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/ddp/ddp_testing.h"

namespace lockstep {
namespace {

using namespace ddp_testing;

constexpr std::size_t kOneMiB = 1024 * 1024;

TEST(Ddp, GradientsLieInTheBucketsWhenAsked) {
  run_threads(2, [](int rank) {
    auto model =
        DistributedDataParallel(Mlp(), {.gradient_as_bucket_view = true, .in_place_bytes = SIZE_MAX});
    const auto step = [&] {
      model->forward(drawn(static_cast<std::uint64_t>(rank), {2, kIn})).sum().backward();
    };
    step();
    step();  // rebuilds; the second backward moves the gradients to the new buckets
    const auto parameters = model->parameters();
    const auto storage = parameters[0].grad().storage().data();
    for (const auto& parameter : parameters) EXPECT_EQ(parameter.grad().storage().data(), storage);
    std::vector<const void*> before;
    for (const auto& parameter : parameters) before.push_back(parameter.grad().data_ptr());
    model->zero_grad(/*set_to_none=*/false);
    step();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    optimizer.zero_grad();  // calls detach_() on each gradient, which autograd's own views refuse
    step();
    for (std::size_t i = 0; i < parameters.size(); ++i) EXPECT_EQ(parameters[i].grad().data_ptr(), before[i]);
  });
}

TEST(Ddp, RebuildsItsBucketsOnceByOrderOfArrival) {
  run_threads(2, [](int) {
    // 10 parameters of 4 MiB, used first to last, so gradients arrive last to first.
    struct Chain : torch::nn::Module {
      Chain() {
        for (int i = 0; i < 10; ++i) {
          parts.push_back(register_parameter("p" + std::to_string(i), torch::ones({1024, 1024})));
        }
      }
      at::Tensor forward(at::Tensor x) {
        for (auto& part : parts) x = x * part[0][0];
        return x;
      }
      std::vector<at::Tensor> parts;
    };
    auto model = DistributedDataParallel(std::make_shared<Chain>());
    EXPECT_EQ(model->stats().bucket_bytes, (std::vector<std::size_t>{40 * kOneMiB}));
    EXPECT_FALSE(model->stats().has_rebuilt_buckets);
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model->forward(torch::ones({1})).backward();
      const ReducerStats stats = model->stats();
      EXPECT_EQ(stats.has_rebuilt_buckets, step > 0);
      EXPECT_EQ(stats.n_reductions, static_cast<std::uint64_t>(step + 1));
      EXPECT_EQ(stats.n_bytes_reduced, (static_cast<std::uint64_t>(step) + 1) * 40 * kOneMiB);
    }
    EXPECT_EQ(model->stats().bucket_bytes,
              (std::vector<std::size_t>{4 * kOneMiB, 28 * kOneMiB, 8 * kOneMiB}));
    EXPECT_GE(model->stats().exposed_seconds, model->stats().last_exposed_seconds);
    EXPECT_EQ(model->parameters()[3].grad()[0][0].item<float>(), 1.0F);
  });
}

// Notes the group's operation count when the backward pass comes by.
struct Probe : torch::autograd::Function<Probe> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t note) {
    context->saved_data["note"] = note;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* note = reinterpret_cast<std::uint64_t*>(context->saved_data["note"].toInt());
    *note = default_group()->sequence_number();
    return {gradients[0], at::Tensor()};
  }
};

TEST(Ddp, ReducesABucketBeforeLaterGradientsAreComputed) {
  run_threads(2, [](int) {
    struct Probed : torch::nn::Module {
      Probed() {
        early = register_parameter("early", torch::ones({4}));
        late = register_parameter("late", torch::ones({4}));
      }
      at::Tensor forward(const at::Tensor& x) {
        return Probe::apply(x * early, reinterpret_cast<std::int64_t>(&seen)) * late;
      }
      at::Tensor early, late;
      std::uint64_t seen = 0;
    };
    auto model = DistributedDataParallel(std::make_shared<Probed>(), {.bucket_cap_mb = 0.00001});
    model->forward(torch::ones({4})).sum().backward();  // teaches the order
    const at::Tensor output = model->forward(torch::ones({4}));
    const std::uint64_t before = default_group()->sequence_number();
    output.sum().backward();
    EXPECT_EQ(model->module()->seen,
              before + 1);  // late's bucket was under way when early's gradient was computed
    EXPECT_EQ(default_group()->sequence_number(), before + 2);
  });
}

TEST(Ddp, StartsReductionsInTheSameOrderWhateverTheOrderOfGradients) {
  run_threads(3, [](int rank) {
    struct Branches : torch::nn::Module {
      Branches() {
        a = register_parameter("a", torch::ones({3}));
        b = register_parameter("b", torch::ones({5}));
      }
      at::Tensor forward(bool a_first) {
        // Autograd runs later-made nodes first.
        const at::Tensor one = a_first ? a.sum() : b.sum();
        const at::Tensor two = a_first ? b.sum() : a.sum();
        return one * 2 + two * 2;
      }
      at::Tensor a, b;
    };
    auto model = DistributedDataParallel(std::make_shared<Branches>(), {.bucket_cap_mb = 0.000004});
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      model->forward((rank + step) % 2 == 0).backward();
      EXPECT_TRUE(torch::equal(model->module()->a.grad(), torch::full({3}, 2.0)));
      EXPECT_TRUE(torch::equal(model->module()->b.grad(), torch::full({5}, 2.0)));
    }
    EXPECT_EQ(model->stats().bucket_bytes.size(), 2U);
  });
}

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    single = register_parameter("single", torch::ones({4}));
    half = register_parameter("half", torch::ones({4}, torch::kHalf));
    brain = register_parameter("brain", torch::ones({4}, torch::kBFloat16));
    twice = register_parameter("twice", torch::ones({4}, torch::kDouble));
    complex = register_parameter("complex", torch::ones({4}, torch::kComplexFloat));
    nothing = register_parameter("nothing", torch::ones({0}));
  }
  at::Tensor forward(double scale) {
    return single.sum() * scale + half.to(torch::kFloat).sum() * scale +
           brain.to(torch::kFloat).sum() * scale + twice.sum().to(torch::kFloat) * scale +
           (torch::real(complex).sum() + torch::imag(complex).sum() * 2) * scale + nothing.sum();
  }
  at::Tensor single, half, brain, twice, complex, nothing;
};

TEST(Ddp, KeepsElementTypesInBucketsOfTheirOwn) {
  for (const bool views : {false, true}) {
    run_threads(2, [&](int rank) {
      auto model = DistributedDataParallel(std::make_shared<MixedImpl>(), {.gradient_as_bucket_view = views});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        model->forward(rank == 0 ? 1.0 : 2.0).backward();
        const auto& m = *model->module();
        for (const auto& p : {m.single, m.half, m.brain, m.twice}) {
          EXPECT_TRUE(torch::equal(p.grad(), torch::full({4}, 1.5, p.options()))) << p.grad();
        }
        EXPECT_TRUE(torch::equal(m.complex.grad(),
                                 torch::full({4}, c10::complex<float>(1.5F, 3.0F), m.complex.options())));
        EXPECT_EQ(m.nothing.grad().numel(), 0);
      }
      EXPECT_EQ(model->stats().bucket_bytes.size(), 5U);
    });
  }
}

TEST(Ddp, KeepsTheStridesOfParameters) {
  for (const bool views : {false, true}) {
    run_threads(2, [&](int rank) {
      struct Strided : torch::nn::Module {
        Strided() {
          last =
              register_parameter("last", drawn(5, {2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
          turned = register_parameter("turned", drawn(6, {4, 3}).t());
        }
        at::Tensor forward(double s) { return (last * last).sum() * s + (turned * turned).sum() * s; }
        at::Tensor last, turned;
      };
      auto model = DistributedDataParallel(std::make_shared<Strided>(), {.gradient_as_bucket_view = views});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        model->forward(rank == 0 ? 1 : 3).backward();
        for (const auto& p : model->parameters()) {
          EXPECT_EQ(p.grad().strides(), p.strides());
          EXPECT_TRUE(torch::allclose(p.grad(), 4 * p.detach()));
        }
      }
    });
  }
}

}  // namespace
}  // namespace lockstep
