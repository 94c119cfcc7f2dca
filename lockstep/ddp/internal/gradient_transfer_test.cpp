#include "lockstep/ddp/internal/gradient_transfer.h"

#include "lockstep/ddp/internal/reducer_testing.h"

namespace lockstep::internal {
namespace {

using namespace reducer_testing;

// In a world of one nothing is reduced between deposit and deliver: `become` stands in for the reduction.
void become(Parts& parts, std::size_t index, double average) {
  const auto [b, slot] = parts.buckets.slot_of(index);
  parts.buckets[b].views[slot].fill_(average);
}

TEST(GradientTransfer, CopiesGradientsInAndAveragesBackToWhereTheyWere) {
  run_threads(1, [](int) {
    Parts parts(parameters_of_sizes({3, 2}), one_bucket());
    parts.transfer.begin({.access = &parts.field});
    parts.set_grad(0, 4);
    const void* const memory = parts.parameter(0).grad().const_data_ptr();
    parts.transfer.deposit(0, {}, {});
    parts.transfer.deposit(1, {}, {});
    EXPECT_EQ(parts.buckets[0].flat.sum().item<float>(), 12) << "no gradient: zeros";
    become(parts, 0, 6);
    become(parts, 1, 7);
    parts.transfer.deliver(0, {});
    parts.transfer.deliver(1, {});
    EXPECT_TRUE(parts.grad_is(0, 6));
    EXPECT_EQ(parts.parameter(0).grad().const_data_ptr(), memory);
    EXPECT_TRUE(parts.grad_is(1, 7)) << "it has one now";
    EXPECT_FALSE(parts.parameter(1).grad().is_alias_of(parts.buckets[0].flat));
  });
}

TEST(GradientTransfer, GradientsBecomeViewsWhenAskedButNotThoseOfAContext) {
  run_threads(1, [](int) {
    for (const bool in_context : {false, true}) {
      Parts parts(parameters_of_sizes({3}), one_bucket(), {.views = true});
      parts.transfer.begin({.access = &parts.field, .in_context = in_context});
      parts.set_grad(0, 4);
      parts.transfer.deposit(0, {}, {});
      become(parts, 0, 5);
      parts.transfer.deliver(0, {});
      EXPECT_TRUE(parts.grad_is(0, 5));
      EXPECT_EQ(parts.parameter(0).grad().is_alias_of(parts.buckets[0].flat), !in_context);
    }
  });
}

TEST(GradientTransfer, AViewThatWasReplacedMeanwhileIsAnError) {
  run_threads(1, [](int) {
    Parts parts(parameters_of_sizes({3}), one_bucket(), {.views = true});
    parts.transfer.begin({.access = &parts.field});
    parts.set_grad(0, 4);
    parts.transfer.deposit(0, {}, {});
    parts.set_grad(0, 4);
    EXPECT_TRUE(refuses(ErrorKind::kUsage, "0 (p0)", [&] { parts.transfer.deliver(0, {}); }));
  });
}

TEST(GradientTransfer, AnUnusedParameterKeepsItsGradient) {
  run_threads(1, [](int) {
    for (const bool views : {false, true}) {
      Parts parts(parameters_of_sizes({3}), one_bucket(), {.views = views});
      parts.transfer.begin({.access = &parts.field});
      parts.set_grad(0, 4);
      parts.transfer.deposit(0, {}, {.here = false});
      become(parts, 0, 0);
      parts.transfer.deliver(0, {.here = false, .anywhere = false});
      EXPECT_TRUE(parts.grad_is(0, 4)) << (views ? "views" : "copies");
      parts.transfer.end();
      parts.transfer.begin({.access = &parts.field, .shadow = true});
      parts.transfer.fill_zeros(0);
      parts.transfer.deliver(0, {.here = false, .anywhere = false});
      EXPECT_FALSE(parts.parameter(0).grad().defined()) << "in a shadowed pass it has none";
    }
  });
}

TEST(GradientTransfer, AnAverageThatIsUsedUpLeavesNoGradient) {
  run_threads(1, [](int) {
    Parts parts(parameters_of_sizes({3, 2}), one_bucket());
    std::vector<float> stepped;
    parts.transfer.on_average([&](const at::Tensor& parameter, const at::Tensor& average) {
      stepped.push_back(average[0].item<float>());
      return parameter.is_same(parts.parameter(0));
    });
    parts.transfer.begin({.access = &parts.field});
    for (const std::size_t index : {0, 1}) {
      parts.set_grad(index, 4);
      parts.transfer.deposit(index, {}, {});
      become(parts, index, 6);
      parts.transfer.deliver(index, {});
    }
    EXPECT_EQ(stepped, (std::vector<float>{6, 6}));
    EXPECT_FALSE(parts.parameter(0).grad().defined());
    EXPECT_TRUE(parts.grad_is(1, 6));
  });
}

TEST(GradientTransfer, LargeGradientsAreReducedWhereAutogradMadeThem) {
  run_threads(2, [](int) {
    Parts parts(parameters_of_sizes({100, 100}), one_bucket(1));
    parts.transfer.begin({.access = &parts.field});
    parts.parameter(0).mutable_grad() = parts.buckets.make_in_place(0).fill_(3);
    parts.set_grad(1, 3);  // in ordinary memory
    for (const std::size_t index : {0, 1}) parts.transfer.deposit(index, {}, {});
    EXPECT_EQ(parts.transfer.n_in_place(), 1U);
    const auto& views = parts.buckets[0].views;
    EXPECT_TRUE(views[parts.buckets.slot_of(0).index].is_alias_of(parts.parameter(0).grad()));
    EXPECT_FALSE(views[parts.buckets.slot_of(1).index].is_alias_of(parts.parameter(1).grad()));
    for (const std::size_t index : {0, 1}) {
      become(parts, index, 8);
      parts.transfer.deliver(index, {});
      EXPECT_TRUE(parts.grad_is(index, 8));
    }
    parts.transfer.release(0);
    EXPECT_FALSE(views[0].defined() || views[1].defined()) << "they are the gradients' alone";
  });
}

TEST(GradientTransfer, AGradientOfAnotherTypeOrSizeIsRefusedUnlessItIsCast) {
  run_threads(1, [](int) {
    for (const bool casts : {false, true}) {
      Parts parts(parameters_of_sizes({3}), one_bucket(), {.casts = casts});
      parts.transfer.begin({.access = &parts.field});
      parts.parameter(0).set_data(torch::ones({3}, torch::kDouble));
      parts.parameter(0).mutable_grad() = torch::full({3}, 2.0, torch::kDouble);
      const auto deposit = [&] { parts.transfer.deposit(0, {}, {}); };
      if (casts) {
        deposit();
        EXPECT_EQ(parts.buckets[0].flat.scalar_type(), torch::kFloat);
        EXPECT_EQ(parts.buckets[0].flat.sum().item<float>(), 6);
      } else {
        EXPECT_TRUE(refuses(ErrorKind::kUsage, "Double", deposit));
      }
    }
  });
}

TEST(GradientTransfer, ALocalGradientIsKeptInTheParametersOwnType) {
  run_threads(1, [](int) {
    Parts parts(parameters_of_sizes({3}), one_bucket());
    parts.parameter(0).set_data(torch::ones({3}, torch::kBFloat16));
    parts.set_grad(0, 2);
    parts.transfer.keep_local(0, parts.field);
    EXPECT_EQ(parts.parameter(0).grad().scalar_type(), torch::kFloat);
  });
}

TEST(GradientTransfer, ASparseGradientIsACopyDividedBeforehand) {
  run_threads(1, [](int) {
    NamedTensors named{{"table"}, {torch::ones({4, 2}).requires_grad_()}};
    Parts parts(named, {.group = default_group(), .sparse = {true}});
    parts.transfer.begin({.access = &parts.field, .divisor = 2});
    EXPECT_TRUE(
        refuses(ErrorKind::kUsage, "0 (table)", [&] { parts.transfer.deposit(0, {}, {.required = true}); }));
    parts.transfer.deposit(0, {}, {.required = false});
    EXPECT_EQ(parts.buckets[0].flat._nnz(), 0);
    const at::Tensor rows = torch::tensor({{1L}}), values = torch::full({1, 2}, 6.0f);
    const at::Tensor gradient = torch::sparse_coo_tensor(rows, values, {4, 2});
    parts.parameter(0).mutable_grad() = gradient;
    parts.transfer.deposit(0, {}, {});
    EXPECT_EQ(parts.buckets[0].flat.to_dense().sum().item<float>(), 6);
    EXPECT_EQ(gradient.to_dense().sum().item<float>(), 12) << "what was accumulated survives a failure";
    parts.transfer.deliver(0, {});
    EXPECT_EQ(parts.parameter(0).grad().to_dense().sum().item<float>(), 6);
  });
}

}  // namespace
}  // namespace lockstep::internal
